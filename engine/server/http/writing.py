"""Write the parts of a streamed body without ASGI's ``send``.

``send`` is a coroutine, so each part of a body would wake a task. Applications find the ``Writer``
of a request in the ``extensions`` of its scope.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

WRITER = "metronome.writer"  # key of the writer in ``extensions``


class Writer:
    """Writes parts of a chunked body once the head of the response has been sent."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """True if the client is connected and reads as fast as the server writes."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write(self, part: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class WritingProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a ``Writer`` in the scope of each request."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        is_chunked = self.parser.get_http_version() == "1.1"
        if self.cycle is not before and is_chunked:  # the task that reads the scope has not begun
            self.scope["extensions"] = {WRITER: {"writer": Writer(self.cycle)}}


def writer_of(scope: Scope) -> Writer | None:
    """The writer of a request; ``None`` if another ASGI server runs the application."""
    writer: Writer | None = scope.get("extensions", {}).get(WRITER, {}).get("writer")
    return writer
