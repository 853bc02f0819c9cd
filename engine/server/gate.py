"""Refuse requests while the engine's queue is full, before their body is read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.errors import RefusedError
from engine.server.errors import as_api_error, error_response
from engine.server.http.answered import stamped
from engine.server.ollama.paths import OLLAMA_PATHS
from engine.server.pooled.paths import POOLED_PATHS
from engine.server.streams import swallow

QUEUED_PATHS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        *OLLAMA_PATHS,
        *POOLED_PATHS,
    )
)


class QueueGate:
    """ASGI middleware that answers requests for the engine with 503 while the queue is full."""

    def __init__(self, app: ASGIApp, engine: AsyncLLMEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] in QUEUED_PATHS and scope["method"] == "POST":
            try:
                self._engine.check_room()
            except RefusedError as error:
                app = stamped(error_response(as_api_error(error), scope["path"]), scope)
                await swallow(receive)
        await app(scope, receive, send)
