"""The log of a server: a line for each request, and no request that waits for its readers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import pytest
from support.patience import WAIT_SECONDS
from support.processes import tree_of
from support.served import Served, forked, served

from engine.server.callers import Caller
from engine.server.records import RequestRecord
from engine.server.request_log import as_json, as_text

OPTIONS = ("--num-threads", "1", "--max-model-len", "1024")
SECRET = "the words of a prompt"
KEY = {"Authorization": "Bearer a-key"}
FIVE = {"model": "box", "prompt": "a", "max_tokens": 5}


class Log:
    """What a server has written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text()
        assert SECRET not in text and "a-key" not in text
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def of(self, name: str) -> dict[str, Any]:
        """The only line of the request of this name, once it is there."""
        end = time.monotonic() + WAIT_SECONDS
        while not (found := [line for line in self.lines() if line["id"] == name]):
            assert time.monotonic() < end, name
            time.sleep(0.05)
        (line,) = found
        return line


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("log") / "stderr")


@pytest.fixture(scope="module")
def server(log: Log) -> Iterator[Served]:
    options = ("--request-log", "json", "--log-level", "warning", "--api-key", "a-key")
    with forked(*OPTIONS, *options, log=log.path) as made:
        yield made


def test_a_request_is_one_line_with_its_figures(server: Served, log: Log) -> None:
    body = {"model": "box", "prompt": SECRET, "max_tokens": 7, "ignore_eos": True}
    assert server.ask("/v1/completions", body, X_Request_Id="whole", **KEY).status == 200
    stream, path = {**body, "stream": True, "n": 2}, "/v1/completions?key=a-key"
    assert server.ask(path, stream, X_Request_Id="parts", **KEY).status == 200
    for name, num_texts in (("whole", 1), ("parts", 2)):
        line = log.of(name)
        assert (line["method"], line["path"]) == ("POST", "/v1/completions")
        assert (line["status"], line["finish_reason"]) == (200, "length")
        assert line["output_tokens"] == 7 * num_texts
        assert 0 < line["first_token_seconds"] <= line["total_seconds"]
        assert line["prompt_tokens"] > 2 and line["cached_tokens"] >= 0
        assert "error" not in line and "client_left" not in line
        assert line["key"] == sha256(b"a-key").hexdigest()[:12] and "user" not in line


def test_the_user_is_logged_and_forges_no_other_value() -> None:
    record = RequestRecord("x", "POST", "/v1/completions", 0.0, 200)
    record.caller = Caller("0123456789ab", user="ann status=500\nINFO")
    assert json.loads(as_json(record))["user"] == "ann status=500\nINFO"
    assert "key=0123456789ab user=ann%20status%3D500%0AINFO total=" in as_text(record)
    record.caller.user = "u" * 1000
    assert len(record.fields()["user"]) == 64


def test_refusals_are_lines_with_their_code(server: Served, log: Log) -> None:
    body = {"model": "box", "prompt": SECRET, "max_tokens": 7}

    def refused(name: str, path: str, body: Any, **headers: str) -> dict[str, Any]:
        status = server.ask(path, body, X_Request_Id=name, **headers).status
        line = log.of(name)
        assert line["status"] == status and "finish_reason" not in line
        return line

    assert refused("no-key", "/v1/completions", body)["error"] == "invalid_api_key"
    wrong = refused("wrong", "/v1/completions", {**body, "max_tokens": -5}, **KEY)
    assert wrong["status"] == 400 and wrong["param"] == "max_tokens" and wrong["error"]
    model = refused("model", "/v1/completions", {**body, "model": SECRET}, **KEY)
    assert (model["status"], model["error"]) == (404, "model_not_found")
    lost = refused("lost", "/no/such%0a%7bpath", body, **KEY)
    assert (lost["status"], lost["path"]) == (404, "/no/such%0a%7bpath")


def test_what_is_no_request_is_a_line_too(server: Served, log: Log) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"NONSENSE\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert log.of("-")["status"] == 400


@pytest.mark.parametrize("is_stream", [True, False])
def test_who_leaves_is_named(server: Served, log: Log, is_stream: bool) -> None:
    name = f"left-{is_stream}"
    body = {
        "model": "box", "prompt": "a", "max_tokens": 900, "ignore_eos": True,
        "stream": is_stream,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: {name}\r\n"
        "Content-Type: application/json\r\nAuthorization: Bearer a-key\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + data)
        if is_stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        else:  # the engine has it
            while not server.ask("/load", **KEY).json["running"]:
                pass
    line = log.of(name)
    assert line["client_left"] is True and line["status"] == (200 if is_stream else 499)
    assert line["finish_reason"] == "abort" and line["output_tokens"] < 900


def test_probes_that_succeed_are_no_lines(server: Served, log: Log) -> None:
    for path in ("/health", "/ready", "/load", "/metrics"):
        assert server.ask(path, **KEY).status == 200
    assert server.ask("/v1/models", X_Request_Id="after", **KEY).status == 200
    assert log.of("after")
    assert not {line["path"] for line in log.lines()} & {"/health", "/ready", "/load", "/metrics"}


def test_no_request_waits_for_a_log_that_nobody_reads() -> None:
    """Lines of the log fill its pipe many times over."""
    name = "x" * 128
    reader, writer = os.pipe()
    with (
        open(reader, "rb") as log,
        open(writer, "wb") as file,
        served(*OPTIONS, "--log-level", "info", log=file) as server,
    ):
        file.close()
        for _ in range(500):
            assert server.ask("/v1/models", X_Request_Id=name).status == 200
        assert server.ask("/v1/completions", FIVE).status == 200
        assert server.end() == 0
        assert name.encode() in log.read()


def cores_of(pid: int) -> list[int]:
    tree = tree_of(pid)[1:]
    return [each for each in tree if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


@contextmanager
def full_pipe() -> Iterator[IO[bytes]]:
    """The end of a pipe to which nothing more can be written, and nobody reads it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(select.PIPE_BUF))
    os.set_blocking(writer, True)
    try:
        with open(writer, "wb", buffering=0) as file:
            yield file
    finally:
        os.close(reader)


def alive_cores(server: Served) -> int:
    return int(server.ask("/health").json.get("cores_alive", 0))


@pytest.mark.slow
def test_no_core_waits_for_a_log_that_nobody_reads() -> None:
    """Cores log as well, while they load and later: a core that waited would never be ready."""
    options = ("--data-parallel-size", "2", "--on-core-death", "restart")
    with full_pipe() as log, served(*OPTIONS, *options, log=log) as server:
        assert server.ask("/v1/completions", FIVE).status == 200
        os.kill(cores_of(server.process.pid)[0], signal.SIGKILL)
        for num in (1, 2):
            end = time.monotonic() + WAIT_SECONDS
            while alive_cores(server) != num:
                assert time.monotonic() < end
                time.sleep(0.05)
        for _ in range(4):
            assert server.ask("/v1/completions", FIVE).status == 200
        assert server.end() == 0


def test_the_log_may_be_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with (
        open(writer, "wb") as file,
        served(*OPTIONS, "--log-level", "info", log=file) as server,
    ):
        assert server.ask("/v1/completions", FIVE).status == 200
        assert server.end() == 0


def test_requests_sent_at_once_have_their_own_keys(server: Served, log: Log) -> None:
    """The task of the second one is begun by that of the first."""
    body = json.dumps(FIVE)
    parts = [
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        f"X-Request-Id: {name}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
        for name, key in (("known", "a-key"), ("unknown", "another"))
    ]
    with socket.create_connection(("127.0.0.1", server.port), WAIT_SECONDS) as made:
        made.sendall("".join(parts).encode())
        assert log.of("known")["key"] == sha256(b"a-key").hexdigest()[:12]
        line = log.of("unknown")
    assert line["status"] == 401 and "key" not in line
