"""The application: routes, keys, and errors as OpenAI words them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest
from importlib.metadata import version
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.server.asked import Asked, ChatRequest, CompletionRequest, read
from engine.server.chat import Chat
from engine.server.completions import Completion
from engine.server.errors import ApiError, error_response
from engine.server.http.answered import request_id_of, stamped
from engine.server.http.body import Bodies
from engine.server.http.openapi import ApiRoute, document_of
from engine.server.limits import Limits, check_limits
from engine.server.streams import EventStream, while_there
from engine.server.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    detokenize,
    tokenize,
)

OPEN_PATHS = ("/health", "/version")  # without a key
NOT_YET = (
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
A = TypeVar("A", bound=msgspec.Struct)


class Api:
    """What the routes do."""

    def __init__(
        self, engine: AsyncLLMEngine, names: Sequence[str], max_model_len: int, limits: Limits
    ) -> None:
        """names: of the model, the first in answers."""
        self._engine = engine
        self._names = tuple(names)
        self._limits = limits
        self._bodies = Bodies(limits.max_body_bytes)
        self._max_model_len = max_model_len
        self._began = int(time.time())

    def routes(self) -> list[ApiRoute]:
        """Each with what it takes and gives, for the document."""
        return [
            ApiRoute("POST", "/v1/completions", self.completions, CompletionRequest, dict),
            ApiRoute("POST", "/v1/chat/completions", self.chat, ChatRequest, dict),
            ApiRoute("GET", "/v1/models", self.models, None, dict),
            ApiRoute("GET", "/v1/models/{name:path}", self.model, None, dict),
            ApiRoute("POST", "/tokenize", self.tokenize, TokenizeRequest, TokenizeAnswer),
            ApiRoute("POST", "/detokenize", self.detokenize, DetokenizeRequest, DetokenizeAnswer),
            ApiRoute("GET", "/health", self.health),
            ApiRoute("GET", "/version", self.version, None, dict),
            ApiRoute("GET", "/openapi.json", self.document, None, dict),
            *(ApiRoute("POST", path, not_yet) for path in NOT_YET),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        """Texts behind one prompt or several."""
        asked = await self._read(request, CompletionRequest)
        return await self._answer(request, asked, Completion(self._engine, asked, self._names[0]))

    async def chat(self, request: Request) -> ASGIApp:
        """Answers to a conversation."""
        asked = await self._read(request, ChatRequest)
        return await self._answer(request, asked, Chat(self._engine, asked, self._names[0]))

    async def models(self, request: Request) -> ASGIApp:
        """The names that the model is served under."""
        return json_response(
            {"object": "list", "data": [self._about(name) for name in self._names]}
        )

    async def model(self, request: Request) -> ASGIApp:
        """One of them."""
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._about(name))

    async def health(self, request: Request) -> ASGIApp:
        """Whether the core goes on: it answers between two steps."""
        await self._engine.stats()
        return Response(b"", 200)

    async def version(self, request: Request) -> ASGIApp:
        """The server's own."""
        return json_response({"version": version("metronome-engine")})

    async def tokenize(self, request: Request) -> ASGIApp:
        """Token ids of a text or a conversation."""
        return json_response(
            await tokenize(self._engine, await self._read(request, TokenizeRequest))
        )

    async def detokenize(self, request: Request) -> ASGIApp:
        """The text of token ids."""
        return json_response(
            await detokenize(self._engine, await self._read(request, DetokenizeRequest))
        )

    async def document(self, request: Request) -> ASGIApp:
        """This document."""
        return json_response(document_of(self.routes(), self._names))

    # -- helpers

    async def _read(self, request: Request, kind: type[A]) -> A:
        asked = read(await self._bodies.read(request), kind)
        check_limits(asked, self._limits)
        self._check_model(asked.model)  # type: ignore[attr-defined]
        return asked

    async def _answer(self, request: Request, asked: Asked, answer: Completion | Chat) -> ASGIApp:
        answer.tell_as(request_id_of(request.scope))
        if not asked.stream:
            body = await while_there(answer.whole(), request.receive)
            return Response(body or b"", 200, media_type="application/json")
        stream = EventStream(answer.events())
        await while_there(stream.begin(), request.receive)  # what is wrong has a status of its own
        return stream

    def _check_model(self, name: str | None) -> None:
        """``None``: the request names no model, and need not."""
        if name is not None and name not in self._names:
            raise ApiError(
                404,
                f"model is {name!r:.80}, there are: {', '.join(self._names)}",
                param="model",
                code="model_not_found",
            )

    def _about(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "metronome",
            "root": self._names[0],
            "max_model_len": self._max_model_len,
        }


class Keys:
    """Lets through who has one of the keys, as a bearer token; without keys, everybody."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], most: int | None = None) -> None:
        """most: requests of one key at a time."""
        self.app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._most = most
        self._num_open: Counter[bytes] = Counter()  # requests, by digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._digests:
            await self.app(scope, receive, send)
            return
        digest = self._digest_of(scope)
        if digest is None:
            refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await stamped(error_response(refusal), scope)(scope, receive, send)
        elif self._most is not None and self._num_open[digest] >= self._most:
            await stamped(error_response(self._too_many()), scope)(scope, receive, send)
        else:
            self._num_open[digest] += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self._num_open[digest] -= 1

    def _digest_of(self, scope: Scope) -> bytes | None:
        """Of the key that was shown, if it is one of ours. All are compared, each in the same
        time wherever it differs, and however long it is."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        shown = sha256(given.removeprefix(b"Bearer ")).digest()
        fitting = [digest for digest in self._digests if compare_digest(shown, digest)]
        return fitting[0] if fitting else None

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"this key has {self._most} requests under way, the limit (--max-requests-per-key of "
            "the server): try again when one has ended",
            code="too_many_requests",
            retry_after=1.0,
        )


def make_app(
    engine: AsyncLLMEngine,
    names: Sequence[str],
    max_model_len: int,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
) -> Keys:
    """The ASGI application that serves this engine."""

    async def not_there(scope: Scope, receive: Receive, send: Send) -> None:
        answer = error_response(ApiError(404, f"there is no {scope['path']!r:.80}"))
        await stamped(answer, scope)(scope, receive, send)

    async def not_so(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        refusal = error_response(ApiError(405, f"{path!r:.80} knows no {request.method:.20}"))
        refusal.headers.update(getattr(error, "headers", None) or {})  # which it does know
        stamped(refusal, request.scope)
        return refusal

    limits = limits or Limits()
    app = Starlette(
        routes=Api(engine, names, max_model_len, limits).routes(),
        exception_handlers={405: not_so},
    )
    app.router.default = not_there
    app.router.redirect_slashes = False  # where to would be what the Host header says
    return Keys(app, keys, limits.max_requests_per_key)


async def not_yet(request: Request) -> ASGIApp:
    """Not there yet: 400, since clients ask again after a 501."""
    raise ApiError(
        400,
        f"{request.scope['path']} is not supported yet: this server has texts only",
        code="not_supported",
    )


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
