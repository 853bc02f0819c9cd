"""The application: routes, keys, and errors as OpenAI words them."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.server.asked import Asked, ChatRequest, CompletionRequest, read
from engine.server.chat import Chat
from engine.server.completions import Completion
from engine.server.errors import ApiError, as_api_error, error_response
from engine.server.plain import PlainStream
from engine.server.streams import EventStream, while_there

logger = logging.getLogger("engine.server")
MAX_BODY_BYTES = 32 << 20
OPEN_PATHS = ("/health", "/version")  # without a key
A = TypeVar("A", bound=Asked)


class Api:
    """What the routes do."""

    def __init__(self, engine: AsyncLLMEngine, names: Sequence[str], max_model_len: int) -> None:
        """names: of the model, the first in answers."""
        self._engine = engine
        self._names = tuple(names)
        self._max_model_len = max_model_len
        self._began = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", answered(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", answered(self.chat), methods=["POST"]),
            Route("/v1/models", answered(self.models)),
            Route("/v1/models/{name:path}", answered(self.model)),
            Route("/health", answered(self.health)),
            Route("/version", answered(self.version)),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        asked = await self._read(request, CompletionRequest)
        return await self._answer(request, asked, Completion(self._engine, asked, self._names[0]))

    async def chat(self, request: Request) -> ASGIApp:
        asked = await self._read(request, ChatRequest)
        return await self._answer(request, asked, Chat(self._engine, asked, self._names[0]))

    async def models(self, request: Request) -> ASGIApp:
        return json_response(
            {"object": "list", "data": [self._about(name) for name in self._names]}
        )

    async def model(self, request: Request) -> ASGIApp:
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._about(name))

    async def health(self, request: Request) -> ASGIApp:
        """Whether the cores go on: they answer between two steps. Some may have died."""
        await self._engine.stats()
        cores = self._engine.num_cores
        return json_response({"cores": cores.total, "cores_alive": cores.alive})

    async def version(self, request: Request) -> ASGIApp:
        return json_response({"version": version("metronome-engine")})

    # -- helpers

    async def _read(self, request: Request, kind: type[A]) -> A:
        asked = read(await body_of(request), kind)
        self._check_model(asked.model)
        return asked

    async def _answer(self, request: Request, asked: Asked, answer: Completion | Chat) -> ASGIApp:
        if not asked.stream:
            body = await while_there(answer.whole(), request.receive)
            return Response(body or b"", 200, media_type="application/json")
        plain = answer.frame is not None
        stream = PlainStream(answer) if plain else EventStream(answer.events())
        await while_there(stream.begin(), request.receive)  # what is wrong has a status of its own
        return stream

    def _check_model(self, name: str) -> None:
        if name not in self._names:
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

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._fits(scope):
            app = error_response(
                ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            )
        await app(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        """All keys are compared, each in the same time wherever it differs."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        token = given.removeprefix(b"Bearer ")
        return not self._keys or sum(hmac.compare_digest(token, key) for key in self._keys) > 0


def make_app(
    engine: AsyncLLMEngine, names: Sequence[str], max_model_len: int, keys: Sequence[str] = ()
) -> ASGIApp:
    """The ASGI application that serves this engine."""

    async def not_there(request: Request, error: Exception) -> Response:
        return error_response(ApiError(404, f"there is no {request.url.path}"))

    async def not_so(request: Request, error: Exception) -> Response:
        return error_response(ApiError(405, f"{request.url.path} knows no {request.method}"))

    routes = Api(engine, names, max_model_len).routes()
    return Keys(Starlette(routes=routes, exception_handlers={404: not_there, 405: not_so}), keys)


def answered(handle: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[..., Awaitable[ASGIApp]]:
    """The handler; what it raises is answered as an error."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            return await handle(request)
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(told)

    return endpoint


async def body_of(request: Request) -> bytes:
    """Raises ``ApiError`` as soon as it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has over {MAX_BODY_BYTES} bytes, the limit")
        parts.append(part)
    return b"".join(parts)


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
