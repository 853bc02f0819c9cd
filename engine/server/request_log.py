"""Log one line per HTTP request: path, status, token counts, times and causes of waiting."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.messages.requests import FinishedRequest
from engine.observe.background import BackgroundHandler
from engine.server.callers import CALLER
from engine.server.errors import ApiError
from engine.server.http.answered import request_id_of
from engine.server.records import LEFT, RECORD, RequestRecord

RequestLogKind = Literal["text", "json", "off"]

logger = logging.getLogger("engine.requests")
PROBES = frozenset(
    (
        "/health",
        "/ready",
        "/ping",
        "/load",
        "/metrics",
        "/version",
        "/is_paused",
        "/page/now",
        "/",
        "/api/version",
    )
)
"""Paths that monitoring and pages poll, which are logged only if they fail."""
LEFT_SECONDS = 0.5  # until the engine has reported the end of a request whose client disconnected
FAILED = 500
KEY = "metronome.record"  # in the scope
NAMES = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "prefix_evicted_seconds": "evicted",
    "first_token_seconds": "first_token",
    "total_seconds": "total",
    "waits": "waited",
    "finish_reason": "finish",
}
"""Shorter names for the text format."""


class RequestLog:
    """ASGI middleware that logs each HTTP request when it ends, unless its kind is ``off``."""

    def __init__(self, app: ASGIApp, kind: RequestLogKind) -> None:
        self._app = app
        self._is_off = kind == "off"
        self._is_json = kind == "json"
        self._left: dict[int, tuple[asyncio.TimerHandle, RequestRecord]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_off or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(
            request_id_of(scope), scope["method"], path_of(scope), time.perf_counter()
        )
        RECORD.set(record)
        CALLER.set(None)  # a task may begin with the variables of the request before
        scope[KEY] = record
        is_over = False

        def record_status(message: Message) -> Awaitable[None]:
            nonlocal is_over
            if message["type"] == "http.response.start":
                if not record.has_left:
                    record.status = message["status"]
            elif not message.get("more_body", False):
                is_over = True
            return send(message)

        async def record_disconnect() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_over:
                record.has_left = record.status is None or record.status < 400
            return message

        try:
            await self._app(scope, record_disconnect, record_status)
        finally:
            self._end(record)

    def observe(self, finished: FinishedRequest) -> None:
        """Add a finished engine request to the log record of its HTTP request. Called in the
        engine's thread, in the context of the HTTP request."""
        record = RECORD.get()
        if record is not None:
            record.add(finished)

    def refused(self, error: ApiError, scope: Scope | None) -> None:
        """Log an error that was sent by the connection itself. scope: the request's ASGI scope if
        the application got the request; its own log line then reports the error."""
        code = error.code or error.type
        if scope is None:
            self._write(RequestRecord("-", "-", "-", 0.0, error.status, code))
        elif (record := scope.get(KEY)) is not None:
            record.status, record.error = error.status, code

    def close(self) -> None:
        """Write the log lines of all requests whose clients have disconnected."""
        for timer, record in list(self._left.values()):
            timer.cancel()
            self._write(record)
        self._left.clear()

    def _end(self, record: RequestRecord) -> None:
        record.caller = CALLER.get()
        record.seconds = time.perf_counter() - record.began
        if record.status is None:
            record.status = LEFT if record.has_left else FAILED
        if record.path in PROBES and record.status < 400:
            return
        if not record.has_left:
            self._write(record)
            return
        timer = asyncio.get_running_loop().call_later(LEFT_SECONDS, self._write_left, record)
        self._left[id(record)] = timer, record

    def _write_left(self, record: RequestRecord) -> None:
        del self._left[id(record)]
        self._write(record)

    def _write(self, record: RequestRecord) -> None:
        if not self._is_off and logger.isEnabledFor(logging.INFO):
            record.logged_at = time.time()
            logger.info(RequestLine(record, as_json if self._is_json else as_text))


@dataclass
class RequestLine:
    """A log message that is formatted in the thread that writes it, not in the event loop."""

    record: RequestRecord
    format: Callable[[RequestRecord], str]

    def __str__(self) -> str:
        return self.format(self.record)


def path_of(scope: Scope) -> str:
    """The path as the client sent it, without the query: a decoded path could have line ends."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("unicode_escape")
    return raw.partition(b"?")[0].decode("latin-1")


def as_json(record: RequestRecord) -> str:
    at = datetime.fromtimestamp(record.logged_at, UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": at, **record.fields()}).decode()


def as_text(record: RequestRecord) -> str:
    """Format a record as ``POST /v1/completions status=200 ...``, with times in seconds."""
    known = record.fields()
    head = f"{known.pop('method')} {known.pop('path')} status={known.pop('status')}"
    return " ".join([head, *_pairs(known)])


def _pairs(known: Mapping[str, Any]) -> Iterator[str]:
    for name, value in known.items():
        if isinstance(value, dict):
            value = ",".join(f"{cause.replace(' ', '_')}:{s:.3f}" for cause, s in value.items())
        elif isinstance(value, float):
            value = f"{value:.3f}"
        elif value is True:
            value = "yes"
        elif name == "user":  # as the client wrote it: it must not look like other values
            value = quote(value)
        elif name == "prefix_end":
            value = value.replace(" ", "_")
        yield f"{NAMES.get(name, name)}={value}"


@contextmanager
def writing_requests(kind: RequestLogKind | None) -> Iterator[RequestLogKind]:
    """Context with the request log set up; yields its format.

    kind: the format, logged at every log level; ``None``: text, logged only at level ``info``. JSON
    lines have no prefix with time and name."""
    if kind is not None:
        logger.setLevel(logging.INFO)
    if kind != "json":
        yield kind or "text"
        return
    handler = BackgroundHandler([logging.StreamHandler(sys.stderr)])
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield kind
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
        handler.close()
