"""Whose requests a user of the page may see: those of the API key, or all."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.server.http.answered import request_id_of
from engine.server.keys import KeyRing, no_key

Viewer = bytes | None
"""The digest of the API key whose requests are shown; ``None``: all requests are."""
NOBODY = b""  # the owner of requests without a key


@dataclass(eq=False)
class HttpRequest:
    """An HTTP request: its id, and the digest of its key. The id need not be unique."""

    id: str
    owner: bytes
    sequences: dict[str, int] = field(default_factory=dict)
    """Numbers of the sequences that are generated for it, by their ids in the core."""

    def shown_id(self, core_id: str) -> str:
        """The id under which a sequence is shown: with its number if there are several."""
        number = self.sequences[core_id]
        return self.id if len(self.sequences) == 1 else f"{self.id}/{number}"


HTTP_REQUEST: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)
"""The HTTP request that the current task answers."""


class Owned:
    """ASGI middleware that notes whose request a task answers. It must be inside ``KeyGuard``."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            digest = self._keys.key_of(scope) or NOBODY
            HTTP_REQUEST.set(HttpRequest(request_id_of(scope), digest))
        await self._app(scope, receive, send)


def viewer_of(scope: Scope, keys: KeyRing) -> Viewer:
    """Whose requests the sender of a request may see: all if no key is set, or with the admin key.
    Raises ``ApiError`` without a valid key, also if only an admin key is set."""
    if keys.is_admin(scope) or not (keys.has_any or keys.has_admin):
        return None
    digest = keys.key_of(scope) if keys.has_any else None
    if digest is None:
        raise no_key("the API key" if keys.has_any else "the admin key")
    return digest
