"""Graceful shutdown: finishes open requests and refuses new ones."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.server.errors import ApiError, error_response
from engine.server.http.answered import stamped
from engine.server.streams import swallow

logger = logging.getLogger("engine.server")

WHILE_DRAINING = ("/health", "/ping", "/load", "/metrics", "/version")  # answered during shutdown
ABORT_SECONDS = 0.5  # for aborted requests to send their last events
LOOK_SECONDS = 0.02  # between two checks whether all requests have ended


class Drain:
    """ASGI middleware that counts open requests, and refuses new ones with 503 after ``begin``.

    ``begin`` and ``hurry`` may be called in signal handlers of the event loop.
    """

    def __init__(self, app: ASGIApp, engine: AsyncLLMEngine, timeout: float) -> None:
        """timeout: seconds that open requests may still take before they are aborted."""
        self.is_begun = False
        self.num_open = 0
        self._app = app
        self._engine = engine
        self._timeout = timeout
        self._until = math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = self._last_on_connection(send)
        if self.is_begun and scope["type"] == "http" and scope["path"] not in WHILE_DRAINING:
            await swallow(receive)
            await self._refusal(scope)(scope, receive, send)
            return
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1

    def begin(self, timeout: float | None = None) -> None:
        """Refuse new requests from now on, and do not restart an engine core that dies. timeout:
        seconds that open requests may still take, at most the server's limit."""
        timeout = self._timeout if timeout is None else min(timeout, self._timeout)
        self.is_begun = True
        self._until = time.monotonic() + timeout
        self._engine.end_restarts()
        if self.num_open:
            logger.warning(
                "the server is ending: %d open requests have %g s", self.num_open, timeout
            )
        else:
            logger.info("the server is ending: no request is open")

    def hurry(self) -> None:
        """Abort open requests now."""
        self._until = 0.0

    async def finish(self) -> None:
        """Wait until all requests have ended. At the deadline, the remaining requests end with an
        error, even if the core does not respond."""
        num_before, num_notified = self.num_open, 0
        while self.num_open and time.monotonic() < self._until:
            await asyncio.sleep(LOOK_SECONDS)
        abort_until = time.monotonic() + ABORT_SECONDS
        while self.num_open and time.monotonic() < abort_until:
            message = "the request was aborted, because the server is shutting down: send it again"
            error = ApiError(503, message, code="aborted")
            num_notified += self._engine.give_up(error)
            await asyncio.sleep(LOOK_SECONDS)
        if num_before:
            logger.warning(
                "%d requests were open: %d of their streams were aborted, %d could not be notified",
                num_before,
                num_notified,
                self.num_open,
            )

    def _last_on_connection(self, send: Send) -> Send:
        """Add ``Connection: close`` to responses that begin during shutdown."""

        async def send_closing(message: Message) -> None:
            if self.is_begun and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        return send_closing

    def _refusal(self, scope: Scope) -> ASGIApp:
        seconds = self._until - time.monotonic()
        message = "the server is shutting down: send the request again, see Retry-After"
        error = ApiError(503, message, code="draining", retry_after=seconds)
        return stamped(error_response(error, scope["path"]), scope)
