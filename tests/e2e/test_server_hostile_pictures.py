"""Hostile pictures and URLs get a 400 that says why, in bounded memory, and hurt no other request.

Nothing is connected to but the addresses that the list allows.
"""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e.picture_requests import (
    COMMON,
    FILE,
    GREEDY,
    NAME,
    chat,
    data_url,
    fill_folder,
    shown,
    text,
    user,
)
from e2e.seeing_models import make_seeing_model
from support.hostile_pictures import BROKEN, NO_PICTURE, STRANGE, WRONG, black, truncated
from support.listeners import Listener, answered, drip, redirect, silent, sized
from support.made_names import resolve_names
from support.served import Served, forked, served

psutil = pytest.importorskip("psutil")
trustme = pytest.importorskip("trustme")
ALLOWED = "127.0.0.3"
ONE_PORT = "127.0.0.4"
"""An address that the list allows with one port."""
NAMES = {
    "pictures.example": ["127.0.0.2", "10.0.0.1", ALLOWED],
    "loopback.example": ["127.0.0.1", "127.0.0.2"],
    "inner.example": ["10.0.0.1", "192.168.0.1", "fd00::1", "169.254.169.254"],
    "mapped.example": ["::ffff:127.0.0.2", "2002:7f00:2::", "64:ff9b::7f00:2"],
    "zero.example": ["0.0.0.0", "::"],
    "nowhere.example": [],
}
"""Names that the list has, and their addresses."""
BODY_BYTES = 48 << 20  # the limit for a request
MOST_GROWTH = 500 << 20  # bytes by which all of it may raise the memory of the server


class Hosts(NamedTuple):
    """Servers of pictures by their answers, and some that the list does not allow."""

    answers: dict[str, Listener]
    one_port: Listener
    other_port: Listener
    closed: Listener


class Authority(NamedTuple):
    """The file with its certificate, and what a server with a certificate of it needs."""

    file: Path
    context: ssl.SSLContext


def endless(connection: socket.socket, request: bytes) -> None:
    connection.sendall(answered(b""))
    while True:
        connection.sendall(bytes(1 << 20))


def endless_chunks(connection: socket.socket, request: bytes) -> None:
    connection.sendall(answered(b"", "Transfer-Encoding: chunked"))
    while True:
        connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")


ANSWERS: dict[str, bytes | Callable[[socket.socket, bytes], object]] = {
    "good": sized(FILE),
    "large": answered(b"", f"Content-Length: {1 << 30}"),
    "larger": answered(b"", f"Content-Length: {1 << 70}"),
    "negative": answered(FILE, "Content-Length: -1"),
    "endless": endless,
    "chunks": endless_chunks,
    "chunk": answered(b"ffffffffffffffff\r\n" + FILE, "Transfer-Encoding: chunked"),
    "wrong_chunk": answered(b"-5\r\n" + FILE, "Transfer-Encoding: chunked"),
    "packed": answered(b"\x1f\x8b\x08\0" + bytes(99), "Content-Encoding: gzip"),
    "half": answered(FILE[:50], f"Content-Length: {len(FILE)}"),
    "missing": answered(b"", status="404 Not Found"),
    "forbidden": answered(FILE, status="403 Forbidden"),
    "partial": answered(FILE, status="206 Partial Content"),
    "empty": sized(b""),
    "page": sized(b"<html>sign in</html>"),
    "silent": b"",
    "mail": b"220 mail.example ESMTP\r\n",
    "headers": answered(b"", *["X: y"] * 200),
    "long_header": answered(b"", "X: " + "y" * 99_999),
    "around": redirect("/again"),
    "to_file": redirect("file:///etc/passwd"),
    "to_data": redirect("data:image/png;base64,AAAA"),
    "to_ftp": redirect("ftp://127.0.0.3/"),
    "to_nothing": answered(b"", status="302 Found"),
    "to_user": redirect("http://a:b@127.0.0.3/"),
    "to_name": redirect("http://loopback.example/"),
    "to_metadata": redirect("http://169.254.169.254/latest/meta-data/"),
}
REFUSED = "is not allowed"
NOT_PUBLIC = "has only addresses that are not public"
NO_FILE = "must be a file in the directory"
NO_BASE64 = "not valid base64"
URLS: dict[str, tuple[str, str]] = {
    # other addresses, however they are written
    "another address": ("http://127.0.0.2:{closed}/", REFUSED),
    "name of this machine": ("http://localhost:{closed}/", REFUSED),
    "metadata": ("http://169.254.169.254/latest/meta-data/", REFUSED),
    "no address": ("http://0.0.0.0:{closed}/", REFUSED),
    "short": ("http://127.2:{closed}/", REFUSED),
    "number": ("http://2130706434:{closed}/", REFUSED),
    "octal": ("http://0177.0.0.2:{closed}/", REFUSED),
    "octal number": ("http://017700000002:{closed}/", REFUSED),
    "hexadecimal": ("http://0x7f.0.0.2:{closed}/", REFUSED),
    "hexadecimal number": ("http://0x7f000002:{closed}/", REFUSED),
    "zeros before": ("http://127.000.000.002:{closed}/", REFUSED),
    "IPv6": ("http://[::1]:{closed}/", REFUSED),
    "IPv6 without an address": ("http://[::]:{closed}/", REFUSED),
    "IPv6 with a zone": ("http://[fe80::1%25lo]:{closed}/", REFUSED),
    "IPv4 in IPv6": ("http://[::ffff:127.0.0.2]:{closed}/", REFUSED),
    "IPv4 in IPv6, hexadecimal": ("http://[::ffff:7f00:2]:{closed}/", REFUSED),
    "full width": ("http://\uff11\uff12\uff17.0.0.2:{closed}/", "percent-encoded"),
    "dot of another script": ("http://127\u30020\u30020\u30022:{closed}/", "percent-encoded"),
    "percent in the host": ("http://127%2e0%2e0%2e2:{closed}/", REFUSED),
    "allowed name as a part": ("http://127.0.0.3.nip.io:{closed}/", REFUSED),
    "allowed name in the path": ("http://127.0.0.2:{closed}/127.0.0.3", REFUSED),
    "port that the list lacks": ("http://127.0.0.4:{other_port}/", REFUSED),
    # names that have addresses of this machine or network
    "name of loopback": ("http://loopback.example:{closed}/", NOT_PUBLIC),
    "name in capitals, with a dot": ("http://LOOPBACK.example.:{closed}/", NOT_PUBLIC),
    "name of a private network": ("http://inner.example:{closed}/", NOT_PUBLIC),
    "name of IPv4 in IPv6": ("http://mapped.example:{closed}/", NOT_PUBLIC),
    "name of no address": ("http://zero.example:{closed}/", NOT_PUBLIC),
    "name without an address": ("http://nowhere.example:{closed}/", "has no address"),
    # credentials, and URLs that parsers read in different ways
    "user": ("http://127.0.0.3@127.0.0.2:{closed}/", "user name or password"),
    "user and password": ("http://a:b@127.0.0.3/", "user name or password"),
    "empty user": ("http://@127.0.0.3/", "user name or password"),
    "fragment before a user": ("http://127.0.0.3#@127.0.0.2:{closed}/", "refused"),
    "backslash": ("http://127.0.0.3\\@127.0.0.2:{closed}/", "percent-encoded"),
    "line end": ("http://127.0.0.3/\r\nHost: x", "percent-encoded"),
    "tab in the host": ("http://127.0.0.\t2:{closed}/", "percent-encoded"),
    "space": ("http://127.0.0.3/ HTTP/1.1", "percent-encoded"),
    "no host": ("http:///a.png", "has no host"),
    "one slash": ("http:/127.0.0.2/a.png", "has no host"),
    "half a bracket": ("http://[::1/a.png", "is malformed"),
    "large port": ("http://127.0.0.3:70000/", "is malformed"),
    "negative port": ("http://127.0.0.3:-1/", "is malformed"),
    "port of letters": ("http://127.0.0.3:http/", "is malformed"),
    "long": ("http://127.0.0.3/" + "a" * 9000, "the limit is 8192"),
    "closed port": ("http://127.0.0.3:1/", "refused"),
    "TLS to a server without it": ("https{page_rest}", "SSL"),
    # answers
    "a gigabyte": ("{large}", "more than 67108864 bytes"),
    "a zettabyte": ("{larger}", "more than 67108864 bytes"),
    "a body without an end": ("{endless}", "more than 67108864 bytes"),
    "chunks without an end": ("{chunks}", "more than 67108864 bytes"),
    "a chunk of 2**64 bytes": ("{chunk}", "cannot be loaded"),
    "a chunk of -5 bytes": ("{wrong_chunk}", "cannot be loaded"),
    "a compressed body": ("{packed}", "gzip"),
    "half a body": ("{half}", "are missing"),
    "a missing file": ("{missing}", "status 404"),
    "a forbidden file": ("{forbidden}", "status 403"),
    "a part of a file": ("{partial}", "status 206"),
    "nothing": ("{empty}", NO_PICTURE),
    "a page": ("{page}", NO_PICTURE),
    "no answer": ("{silent}", "cannot be loaded"),
    "no HTTP": ("{mail}", "cannot be loaded"),
    "200 headers": ("{headers}", "cannot be loaded"),
    "a long header": ("{long_header}", "cannot be loaded"),
    # redirects
    "redirect to another address": ("{inward}", REFUSED),
    "redirect to loopback by its name": ("{to_name}", NOT_PUBLIC),
    "redirect to metadata": ("{to_metadata}", REFUSED),
    "redirect to itself": ("{around}", "more than 3 redirects"),
    "redirect to a file": ("{to_file}", "not http or https"),
    "redirect to data": ("{to_data}", "not http or https"),
    "redirect to FTP": ("{to_ftp}", "not http or https"),
    "redirect to nothing": ("{to_nothing}", "not http or https"),
    "redirect from https to http": ("{downgrade}", "from https to http"),
    "redirect with a user": ("{to_user}", "user name or password"),
    # files
    "file": ("file:///etc/passwd", NO_FILE),
    "file in capitals": ("FILE:///etc/passwd", NO_FILE),
    "file of a host": ("file://127.0.0.2/etc/passwd", "names a host"),
    "file of the process": ("file:///proc/self/environ", NO_FILE),
    "path": ("/etc/passwd", NO_FILE),
    "path out of the directory": ("{folder}/../../../etc/passwd", NO_FILE),
    "escaped path": ("file://{folder}/%2e%2e/%2e%2e/etc/passwd", NO_FILE),
    "path with a zero byte": ("file://{folder}/shown.png%00", NO_FILE),
    "link out of the directory": ("file://{folder}/out", NO_FILE),
    "directory": ("{folder}", NO_FILE),
    # other schemes
    "FTP": ("ftp://127.0.0.2/a.png", "must be a data URL"),
    "gopher": ("gopher://127.0.0.2/a", "must be a data URL"),
    "script": ("javascript:alert(1)", "must be a data URL"),
    "blob": ("blob:http://127.0.0.2/a", "must be a data URL"),
    "scheme of another scheme": ("url:http://127.0.0.2:{closed}/", "must be a data URL"),
    "space before": (" http://127.0.0.2:{closed}/", "must be a data URL"),
    "name": ("picture.png", "must be a data URL"),
    "no scheme": ("//127.0.0.2:{closed}/a.png", NO_FILE),
    # data
    "no content": ("data:image/png;base64,", "has no content"),
    "only spaces": ("data:image/png;base64, \n ", "has no content"),
    "other letters": ("data:image/png;base64,&&&&", NO_BASE64),
    "one letter": ("data:image/png;base64,a", NO_BASE64),
    "no padding": ("data:image/png;base64,aGk", NO_BASE64),
    "too much padding": ("data:image/png;base64,aGk======", NO_BASE64),
    "padding inside": ("data:image/png;base64,aGk=aGk=", NO_BASE64),
    "alphabet of URLs": ("data:image/png;base64,_-_-", NO_BASE64),
    "percent": ("data:image/png;base64,aGk%3D", NO_BASE64),
    "letters of other scripts": ("data:image/png;base64,\u0430Gk=", NO_BASE64),
    "zero byte": ("data:image/png;base64,aGk=\0", NO_BASE64),
    "not base64": ("data:image/png,%89PNG", "must be in base64"),
    "base64 not at the end": ("data:image/png;base64;a=b,aGk=", "must be in base64"),
    "no comma": ("data:image/png;base64", "must be in base64"),
    "long type": (f"data:image/{'a' * 9000};base64,aGk=", "must be in base64"),
    "many parameters": (f"data:image/png{';a=b' * 9000};base64,aGk=", "must be in base64"),
}
PARTS: dict[str, tuple[Any, str]] = {
    "stored file": ({"type": "input_image", "file_id": "file-1"}, "file_id 'file-1'"),
    "detail": (shown(data_url(FILE), detail="huge"), "detail 'huge', must be one of"),
    "no URL": ({"type": "image_url", "image_url": {}}, "without a picture"),
    "number": (shown(5), "must be a URL"),
    "list": (shown([data_url(FILE)]), "must be a URL"),
    "video": ({"type": "video_url", "video_url": {"url": "data:"}}, "'video_url', which is not"),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificate of the allowed address."""
    maker = trustme.CA()
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    maker.cert_pem.write_to_path(str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    maker.issue_cert(ALLOWED).configure_cert(context)
    return Authority(file, context)


@pytest.fixture(scope="module")
def hosts(authority: Authority) -> Iterator[Hosts]:
    with ExitStack() as stack:

        def listener(
            answer: Any, address: str = ALLOWED, tls: ssl.SSLContext | None = None
        ) -> Listener:
            made = Listener(answer, address, tls=tls)
            stack.callback(made.close)
            return made

        closed = listener(sized(FILE), "0.0.0.0")  # at each address of this machine
        answers = {name: listener(answer) for name, answer in ANSWERS.items()}
        answers["inward"] = listener(redirect(f"http://127.0.0.2:{closed.port}/secret"))
        answers["secure"] = listener(sized(FILE), tls=authority.context)
        downgrade = redirect(answers["good"].url)
        answers["downgrade"] = listener(downgrade, tls=authority.context)
        one_port, other_port = (listener(sized(FILE), ONE_PORT) for _ in range(2))
        yield Hosts(answers, one_port, other_port, closed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing"), "smolvlm")


@pytest.fixture(scope="module")
def server(path: Path, hosts: Hosts, folder: Path, authority: Authority) -> Iterator[Served]:
    domains = (ALLOWED, f"{ONE_PORT}:{hosts.one_port.port}", *NAMES)
    options = ("--model", str(path), "--served-model-name", NAME, *COMMON)
    options += ("--allowed-media-domains", *domains, "--allowed-local-media-path", str(folder))
    options += ("--max-body-bytes", str(BODY_BYTES))
    prepare = partial(resolve_names, NAMES)
    with forked(*options, prepare=prepare, SSL_CERT_FILE=str(authority.file)) as made:
        yield made


@pytest.fixture(scope="module")
def places(hosts: Hosts, folder: Path) -> dict[str, Any]:
    """The values for the fields of ``URLS``."""
    found: dict[str, Any] = {name: each.url for name, each in hosts.answers.items()}
    found["page_rest"] = found["page"].removeprefix("http")
    ports = {"closed": hosts.closed.port, "other_port": hosts.other_port.port}
    return {**found, **ports, "folder": folder}


def processes(server: Served) -> list[Path]:
    """The directories in /proc of the server's processes."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [Path(f"/proc/{pid}") for pid in (server.process.pid, *(each.pid for each in children))]


def peak_of(server: Served) -> int:
    """The largest memory of each of the server's processes so far, in bytes together."""
    found = [(each / "status").read_text().partition("VmHWM:")[2] for each in processes(server)]
    return sum(int(each.split()[0]) << 10 for each in found)


def forget_peak_of(server: Served) -> int:
    """Let ``peak_of`` begin anew, since tests before had peaks of their own. Returns it."""
    for each in processes(server):
        (each / "clear_refs").write_text("5")
    return peak_of(server)


def answer_to(server: Served, part: Any) -> Any:
    body = {"model": NAME, "messages": user(part, text("what?")), **GREEDY}
    return server.ask("/v1/chat/completions", body)


def problem(server: Served, name: str, part: Any, reasons: str) -> str | None:
    """Why the answer to a hostile part is wrong; ``None``: it is a 400 with a reason."""
    answer = answer_to(server, part)
    error = answer.json.get("error", {})
    message = str(error.get("message"))
    is_right = answer.status == 400 and error.get("param") == "messages"
    is_right = is_right and "multi_modal_data" not in message
    if is_right and any(each in message for each in reasons.split("|")):
        return None
    return f"{name}: {answer.status} {message}"


def problems(server: Served, cases: dict[str, tuple[Any, str]]) -> list[str]:
    """Why answers to hostile parts are wrong. These are sent four at a time, while other requests
    are answered."""
    healthy = user(shown(data_url(FILE)), text("what?"))
    wanted = chat(server, healthy)["choices"]
    before = forget_peak_of(server)
    is_over = threading.Event()

    def ask_on() -> int:
        count = 0
        while not is_over.is_set():
            assert chat(server, healthy)["choices"] == wanted
            count += 1
        return count

    with ThreadPoolExecutor(5) as threads:
        others = threads.submit(ask_on)
        sent = [
            threads.submit(problem, server, name, part, reasons)
            for name, (part, reasons) in cases.items()
        ]
        try:
            found = [each.result() for each in sent]
        finally:
            is_over.set()
        assert others.result() > 0
    assert peak_of(server) - before < MOST_GROWTH
    return [each for each in found if each is not None]


FILES = {name: (shown(data_url(file)), why) for name, (file, why) in WRONG.items()}
HALVES = {name: (shown(data_url(file)), BROKEN) for name, file in truncated()}


@pytest.mark.parametrize("cases", [FILES, HALVES], ids=["wrong", "truncated"])
def test_files(server: Served, cases: dict[str, Any]) -> None:
    assert len(cases) > 40
    assert not problems(server, cases)


def test_urls_and_parts(server: Served, hosts: Hosts, places: dict[str, Any]) -> None:
    cases = {name: (shown(url.format(**places)), why) for name, (url, why) in URLS.items()}
    assert len(cases) > 40
    assert not problems(server, {**cases, **PARTS})
    assert not hosts.closed.requests and not hosts.other_port.requests


def test_strange_pictures_are_answered(server: Served) -> None:
    before = forget_peak_of(server)
    statuses = {
        name: answer_to(server, shown(data_url(file))).status for name, file in STRANGE.items()
    }
    assert set(statuses.values()) == {200}, statuses
    assert peak_of(server) - before < MOST_GROWTH


def test_allowed_hosts_are_used_however_they_are_written(server: Served, hosts: Hosts) -> None:
    """The type in a data URL and the name of the host change nothing."""
    wanted = chat(server, user(shown(data_url(FILE)), text("what?")))["choices"]
    port, content = hosts.answers["good"].port, base64.b64encode(FILE).decode()
    for url in (
        f"http://{ALLOWED}:{port}/a?b=c#d",
        f"HTTP://pictures.example.:{port}/",
        hosts.answers["negative"].url,
        hosts.answers["secure"].url,
        hosts.one_port.url,
        data_url(FILE, "text/html"),
        data_url(FILE, "image/svg+xml;charset=utf-8"),
        f"data:;base64,{content}",
        f"DATA:image/png;base64,{content[:40]}\n {content[40:]}",
    ):
        assert chat(server, user(shown(url), text("what?")))["choices"] == wanted, url
    assert not hosts.closed.requests


def test_a_body_that_is_too_large_is_refused(server: Served) -> None:
    with suppress(BrokenPipeError, ConnectionError):
        answer = answer_to(server, shown("data:image/png;base64," + "A" * (BODY_BYTES + 9)))
        assert answer.status == 413
    chat(server, user(shown(data_url(FILE))))


def endless_trailers(connection: socket.socket, request: bytes) -> None:
    connection.sendall(answered(b"0\r\n", "Transfer-Encoding: chunked"))
    while True:
        connection.sendall(b"X: y\r\n" * 99)


def endless_promises(connection: socket.socket, request: bytes) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 99)


@pytest.mark.slow
def test_files_that_other_processes_decode(path: Path) -> None:
    options = ("--model", str(path), "--served-model-name", NAME, *COMMON, "--multiprocess")
    with served(*options, "--tokenizer-pool-size", "2") as server:
        before = {child.pid for child in psutil.Process(server.process.pid).children()}
        assert not problems(server, {**FILES, **HALVES})
        for file in STRANGE.values():
            assert answer_to(server, shown(data_url(file))).status == 200
        assert {child.pid for child in psutil.Process(server.process.pid).children()} == before


@pytest.mark.slow
def test_hosts_that_never_end_are_left(server: Served) -> None:
    with ExitStack() as stack:
        cases = {}
        for answer in (drip, endless_trailers, endless_promises, silent):
            host = Listener(answer, ALLOWED)
            stack.callback(host.close)
            cases[answer.__name__] = (shown(host.url), "takes longer than 10 s")
        assert not problems(server, cases)


@pytest.mark.slow
def test_the_largest_pictures_are_decoded_one_after_the_other(server: Served) -> None:
    before = forget_peak_of(server)
    parts = [shown(data_url(black(8000 + i, 8000))) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(partial(answer_to, server), parts))
    assert [each.status for each in answers] == [200] * 4
    assert peak_of(server) - before < 3 << 30
