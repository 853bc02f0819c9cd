"""Events that bring nothing but text, as nearly all do: written where the output arrives.

An ASGI server offers a coroutine to send with, so that a task must be woken for each event. The
protocol here, uvicorn's else, offers a function as well.
"""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.async_engine import Reader
from engine.messages.requests import RequestOutput
from engine.server.answers import Answer
from engine.server.errors import as_api_error
from engine.server.streams import DONE, HEADERS, event_of, while_there

WRITE = "metronome.write"  # its name among the extensions of a scope

encode = msgspec.json.encode


class WritingProtocol(HttpToolsProtocol):
    """uvicorn's, with a function in each scope that writes a part of a body."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # the task that reads the scope has not begun
            self.scope["extensions"] = {WRITE: {"part": partial(write_part, self.cycle)}}


def write_part(cycle: RequestResponseCycle, part: bytes) -> bool:
    """Write a part of a body that is sent in chunks; False if the client is gone, or behind."""
    if cycle.flow.write_paused or cycle.disconnected:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


class PlainStream:
    """An ASGI response: the events of an answer that has a ``frame``. A reader who leaves ends
    them, and one that is behind gets several steps at once."""

    def __init__(self, answer: Answer) -> None:
        assert answer.frame is not None
        self._answer = answer
        self._before, self._behind = answer.frame
        self._first = b""
        self._reader: Reader | None = None  # none before it has begun, nor if that failed

    async def begin(self) -> None:
        """Wait for the first event. Raises what is wrong."""
        reader = await self._answer.open()
        try:
            self._output = await reader.next()
            self._first = self._answer.chunk(self._output)
        except BaseException:
            reader.close()
            raise
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._reader is None:  # the client has left
            return
        try:
            await while_there(self._send_all(self._reader, scope, send), receive)
        finally:
            self._reader.close()

    async def _send_all(self, reader: Reader, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        self._write = scope.get("extensions", {}).get(WRITE, {}).get("part")
        sink = None if self._write is None else self._take
        try:
            while not self._output.finished:
                self._output = await reader.next(sink)
                event = self._answer.chunk(self._output)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            last = self._answer.last_chunk()
        except Exception as error:
            last = event_of(as_api_error(error).body())
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})

    def _take(self, output: RequestOutput) -> bool:
        """Write the event of an output; False if it has more than text, or cannot be sent now."""
        if output.finished:
            return False
        completion = output.outputs[0]
        if not self._write(self._before + encode(completion.text) + self._behind):
            return False
        self._answer.add_tokens(len(completion.token_ids))
        return True
