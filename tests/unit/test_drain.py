"""The end of a server, as the answers that are open then tell it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.patience import WAIT_SECONDS

from engine.server.drain import Drain
from engine.server.errors import ApiError, error_response


class Engine:
    """Gives the error that ends a request to who waits for it."""

    def __init__(self) -> None:
        self.given_up: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def end_restarts(self) -> None:
        pass

    def give_up(self, error: Exception) -> int:
        if self.given_up.done():
            return 0
        self.given_up.set_result(error)
        return 1


async def ended_before_its_first_event() -> list[dict[str, Any]]:
    engine = Engine()
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        error = await engine.given_up
        assert isinstance(error, ApiError)
        await error_response(error, scope["path"])(scope, receive, send)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    drain = Drain(app, engine, 0.01)  # type: ignore[arg-type]
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    answering = asyncio.create_task(drain(scope, receive, send))
    await asyncio.sleep(0)
    drain.begin()
    await asyncio.wait_for(drain.finish(), WAIT_SECONDS)
    await answering
    return sent


def test_an_answer_that_is_given_up_before_it_has_begun_says_when_to_come_again() -> None:
    start, *_ = asyncio.run(ended_before_its_first_event())
    headers = {name.lower(): value for name, value in start["headers"]}
    assert start["status"] == 503
    assert int(headers[b"retry-after"]) >= 1
    assert headers[b"connection"] == b"close"


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_end_is_a_warning_only_if_requests_are_open(
    is_busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def end() -> None:
        if is_busy:
            await ended_before_its_first_event()
            return
        drain = Drain(None, Engine(), 0.01)  # type: ignore[arg-type]
        drain.begin()
        await drain.finish()

    with caplog.at_level("INFO", logger="engine.server"):
        asyncio.run(end())
    words = [(each.levelname, each.getMessage()) for each in caplog.records]
    if is_busy:
        assert words == [
            ("WARNING", "the server is ending: 1 open requests have 0.01 s"),
            (
                "WARNING",
                "1 requests were open: 1 of their streams were aborted, 0 could not be notified",
            ),
        ]
    else:
        assert words == [("INFO", "the server is ending: no request is open")]
