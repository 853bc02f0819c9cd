"""The routes of the page: its files, and the data that it shows to users with a key."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.async_engine import AsyncLLMEngine
from engine.server.adapters import ServedAdapters
from engine.server.dialogue import ChatModel
from engine.server.errors import ApiError, field_error
from engine.server.http.openapi import ApiRoute
from engine.server.keys import KeyRing
from engine.server.limits import ServerLimits
from engine.server.names import ServedNames
from engine.server.page.assets import PageAssets
from engine.server.page.ended import EndedRequests
from engine.server.page.now import Now
from engine.server.page.owners import Owned, viewer_of

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DATA_HEADERS = {"Cache-Control": "no-store"}
MOST_DIGITS = 15  # of a step's number


class Page:
    """The page at ``/``, with the files that it consists of and its data."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        keys: KeyRing,
        names: ServedNames,
        adapters: ServedAdapters,
        chat_template: str | None = None,
        max_body_bytes: int = ServerLimits.max_body_bytes,
    ) -> None:
        """chat_template: used instead of the model's own template; max_body_bytes: of a request,
        with its pictures."""
        self._engine = engine
        self._keys = keys
        self._names = names
        self._adapters = adapters
        self._chat = ChatModel(engine, chat_template)
        self._max_body_bytes = max_body_bytes
        self._assets = PageAssets()
        self._now = Now(engine)
        self._ended = EndedRequests(self._now.core_of)
        engine.add_observer(self._ended.observe)

    @property
    def open_paths(self) -> frozenset[str]:
        """The paths that need no key."""
        return self._assets.paths

    def owned(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that the page knows whose its requests are."""
        return Owned(app, self._keys)

    def routes(self) -> list[ApiRoute]:
        return [
            ApiRoute("GET", "/page/model", self.model, None, dict),
            ApiRoute("GET", "/page/now", self.now, None, dict),
            ApiRoute("GET", "/page/request/{request_id}", self.request, None, dict),
            *self._assets.routes(),
        ]

    async def model(self, request: Request) -> ASGIApp:
        """Describe the model to the page: names, limits and recommended sampling values."""
        viewer_of(request.scope, self._keys)
        engine = self._engine
        listed = [*self._names.listed, *(each.name for each in await self._adapters.listed())]
        generates = engine.runner == "generate"
        tokenizer = engine.tokenizer
        has_template = self._chat.chat_template is not None or bool(
            tokenizer is not None and tokenizer.templates
        )
        chats = generates and tokenizer is not None and has_template
        chat_format = (await self._chat.loaded()).chat_format if chats else None
        return _answer(
            {
                "models": listed,
                "max_model_len": engine.max_model_len,
                "sampling": {k: v for k, v in engine.recommended.items() if k in SAMPLING},
                "thinking": chat_format is not None and chat_format.thinking is not None,
                "tools": chats,
                "pictures": self._pictures() if chats else None,
                "generates": generates,
                "chats": chats,
                "pools": not generates,
                "version": version("metronome-engine"),
            }
        )

    def _pictures(self) -> dict[str, Any] | None:
        """Which pictures the model reads; ``None``: none."""
        limits = self._engine.pictures.limits
        return None if limits is None else {**limits._asdict(), "most_chars": self._max_body_bytes}

    async def now(self, request: Request) -> ASGIApp:
        """Report the unfinished requests, why they wait, the cores and their latest steps."""
        viewer = viewer_of(request.scope, self._keys)
        given = request.query_params.get("after", "0")
        if not (given.isascii() and given.isdecimal() and len(given) <= MOST_DIGITS):
            raise field_error("after", f"is {given!r:.80}, must be the number of a step, or 0")
        return _answer(await self._now.document(viewer, int(given)))

    async def request(self, request: Request) -> ASGIApp:
        """Report why a request of the last minutes had to wait."""
        viewer = viewer_of(request.scope, self._keys)
        name = request.path_params["request_id"]
        ended = self._ended.find(name, viewer)
        if ended is None:  # also if it is another key's
            raise ApiError(
                404,
                f"no request {name!r:.150} has ended in the last minutes: if it still runs, see "
                "/page/now",
            )
        return _answer(ended.document(viewer))


def _answer(value: Any) -> Response:
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(data, media_type="application/json", headers=DATA_HEADERS)
