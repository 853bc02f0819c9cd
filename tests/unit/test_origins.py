"""Which pages may use the server from a browser, and what their browser is answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import Response

from engine.errors import ConfigError
from engine.server.http.origins import AllowedOrigins, is_allowed, listed, normal_origin

PAGE = "http://localhost:5173"
Headers = dict[str, str]


def ask(
    allowed: AllowedOrigins, origin: str | None, method: str = "GET", status: int = 200,
    **headers: str,
) -> tuple[int, Headers, bool]:  # fmt: skip
    """Status and headers of an answer, and whether the application knows the page as allowed."""
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(is_allowed(scope))
        await Response(b"", status)(scope, receive, send)

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if origin is not None:
        given["origin"] = origin
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": "/", "headers": raw}
    asyncio.run(allowed.around(app)(scope, receive, send))
    told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, seen == [True]


def preflight(allowed: AllowedOrigins, origin: str, **headers: str) -> tuple[int, Headers]:
    status, told, _ = ask(
        allowed, origin, "OPTIONS", 405, access_control_request_method="POST", **headers
    )
    return status, told


def cors_of(headers: Headers) -> Headers:
    return {name: value for name, value in headers.items() if name.startswith("access-control")}


def test_a_preflight_of_an_allowed_page_passes() -> None:
    status, told = preflight(
        AllowedOrigins([PAGE]), PAGE,
        access_control_request_headers="authorization,content-type",
        access_control_request_private_network="true",
    )  # fmt: skip
    assert status == 200
    assert told["access-control-allow-origin"] == PAGE
    assert told["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in told["access-control-allow-methods"]
    assert told["access-control-allow-private-network"] == "true"
    assert "Origin" in told["vary"]


@pytest.mark.parametrize("status", [200, 401, 404, 503])
def test_each_answer_to_an_allowed_page_may_be_read(status: int) -> None:
    got, told, is_known = ask(AllowedOrigins([PAGE]), PAGE, "POST", status)
    assert got == status and is_known
    assert told["access-control-allow-origin"] == PAGE and told["vary"] == "Origin"
    assert "X-Request-Id" in told["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["http://localhost:5174", "https://localhost:5173", "http://evil.example", "null", ""]
)
def test_other_pages_get_nothing(origin: str) -> None:
    allowed = AllowedOrigins([PAGE])
    status, told = preflight(allowed, origin)
    assert status == 405 and not cors_of(told) and told["vary"] == "Origin"
    _, told, is_known = ask(allowed, origin, "POST")
    assert not is_known and not cors_of(told) and told["vary"] == "Origin"


def test_programs_get_nothing_but_that_answers_vary() -> None:
    _, told, is_known = ask(AllowedOrigins([PAGE]), None)
    assert not is_known and not cors_of(told) and told["vary"] == "Origin"


def test_without_the_option_nothing_changes() -> None:
    status, told = preflight(AllowedOrigins(), PAGE)
    assert status == 405 and not cors_of(told) and "vary" not in told
    assert not ask(AllowedOrigins(), PAGE)[2]


def test_all_pages_may_be_allowed() -> None:
    allowed = AllowedOrigins(["*"])
    status, told = preflight(allowed, "http://any.example")
    assert status == 200 and told["access-control-allow-origin"] == "*"
    _, told, is_known = ask(allowed, "http://any.example")
    assert is_known and told["access-control-allow-origin"] == "*"


def test_methods_headers_and_cookies_are_as_chosen() -> None:
    allowed = AllowedOrigins([PAGE], methods=("GET",), headers=("x-mine",), credentials=True)
    status, told = preflight(allowed, PAGE)
    assert status == 400 and told["access-control-allow-credentials"] == "true"
    status, told, _ = ask(
        allowed, PAGE, "OPTIONS",
        access_control_request_method="GET", access_control_request_headers="x-mine",
    )  # fmt: skip
    assert status == 200 and "x-mine" in told["access-control-allow-headers"]
    assert ask(allowed, PAGE)[1]["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("http://localhost:5173", PAGE),
        ("HTTP://LocalHost:5173/", PAGE),
        ("https://chat.example:443", "https://chat.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_origins_are_compared_as_browsers_write_them(written: str, normal: str) -> None:
    assert normal_origin(written) == normal


@pytest.mark.parametrize(
    "value",
    ["", "localhost:5173", "localhost", "http://", "http://a/b", "http://*.example", "//a",
     "http://u@a", "http://a:x", "http://a?b"],
)  # fmt: skip
def test_what_is_no_origin_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="must be an origin such as http://localhost:5173"):
        AllowedOrigins([value])


def test_an_option_may_be_repeated_or_be_a_list() -> None:
    assert listed("allowed-origins", ["a", '["b", "c"]', "d"]) == ("a", "b", "c", "d")
    for wrong in ("[", "[1]", '["a"'):
        with pytest.raises(
            ConfigError, match=r"--allowed-origins is .* must be a JSON list of strings"
        ):
            listed("allowed-origins", [wrong])
