"""The application: routes, keys, and errors as OpenAI words them."""

from __future__ import annotations

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
from starlette.types import ASGIApp

from engine.async_engine import AsyncLLMEngine
from engine.server.answers import Answer
from engine.server.asked import ChatRequest, CompletionRequest, read
from engine.server.chat import Chat
from engine.server.completions import Completion
from engine.server.dialogue import ChatModel
from engine.server.errors import ApiError, as_api_error, error_response
from engine.server.keys import Guard, owner_of
from engine.server.messages import Messages, count_tokens
from engine.server.messages_asked import MessagesRequest
from engine.server.operations import Operations
from engine.server.responses import Responses, ResponseStore
from engine.server.responses_asked import ResponsesRequest
from engine.server.streams import EventStream, while_there

logger = logging.getLogger("engine.server")
MAX_BODY_BYTES = 32 << 20
A = TypeVar("A", CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)


class Api:
    """What the routes do."""

    def __init__(
        self, engine: AsyncLLMEngine, names: Sequence[str], chat_template: str | None
    ) -> None:
        """names: of the model, the first in answers; chat_template: instead of the model's own."""
        self._engine = engine
        self._model = ChatModel(engine, chat_template)
        self._names = tuple(names)
        self._max_model_len = engine.max_model_len
        self._store = ResponseStore()
        self._began = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", answered(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", answered(self.chat), methods=["POST"]),
            Route("/v1/responses", answered(self.responses), methods=["POST"]),
            Route("/v1/responses/{name}", answered(self.response), methods=["GET", "DELETE"]),
            Route("/v1/messages", answered(self.messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", answered(self.count_tokens), methods=["POST"]),
            Route("/v1/models", answered(self.models)),
            Route("/v1/models/{name:path}", answered(self.model)),
            Route("/version", answered(self.version)),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        asked = await self._read(request, CompletionRequest)
        return await self._answer(
            request, asked.stream, Completion(self._engine, asked, self._names[0])
        )

    async def chat(self, request: Request) -> ASGIApp:
        asked = await self._read(request, ChatRequest)
        return await self._answer(request, asked.stream, Chat(self._model, asked, self._names[0]))

    async def responses(self, request: Request) -> ASGIApp:
        asked = await self._read(request, ResponsesRequest)
        owner = owner_of(request.scope)
        answer = Responses(self._model, asked, self._names[0], self._store, owner)
        return await self._answer(request, asked.stream, answer)

    async def response(self, request: Request) -> ASGIApp:
        name, owner = request.path_params["name"], owner_of(request.scope)
        if request.method == "DELETE":
            self._store.delete(name, owner)
            return json_response({"id": name, "object": "response", "deleted": True})
        told = self._store.get(name, owner).told
        return Response(told, media_type="application/json")

    async def messages(self, request: Request) -> ASGIApp:
        asked = await self._read(request, MessagesRequest)
        answer = Messages(self._model, asked, self._names[0])
        return await self._answer(request, asked.stream, answer)

    async def count_tokens(self, request: Request) -> ASGIApp:
        asked = await self._read(request, MessagesRequest)
        counted = await count_tokens(self._model, asked)
        return Response(counted, media_type="application/json")

    async def models(self, request: Request) -> ASGIApp:
        return json_response(
            {"object": "list", "data": [self._about(name) for name in self._names]}
        )

    async def model(self, request: Request) -> ASGIApp:
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._about(name))

    async def version(self, request: Request) -> ASGIApp:
        return json_response({"version": version("metronome-engine")})

    # -- helpers

    async def _read(self, request: Request, kind: type[A]) -> A:
        asked = read(await body_of(request), kind)
        self._check_model(asked.model)
        return asked

    async def _answer(self, request: Request, is_stream: bool, answer: Answer) -> ASGIApp:
        if not is_stream:
            body = await while_there(answer.whole(), request.receive)
            return Response(body or b"", 200, media_type="application/json")
        stream = EventStream(answer.events())
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


def make_app(
    engine: AsyncLLMEngine,
    names: Sequence[str],
    operations: Operations,
    chat_template: str | None = None,
) -> ASGIApp:
    """The ASGI application that serves this engine; ``chat_template`` replaces the model's own."""

    async def not_there(request: Request, error: Exception) -> Response:
        return error_response(ApiError(404, f"there is no {request.url.path}"))

    async def not_so(request: Request, error: Exception) -> Response:
        return error_response(ApiError(405, f"{request.url.path} knows no {request.method}"))

    routes = [*Api(engine, names, chat_template).routes(), *operations.routes(answered)]
    app = Starlette(routes=routes, exception_handlers={404: not_there, 405: not_so})
    return operations.traffic.counting(Guard(app, operations.keys), routes)


def answered(handle: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[..., Awaitable[ASGIApp]]:
    """The handler; what it raises is answered as an error."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            return await handle(request)
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(told, request.url.path)

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
