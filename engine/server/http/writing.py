"""A protocol whose answers may be written without a coroutine.

An ASGI server offers a coroutine to send with, so that a task must be woken for each part of a
body. This one offers an object as well, under ``extensions`` of the scope.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

WRITER = "metronome.writer"  # its name among the extensions


class Writer:
    """Writes parts of a body that is sent in chunks, once the head of the answer was sent."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """False if the client is gone or reads too slowly."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write(self, part: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class WritingProtocol(HttpToolsProtocol):
    """uvicorn's, with a ``Writer`` in each scope."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        is_chunked = self.parser.get_http_version() == "1.1"
        if self.cycle is not before and is_chunked:  # the task that reads the scope has not begun
            self.scope["extensions"] = {WRITER: {"writer": Writer(self.cycle)}}


def writer_of(scope: Scope) -> Writer | None:
    """``None`` with other servers."""
    writer: Writer | None = scope.get("extensions", {}).get(WRITER, {}).get("writer")
    return writer
