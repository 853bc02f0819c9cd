"""Streams of one engine request. Events are usually written where the outputs arrive, so that no
asyncio task is woken for each token."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from engine.frontend.streams import OutputReader
from engine.messages.requests import RequestOutput
from engine.server.answers import HttpAnswer
from engine.server.errors import log_unforeseen
from engine.server.http.writing import Writer, writer_of
from engine.server.streams import Streaming, while_there


class DirectStream(Streaming):
    """Streams the events of an answer that has one engine request. The request is aborted when the
    client disconnects; a slow client gets the outputs of several steps in one event."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.stream_type)
        self._answer = answer
        self._first = b""
        self._reader: OutputReader | None = None  # until ``begin`` has succeeded
        self._writer: Writer | None = None
        self._error: Exception | None = None

    async def begin(self) -> None:
        """Wait for the first event. Raises the error if the request fails before that."""
        reader = await self._answer.open()
        try:
            self._is_finished = False
            while not self._first and not self._is_finished:
                self._first = self._take(await reader.next())
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

    async def _send_all(self, reader: OutputReader, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        self._writer = writer_of(scope)
        sink = None if self._writer is None else self._write
        try:
            while not self._is_finished:
                output = await reader.next(sink)
                if self._error is not None:  # ``_write`` has failed with this output
                    raise self._error
                event = self._take(output)
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            last = self._answer.end()
        except Exception as error:
            log_unforeseen(error)
            last = self._answer.failure(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _take(self, output: RequestOutput) -> bytes:
        self._is_finished = output.finished
        return self._answer.events_of(output)

    def _write(self, output: RequestOutput) -> bool:
        """Write the events of an output. Returns False if the output must be queued instead."""
        assert self._writer is not None
        if output.finished or self._error is not None or not self._writer.is_ready:
            return False
        try:
            event = self._answer.events_of(output)
            if event:
                self._writer.write(event)
        except Exception as error:  # raised later in our own task: the caller serves all requests
            self._error = error
            return False
        return True
