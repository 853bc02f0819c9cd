"""`metronome serve` and those who mean no good: what is no HTTP, too large, too slow, too many.

docs/internals/server-security.md says which test holds which class of advisories.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import SOON_SECONDS, WAIT_SECONDS
from support.raw_http import Said, answer_of, connect, request, say
from support.served import Served, forked

MODEL, KEY = "box", "secret-key-of-the-test"
OPTIONS = (
    "--num-threads", "1", "--max-model-len", "256", "--num-kv-blocks", "400", "--dtype", "float32",
    "--header-timeout", "1", "--body-timeout", "1", "--max-body-bytes", "1000000",
    "--max-requests-per-key", "3", "--max-n", "8",
)  # fmt: skip
INSIDE = re.compile(rb"0x[0-9a-f]{6,}|Traceback|site-packages|\.py\b|/home/|/root/|/tmp/")
POST = "POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
OLD_POST = "POST /v1/completions HTTP/1.0\r\n"
CHUNKS = "Transfer-Encoding: chunked\r\n"
NONE = "0\r\n\r\n"  # of them


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server writes."""
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Served]:
    variables = {"METRONOME_API_KEY": KEY, "METRONOME_LOG_LEVEL": "info"}
    with forked("--served-model-name", MODEL, *OPTIONS, log=log, **variables) as made:
        yield made


def ask(server: Served, path: str, fields: object, **headers: str) -> Said:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    bearer = {"Authorization": f"Bearer {KEY}", **headers}
    said = say(server.port, request(path, body, **bearer))
    assert said.status == 200 or not INSIDE.search(said.body), said.body
    return said


def complete(server: Served, **fields: object) -> Said:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 1, **fields}
    return ask(server, "/v1/completions", asked)


SMUGGLED = {
    "length and chunks": f"{POST}Content-Length: 5\r\n{CHUNKS}\r\n{NONE}",
    "chunks and length": f"{POST}{CHUNKS}Content-Length: 5\r\n\r\n{NONE}",
    "two lengths": f"{POST}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}",
    "a list of lengths": f"{POST}Content-Length: 2, 2\r\n\r\n{{}}",
    "a length with a sign": f"{POST}Content-Length: +2\r\n\r\n{{}}",
    "a negative length": f"{POST}Content-Length: -2\r\n\r\n{{}}",
    "a length of 100 bits": f"{POST}Content-Length: {2**100}\r\n\r\n{{}}",
    "chunks last but one": f"{POST}Transfer-Encoding: chunked, identity\r\n\r\n{NONE}",
    "chunks of another kind": f"{POST}Transfer-Encoding: xchunked\r\n\r\n{NONE}",
    "chunks twice": f"{POST}{CHUNKS}{CHUNKS}\r\n{NONE}",
    "chunks before 1.1": f"{OLD_POST}{CHUNKS}\r\n{NONE}",
    "a chunk that is no number": f"{POST}{CHUNKS}\r\nZZ\r\n{{}}\r\n{NONE}",
    "a chunk of 72 bits": f"{POST}{CHUNKS}\r\nffffffffffffffffff\r\n",
    "a length in the trailers": f"{POST}{CHUNKS}\r\n0\r\nContent-Length: 3\r\n\r\n",
    "a space before the colon": f"{POST}Content-Length : 2\r\n\r\n{{}}",
    "a folded header": f"{POST}X: a\r\n b\r\nContent-Length: 2\r\n\r\n{{}}",
    "bare line feeds": "GET /health HTTP/1.1\nHost: a\n\n",
    "a bare carriage return": "GET /health HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
    "a NUL": "GET /health HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
    "no host": "GET /health HTTP/1.1\r\n\r\n",
    "two hosts": "GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "HTTP/0.9": "GET /health\r\n\r\n",
    "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": "CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": "\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
    "a scanner": "\xff\x00\x01 RANDOM1STRING1\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_what_is_no_request_ends_its_connection(server: Served, name: str) -> None:
    """And nothing behind it on the same connection is taken for a request."""
    behind = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    said = say(server.port, SMUGGLED[name].encode("latin-1") + behind)
    assert said.status in (400, 505), said
    assert said.headers["connection"] == "close" and said.body.count(b"HTTP/1.1 ") < 2
    assert said.error["type"] in ("invalid_request_error", "server_error")


def test_what_stands_behind_a_request_is_no_part_of_its_answer(server: Served) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True})
    good = request("/v1/completions", body.encode(), Authorization=f"Bearer {KEY}")
    said = say(server.port, good + b"\x00\x01 garbage\r\n\r\n")
    assert said.status is None and said.is_closed
    assert say(server.port, request("/health")).status == 200


def test_an_offer_of_http_2_is_declined(server: Served) -> None:
    """Java's client offers it with every request; the body is read nevertheless."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    said = say(
        server.port,
        request(
            "/v1/completions", body, Authorization=f"Bearer {KEY}", Upgrade="h2c",
            Connection="Upgrade, HTTP2-Settings", HTTP2_Settings="AAMAAABkAAQAAP__",
        ),
    )  # fmt: skip
    assert said.status == 200 and json.loads(said.body)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * (64 << 20),
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 1_000_000,
        b"GET /" + b"a" * (64 << 20),
        b"GET /health HTTP/1.1\r\n" + b"a" * (64 << 20),
    ],
    ids=["one header", "many headers", "path", "name of a header"],
)
def test_headers_without_end(server: Served, head: bytes) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    before = memory().rss
    said = say(server.port, head)
    assert said.status == 431 and "limit" in said.error["message"]
    assert memory().rss - before < 20 << 20


@pytest.mark.parametrize("how", ["nothing", "dribbled", "blank lines", "second request"])
def test_slow_headers_have_a_deadline(server: Served, how: str) -> None:
    first = {
        "nothing": b"",
        "dribbled": b"GET /health HTTP/1.1\r\n",
        "blank lines": b"\r\n",
        "second request": request("/health") + b"GET /hea",
    }[how]
    with connect(server.port) as sock:
        began = time.monotonic()
        sock.sendall(first)
        if how == "second request":
            assert answer_of(sock, began).status == 200
        stop = threading.Event()
        piece = {"nothing": b"", "blank lines": b"\r\n"}.get(how, b"X")
        feeder = threading.Thread(target=dribble, args=(sock, piece, stop))
        feeder.start()
        said = answer_of(sock, began)
        stop.set()
        feeder.join()
    assert said.is_closed or said.status == 408, said
    assert 0.9 < said.seconds < SOON_SECONDS


def dribble(sock: socket.socket, piece: bytes, stop: threading.Event) -> None:
    while piece and not stop.wait(0.2):
        try:
            sock.sendall(piece)
        except OSError:
            return


def test_slow_bodies_have_a_deadline(server: Served) -> None:
    head = request("/v1/completions", b"{", Content_Length="500", Authorization=f"Bearer {KEY}")
    said = say(server.port, head, b"}" * 100, pause=0.2)
    assert said.status == 408 and "body" in said.error["message"]


def test_500_slow_connections_hold_up_nobody(server: Served) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    assert complete(server).status == 200
    before = memory().rss
    slow = [connect(server.port) for _ in range(500)]
    try:
        for sock in slow:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost:")
        began = time.monotonic()
        assert complete(server).status == 200
        assert time.monotonic() - began < SOON_SECONDS
        assert memory().rss - before < 50 << 20
        for sock in slow:
            assert answer_of(sock, began).status == 408
    finally:
        for sock in slow:
            sock.close()


def test_bodies_have_a_size(server: Served) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    before = memory().rss
    bearer = {"Authorization": f"Bearer {KEY}"}
    declared = say(
        server.port, request("/v1/completions", b"{", Content_Length=str(1 << 30), **bearer)
    )
    assert declared.status == 413 and declared.seconds < 2
    assert "1000000" in declared.error["message"]
    chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    head = f"{POST}Authorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert say(server.port, head, *[chunk] * 1000).status == 413
    unasked = say(server.port, request("/v1/completions", b"{", Content_Length=str(1 << 30)))
    assert unasked.status == 401  # before its body is read
    assert memory().rss - before < 20 << 20


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000, "true", '"1"', "[]", "{}"]
FIELDS = {
    "completions": [
        "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "logprobs", "priority",
        "timeout",
    ],
    "chat/completions": ["max_completion_tokens", "top_logprobs"],
}  # fmt: skip


@pytest.mark.parametrize("path", FIELDS)
def test_what_is_no_number_is_named(server: Served, path: str) -> None:
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user"}]}
    body = json.dumps({"model": MODEL, **prompt})[:-1]
    for field in FIELDS[path]:
        for number in NUMBERS:
            said = ask(server, f"/v1/{path}", f'{body}, "{field}": {number}}}'.encode())
            assert said.status == 400, (field, number, said)
            assert said.error["param"] == field and field in said.error["message"]


def test_numbers_at_their_edges_are_served_or_refused(server: Served) -> None:
    """None of them ends the engine, or any other request."""
    edges = [0, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30]
    reals = [-0.0, 5e-324, 1e308, -1e308, 2.0000001, 1e-30]
    for field in FIELDS["completions"]:
        for number in edges + reals:
            said = complete(server, **{"temperature": 1, field: number})
            is_late = field == "timeout" and said.status == 408
            assert said.status in (200, 400) or is_late, (field, number, said)
            if said.status == 400:
                assert field in said.error["message"], (number, said)
    for field in ("stop_token_ids", "allowed_token_ids"):
        for number in edges:
            assert complete(server, **{field: [number]}).status in (200, 400)
    for number in [*edges, "9" * 5000, "\u0663", "x", ""]:
        assert complete(server, logit_bias={str(number): 1}).status in (200, 400)
    assert complete(server).status == 200


DEEP = {
    "messages": ("chat/completions", '[{"role": "user", "content": %s}]'),
    "response_format": ("completions", '{"type": "json_schema", "json_schema": {"schema": %s}}'),
    "structured_outputs": ("completions", '{"json": {"a": %s}}'),
    "chat_template_kwargs": ("chat/completions", '{"a": %s}'),
    "logit_bias": ("completions", "%s"),
    "prompt": ("completions", "%s"),
    "unknown": ("completions", "%s"),
}


@pytest.mark.parametrize("field", DEEP)
@pytest.mark.parametrize("levels", [100, 990, 100_000])
def test_deep_json_is_refused(server: Served, field: str, levels: int) -> None:
    path, form = DEEP[field]
    fields = {"model": '"box"', "prompt": '"x"', "messages": '[{"role": "user", "content": "x"}]'}
    del fields["messages" if path == "completions" else "prompt"]
    for opening, closing in ("[]", ('{"a":', "}")):
        deep = opening * levels + "1" + closing * levels
        text = ", ".join(f'"{k}": {v}' for k, v in {**fields, field: form % deep}.items())
        said = ask(server, f"/v1/{path}", f"{{{text}}}".encode())
        assert said.status == 400 and said.seconds < 2
    assert complete(server).status == 200


MESSAGE = {"role": "user", "content": "x"}
LIMITS: list[tuple[str, str, Any, Any]] = [
    ("completions", "n", 8, 9),
    ("completions", "logprobs", 20, 21),
    ("completions", "logprobs", 0, -1),
    ("completions", "stop", ["a"] * 64, ["a"] * 65),
    ("completions", "stop", "a" * 1024, "a" * 1025),
    ("completions", "bad_words", ["a" * 1024], ["a" * 1025]),
    ("completions", "bad_words", ["a"] * 1024, ["a"] * 1025),
    ("completions", "stop_token_ids", [1] * 4096, [1] * 4097),
    (
        "completions",
        "logit_bias",
        {str(i): 0 for i in range(256)},
        {str(i): 0 for i in range(5000)},
    ),
    ("completions", "user", "a" * 1024, "a" * 1025),
    ("completions", "cache_salt", "a" * 1024, "a" * 1025),
    ("completions", "prompt", ["x"] * 256, ["x"] * 257),
    ("chat/completions", "messages", [MESSAGE], [MESSAGE] * 8193),
]


@pytest.mark.parametrize("case", range(len(LIMITS)), ids=lambda i: f"{LIMITS[i][1]}-{i}")
def test_limits_are_named_before_any_work(server: Served, case: int) -> None:
    path, field, good, over = LIMITS[case]
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [MESSAGE]}
    asked = {"model": MODEL, "max_tokens": 1, **prompt}
    assert ask(server, f"/v1/{path}", {**asked, field: good}).status == 200
    said = ask(server, f"/v1/{path}", {**asked, field: over})
    assert said.status == 400 and said.error["param"] == field and field in said.error["message"]
    assert said.seconds < 0.5
    if field == "n":
        assert ask(server, f"/v1/{path}", {**asked, "n": 10**9}).seconds < 0.5


def test_one_key_has_so_many_requests_at_a_time(server: Served) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
    bearer = {"Authorization": f"Bearer {KEY}"}
    stream = request("/v1/completions", json.dumps(asked).encode(), **bearer)
    open_ones = [connect(server.port) for _ in range(3)]
    for sock in open_ones:
        sock.sendall(stream)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
    said = complete(server)
    assert said.status == 429 and said.error["type"] == "rate_limit_error"
    assert int(said.headers["retry-after"]) >= 1
    assert say(server.port, request("/health")).status == 200
    for sock in open_ones:
        sock.close()
    end = time.monotonic() + WAIT_SECONDS
    while complete(server).status == 429:
        assert time.monotonic() < end


def test_requests_have_names(server: Served) -> None:
    named = ask(
        server, "/v1/completions", {"model": MODEL, "prompt": "x"}, X_Request_Id="a.B:1_2-3"
    )
    assert named.headers["x-request-id"] == "a.b:1_2-3"  # lowered by the test's own reader
    assert json.loads(named.body)["id"] == "cmpl-a.B:1_2-3"
    for strange in ("../../etc/passwd", "a" * 129, "%n%s", "<script>", "caf\u00e9", "a b"):
        said = ask(server, "/v1/completions", {"model": MODEL, "prompt": "x"}, X_Request_Id=strange)
        assert said.status == 200 and re.fullmatch("[0-9a-f]{32}", said.headers["x-request-id"])
    for answer in (
        say(server.port, request("/health")),
        say(server.port, request("/v1/models")),
        ask(server, "/v1/nothing", {}),
        ask(server, "/v1/models", {}),
        complete(server, n=0),
    ):
        assert answer.headers["x-request-id"]


def operations(server: Served) -> list[tuple[str, str]]:
    """Methods and paths of all that there is."""
    document = json.loads(
        say(server.port, request("/openapi.json", Authorization=f"Bearer {KEY}")).body
    )
    return [
        (method.upper(), path.replace("{name}", MODEL))
        for path, methods in document["paths"].items()
        for method in methods
    ]


HOSTS = [
    "a/?", "a/health?", "a#", "a/../health", "@a", "[::1", "a:99999", "%2e%2e", "a\\b", "a, b", "",
]  # fmt: skip
TARGETS = [
    "{}", "//a{}", "/{}", "{}?x=/health", "/health/..{}", "/health%2f..{}", "/health;{}",
    "http://a{}", "http://a/health{}",
]  # fmt: skip


def bare(method: str, target: str, host: str = "a") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode()


def test_without_a_key_nothing_but_health_is_told(server: Served) -> None:
    """Whatever the Host header and the target say: what is matched is what is guarded."""
    open_paths = {"/", "/health", "/ready", "/ping", "/version", "/api/version"}
    found = operations(server)
    assert len(found) > 10
    for method, path in found:
        if path in open_paths:
            continue
        for host in HOSTS:
            assert say(server.port, bare(method, path, host)).status == 401, (path, host)
        for target in TARGETS:
            status = say(server.port, bare(method, target.format(path))).status
            assert status in (400, 401), (path, target)
        for other in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert say(server.port, bare(other, path)).status == 401


@pytest.mark.parametrize(
    "shown",
    [
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer  {KEY}",
        f"Bearer {KEY.upper()}",
    ],
)
def test_a_key_is_whole_or_none(server: Served, shown: str) -> None:
    said = say(server.port, request("/v1/models", Authorization=shown))
    assert said.status == 401 and KEY.encode() not in said.body


def test_pages_of_other_sites_ask_for_nothing(server: Served) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    origin = {"Origin": "https://evil.example", "Content_Type": "text/plain"}
    said = ask(server, "/v1/completions", asked, Sec_Fetch_Site="cross-site", **origin)
    assert said.status == 403
    preflight = "OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\nOrigin: https://evil.example\r\n"
    bearer = f"Authorization: Bearer {KEY}\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    answer = say(server.port, (preflight + bearer).encode())
    assert answer.status == 405 and answer.headers["allow"]
    good = ask(server, "/v1/completions", asked, **origin)
    assert good.status == 200
    for each in (said, answer, good):
        assert not any(name.startswith("access-control") for name in each.headers)


def test_names_are_shown_escaped_and_lead_nowhere(server: Served) -> None:
    for name in ("../../etc/passwd", "a\u0000b", "x" * 5000, "%n%s", "\n", "\u202e", "{{ 7 * 7 }}"):
        said = complete(server, model=name)
        assert said.status == 404 and len(said.body) < 1000 and b"root:" not in said.body
        assert b"\n" not in said.body and b"49" not in said.body
        quoted = urllib.parse.quote(name[:1000], safe="")
        bearer = f"Bearer {KEY}"
        said = say(server.port, request(f"/v1/models/{quoted}", Authorization=bearer))
        assert said.status == 404 and len(said.body) < 1000


def test_templates_of_requests_are_refused(server: Served) -> None:
    chat = {"model": MODEL, "messages": [MESSAGE], "max_tokens": 1}
    for fields in (
        {"chat_template": "{{ 7 * 7 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ):
        said = ask(server, "/v1/chat/completions", {**chat, **fields})
        assert said.status == 400 and "chat_template" in said.error["message"]
    for fields in ({"tokenize": True}, {"tokenizer": 1}, {"cls": 1}, {"loop": 1}, {" budget": 1}):
        said = ask(server, "/v1/chat/completions", {**chat, "chat_template_kwargs": fields})
        assert said.status in (200, 400)
    hurt = {"role": "{{ 7 * 7 }}", "content": "{% for x in range(9999999) %}"}
    assert ask(server, "/v1/chat/completions", {**chat, "messages": [hurt]}).status in (200, 400)


def test_it_listens_where_it_was_told_and_nowhere_else(server: Served) -> None:
    process = psutil.Process(server.process.pid)
    listening = [
        (each.laddr.ip, each.laddr.port)
        for one in (process, *process.children(recursive=True))
        for each in one.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert listening == [("127.0.0.1", server.port)]


def test_neither_keys_nor_prompts_are_logged(server: Served, log: Path) -> None:
    """The last of this file: the log is that of all of them."""
    marker = "a-prompt-that-is-nobodys-business"
    assert complete(server, prompt=marker).status == 200
    assert complete(server, prompt=marker, temperature=-1).status == 400
    assert complete(server, prompt=[marker, 1]).status == 400
    message = {"role": "user", "content": marker}
    asked = {"model": MODEL, "messages": [message], "max_tokens": 1, "tools": [{}]}
    assert ask(server, "/v1/chat/completions", asked).status == 400
    written = log.read_text(encoding="utf-8", errors="replace")
    assert "is served at" in written
    for secret in (KEY, marker, "Traceback"):
        assert secret not in written
