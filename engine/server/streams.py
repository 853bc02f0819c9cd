"""Server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

SWALLOW_SECONDS = 1.0
SWALLOW_BYTES = 1 << 20
DONE = b"data: [DONE]\n\n"
EVENTS = b"text/event-stream; charset=utf-8"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the events
]

T = TypeVar("T")


class Streaming:
    """Base class of ASGI responses that stream events."""

    def __init__(self, media_type: bytes = EVENTS) -> None:
        self.headers = [(b"content-type", media_type), *HEADERS]


class EventStream(Streaming):
    """Streams the events of a generator, which is closed when the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events
        self._first = b""

    async def begin(self) -> None:
        """Wait for the first event. Raises the generator's error if it fails before that."""
        self._first = await anext(self._events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_there(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_of(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def while_there(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Run a coroutine and return its result. Cancel it and return ``None`` if the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def swallow(receive: Receive) -> None:
    """Read and drop the body of a request, within limits of bytes and seconds. A client that is
    still sending would otherwise lose the response when the connection is closed."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWALLOW_SECONDS):
            while size < SWALLOW_BYTES:
                message = await receive()
                if not message.get("more_body"):
                    return
                size += len(message["body"])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(sources: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the generator, item) for all items of the generators, as they arrive. The
    first error ends all generators and is raised."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as source:
            async for only in source:
                yield 0, only
        return
    waiting: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(len(sources))
    tasks = [asyncio.ensure_future(_forward(n, each, waiting)) for n, each in enumerate(sources)]
    left = len(tasks)
    try:
        while left:
            item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    number: int, source: AsyncGenerator[Any, None], waiting: asyncio.Queue[Any]
) -> None:
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                await waiting.put((number, item))
        await waiting.put(None)
    except Exception as error:
        await waiting.put(error)
