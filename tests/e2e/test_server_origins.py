"""A page of an allowed origin uses the server: preflight, streams and errors; others do not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.served import Served, forked

PAGE, OTHER = "http://localhost:5173", "http://evil.example"
KEY = "secret-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options = ("--num-threads", "1", "--max-model-len", "256", "--no-multiprocess")
    origins = ("--allowed-origins", f'["{PAGE}"]')
    with forked(*options, *origins, "--api-key", KEY) as made:
        yield made


def ask(
    server: Served, path: str, origin: str, body: Any = None, method: str | None = None,
    **headers: str,
) -> tuple[int, Any, str]:  # fmt: skip
    answer = server.ask(path, body, method=method, Origin=origin, **headers)
    return answer.status, answer.headers, answer.body.decode()


def preflight(server: Served, path: str, origin: str) -> tuple[int, Any, str]:
    """Send a browser's preflight request, without a key."""
    return ask(
        server, path, origin, method="OPTIONS",
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,content-type",
    )  # fmt: skip


@pytest.mark.parametrize("origin", [PAGE, OTHER])
def test_answers_may_be_read_by_allowed_pages_alone(server: Served, origin: str) -> None:
    is_allowed = origin == PAGE

    def may_read(headers: Any) -> bool:
        assert "Origin" in headers["Vary"]
        return bool(headers["Access-Control-Allow-Origin"] == origin)

    browser = {"Sec_Fetch_Site": "same-site", "Authorization": f"Bearer {KEY}"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        status, headers, _ = preflight(server, path, origin)
        assert (status == 200) == may_read(headers) == is_allowed, path
    body = {"model": "box", "prompt": "a", "max_tokens": 3}
    status, headers, _ = ask(server, "/v1/completions", origin, body, **browser)
    assert (status == 200) == may_read(headers) == is_allowed
    status, headers, text = ask(
        server, "/v1/completions", origin, {**body, "stream": True}, **browser
    )
    assert (status == 200) == may_read(headers) == is_allowed
    assert ("[DONE]" in text) == is_allowed
    for status, headers, _ in (
        ask(server, "/v1/models", origin),  # without the key
        ask(server, "/no/such/path", origin, **browser),
        ask(server, "/v1/completions", origin, {**body, "max_tokens": -1}, **browser),
        ask(server, "/v1/completions", origin, method="PUT", **browser),
    ):
        assert status in (400, 401, 403, 404, 405) and may_read(headers) == is_allowed


def test_refusals_of_a_server_that_ends_may_be_read(server: Served) -> None:
    """The last test of this server: a request whose body does not come keeps it open meanwhile."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode())
        key = {"Authorization": f"Bearer {KEY}"}
        while not json.loads(ask(server, "/load", PAGE, **key)[2])["server_load"]:
            pass  # until the server has read that much
        server.process.terminate()
        status, told = 200, None
        while status == 200:  # until the signal has come
            status, told, _ = ask(server, "/v1/models", PAGE, **key)
        assert status == 503 and told["Access-Control-Allow-Origin"] == PAGE
        assert told["Retry-After"]
    assert server.process.wait(WAIT_SECONDS) == 0
