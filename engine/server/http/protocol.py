"""An HTTP/1.1 connection of uvicorn with limits on the size and duration of each request.

    connection ── head ──> on_headers_complete ── body ──> on_message_complete ── answer ── head ...
                  10 s, 64 KiB                    60 s

The parser (llhttp) refuses what is used for request smuggling: contradicting lengths, a length for
a chunked body, folded headers, bare line feeds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from engine.errors import ConfigError
from engine.server.errors import ApiError
from engine.server.http.writing import WritingProtocol

LINGER_SECONDS = 2.0  # how long further bytes of a refused client are dropped before closing
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


OnRefused = Callable[[ApiError, Scope | None], None]


@dataclass(frozen=True)
class HttpLimits:
    """Limits on the size and duration of a request while it is received."""

    header_seconds: float = 10.0
    """Most seconds from the first byte, or the connection, to the end of the headers."""
    body_seconds: float = 60.0
    """Most seconds from the end of the headers to the end of the body."""
    header_bytes: int = 64 << 10
    """Most bytes of request line and headers together."""
    num_headers: int = 256

    def __post_init__(self) -> None:
        for name in ("header_seconds", "body_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}, must be above 0 and finite")


class BoundedProtocol(WritingProtocol):
    """One connection of a client. A request that exceeds a limit gets an error in OpenAI's form as
    its answer, and the connection is closed."""

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits | None = None,
        on_refused: OnRefused | None = None,
        **kwargs: Any,
    ) -> None:
        """on_refused: called with each error that the connection itself sends, and with the scope
        of the request, which is ``None`` if the application has not received that request."""
        super().__init__(*args, **kwargs)
        self._on_refused = on_refused
        self._limits = limits or HttpLimits()
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_in_body = False  # between the end of the headers and the end of the body
        self._is_over = False  # further bytes are ignored
        self._keep_alive = True  # whether the current request keeps the connection open
        self._unfinished: list[RequestResponseCycle] = []  # requests of this connection, in order
        self._head_bytes = 0
        self._num_new_bytes = 0  # bytes fed to the parser since its last callback

    # -- callbacks of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        for cycle in self._unfinished:  # uvicorn does this for the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        if not self._is_in_body:
            data = _without_upgrade(data)
        self._num_new_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._check_head(0)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ApiError):
            self._refuse(self._refusal or ApiError(400, "the request is not valid HTTP/1.1"))
        else:
            self._limit_time()

    def _limit_time(self) -> None:
        """Start the timer for the headers or the body that are being received."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if not self._is_in_body and not is_idle:
            self._forget_deadline()
        elif self._deadline is None:
            limits = self._limits
            self._set_deadline(limits.body_seconds if self._is_in_body else limits.header_seconds)

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._check_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._check_head(len(name) + len(value) + 4)
        if len(self.headers) >= self._limits.num_headers:
            most = self._limits.num_headers
            self._fail(431, f"the request has more than {most} headers, the limit: send fewer")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_new_bytes = 0
        self._check_request()
        super().on_headers_complete()
        self._forget_finished()
        self._unfinished.append(self.cycle)
        self._forget_deadline()
        self._is_in_body = True
        # An answer before the end of the body does not end the connection: see on_response_complete
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, True

    def on_body(self, body: bytes) -> None:
        self._num_new_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_new_bytes = 0
        self._is_in_body = False
        self._forget_deadline()
        self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def _check_head(self, num: int) -> None:
        """Add ``num`` to the bytes of the headers. Raises ``ApiError`` if they are too many."""
        if num:
            self._head_bytes += num
            self._num_new_bytes = 0
        most = self._limits.header_bytes
        if not self._is_in_body and self._head_bytes + self._num_new_bytes > most:
            self._fail(431, f"the headers have more than {most} bytes, the limit: send fewer")

    def _check_request(self) -> None:
        """Raise ``ApiError`` for an HTTP version or headers that this server does not support."""
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            self._fail(505, f"the request is HTTP/{version}, must be HTTP/1.1")
        num_hosts = names.count(b"host")
        if num_hosts > 1 or (version == "1.1" and not num_hosts):
            self._fail(400, f"the request has {num_hosts} Host headers, must have one")
        if version == "1.0" and b"transfer-encoding" in names:
            self._fail(
                400,
                "the request is HTTP/1.0 with Transfer-Encoding: send Content-Length, or HTTP/1.1",
            )
        if self.parser.should_upgrade():
            self._fail(400, "the request is an upgrade, which is not supported: send HTTP/1.1")

    def _fail(self, status: int, message: str) -> None:
        """Raise the ``ApiError`` that the client gets before the connection is closed."""
        self._refusal = ApiError(status, message)
        raise self._refusal

    # -- responses

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_own = self.cycle.response_complete  # otherwise an earlier request's
        if self._is_in_body and is_own and not self._is_over:  # answered before the body's end
            self._unset_keepalive_if_required()
            self._linger()

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless a response has begun already, and close the connection."""
        self._is_over = True
        self._forget_finished()
        if any(cycle is not self.cycle for cycle in self._unfinished):
            self.transport.close()  # anything sent now would be in the middle of another answer
            return
        if self.cycle is not None and not self.cycle.response_complete and not self._is_in_body:
            self.transport.close()
            return
        if self.cycle is not None and self.cycle.response_started and self._is_in_body:
            self._linger()
            return
        body = error.body()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        has_begun = self._is_in_body or self._head_bytes or self._num_new_bytes
        if self._on_refused is not None and has_begun:
            in_body = self.cycle is not None and self._is_in_body
            self._on_refused(error, dict(self.cycle.scope) if in_body else None)
        self._linger()

    def _forget_finished(self) -> None:
        self._unfinished = [each for each in self._unfinished if not each.response_complete]

    def _linger(self) -> None:
        """Ignore further bytes, and close the connection after ``LINGER_SECONDS``. A client that is
        still sending would lose the response if the connection were closed immediately."""
        self._is_over = True
        self._forget_deadline()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        if self.cycle is not None and not self.cycle.response_complete:  # waits for the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _set_deadline(self, seconds: float) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(seconds, self._time_out, seconds)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self, seconds: float) -> None:
        if self.transport.is_closing():
            return
        what = "body" if self._is_in_body else "headers"
        message = f"the {what} took more than {seconds:g} s, the limit: send the request again"
        self._refuse(ApiError(408, message))


def _without_upgrade(data: bytes) -> bytes:
    """Rename the ``Upgrade`` header, so that the request is served by HTTP/1.1. After an upgrade
    the parser would read no body, and Java's client offers HTTP/2 with every request."""
    end = data.find(b"\r\n\r\n")
    if end < 0 or UPGRADE.search(data, 0, end) is None:
        return data
    return UPGRADE.sub(b"\r\nx-upgrade:", data[:end]) + data[end:]
