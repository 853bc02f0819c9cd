"""The ASGI application and the handlers of the API's routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.messages.adapters import AdapterInfo
from engine.server.adapters import AdapterRoutes, ServedAdapters
from engine.server.answers import HttpAnswer
from engine.server.bodies import ChatRequest, CompletionRequest
from engine.server.chat import Chat
from engine.server.completions import Completion
from engine.server.dialogue import ChatModel
from engine.server.direct import DirectStream
from engine.server.errors import ApiError, error_response, field_error
from engine.server.http.answered import request_id_of, stamped
from engine.server.http.openapi import ApiRoute, document_of
from engine.server.keys import owner_of
from engine.server.limits import ServerLimits
from engine.server.messages import Messages, count_tokens
from engine.server.messages_body import MessagesRequest
from engine.server.named import NamedBodies
from engine.server.names import ServedNames
from engine.server.ollama.routes import OllamaApi
from engine.server.operations import Operations
from engine.server.pooled.routes import PooledApi
from engine.server.responses import Responses, ResponseStore
from engine.server.responses_body import ResponsesRequest
from engine.server.streams import EventStream, swallow, while_there
from engine.server.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    detokenize,
    tokenize,
)

NOT_YET = (
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
NO_TEXT = (
    "returns vectors or scores and generates no text; use /v1/embeddings, /api/embed, /rerank, "
    "/score, /classify or /pooling, or start a server with a model that generates"
)
NO_VECTORS = (
    "generates text and returns no vectors; start a server with a model for embeddings or "
    "reranking, or this one with --runner pooling"
)
LEFT_OUT = "X-Left-Out-Tools"
"""Response header with the types of tools that the server did not pass to the model."""
logger = logging.getLogger("engine.server")


class Api:
    """The handlers of the API's routes."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        names: ServedNames,
        adapters: ServedAdapters,
        limits: ServerLimits,
        chat_template: str | None,
    ) -> None:
        """chat_template: used instead of the model's own template."""
        self._engine = engine
        self.chat_model = ChatModel(engine, chat_template)
        self._store = ResponseStore()
        self._names = names
        self._adapters = adapters
        self._limits = limits
        self._bodies = NamedBodies(names, adapters, limits)
        self._max_model_len = engine.max_model_len
        self._began = int(time.time())

    def text_routes(self) -> list[ApiRoute]:
        """The routes that generate text, with the types of their bodies for the OpenAPI
        document."""
        return [
            ApiRoute("POST", "/v1/completions", self.completions, CompletionRequest, dict),
            ApiRoute("POST", "/v1/chat/completions", self.chat, ChatRequest, dict),
            ApiRoute("POST", "/v1/responses", self.responses, ResponsesRequest, dict, [404]),
            ApiRoute("GET", "/v1/responses/{response_id}", self.response, None, dict, [404]),
            ApiRoute("DELETE", "/v1/responses/{response_id}", self.forget, None, dict, [404]),
            ApiRoute("POST", "/v1/messages", self.messages, MessagesRequest, dict),
            ApiRoute("POST", "/v1/messages/count_tokens", self.count_tokens, MessagesRequest, dict),
        ]

    def routes(self) -> list[ApiRoute]:
        """The routes of every model."""
        return [
            ApiRoute("GET", "/v1/models", self.models, None, dict),
            ApiRoute("GET", "/v1/models/{name:path}", self.model, None, dict),
            ApiRoute("POST", "/tokenize", self.tokenize, TokenizeRequest, TokenizeAnswer),
            ApiRoute("POST", "/detokenize", self.detokenize, DetokenizeRequest, DetokenizeAnswer),
            ApiRoute("GET", "/version", self.version, None, dict),
            ApiRoute("GET", "/openapi.json", self.document, None, dict),
            *(ApiRoute("POST", path, not_yet) for path in NOT_YET),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        """Continue one prompt or several."""
        body = await self._bodies.read(request, CompletionRequest)
        answer = Completion(self._engine, body, self._bodies.model_of(body))
        return await self.answer(request, body.stream, answer)

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        body = await self._bodies.read(request, ChatRequest)
        answer = Chat(await self.chat_model.loaded(), body, self._bodies.model_of(body))
        return await self.answer(request, body.stream, answer)

    async def responses(self, request: Request) -> ASGIApp:
        """Create a response, which may be stored and continued."""
        body = await self._bodies.read(request, ResponsesRequest)
        owner = owner_of(request.scope)
        answer = Responses(
            await self.chat_model.loaded(), body, self._bodies.model_of(body), self._store, owner
        )
        return await self.answer(request, body.stream, answer)

    async def response(self, request: Request) -> ASGIApp:
        """Get a stored response."""
        name, owner = request.path_params["response_id"], owner_of(request.scope)
        return Response(self._store.get(name, owner).response, media_type="application/json")

    async def forget(self, request: Request) -> ASGIApp:
        """Delete a stored response."""
        name = request.path_params["response_id"]
        self._store.delete(name, owner_of(request.scope))
        return json_response({"id": name, "object": "response", "deleted": True})

    async def messages(self, request: Request) -> ASGIApp:
        """Create a message, in Anthropic's form."""
        body = await self._bodies.read(request, MessagesRequest)
        answer = Messages(await self.chat_model.loaded(), body, self._bodies.model_of(body))
        return await self.answer(request, body.stream, answer)

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Count the prompt tokens of a message request."""
        body = await self._bodies.read(request, MessagesRequest)
        counted = await count_tokens(await self.chat_model.loaded(), body)
        return Response(counted, media_type="application/json")

    async def models(self, request: Request) -> ASGIApp:
        """List the names under which the model is served, and the adapters."""
        listed = [self._about(name) for name in self._names.listed]
        listed += [self._about_adapter(each) for each in await self._adapters.listed()]
        return json_response({"object": "list", "data": listed})

    async def model(self, request: Request) -> ASGIApp:
        """Describe the model under one of its names, or an adapter."""
        name = request.path_params["name"]
        if self._names.has(name):
            return json_response(self._about(name))
        adapter = await self._adapters.find(name)
        if adapter is None:
            raise self._adapters.unknown(name)
        return json_response(self._about_adapter(adapter))

    async def version(self, request: Request) -> ASGIApp:
        """Report the server's version."""
        return json_response({"version": version("metronome-engine")})

    async def tokenize(self, request: Request) -> ASGIApp:
        """Encode a text or a conversation as token ids."""
        return json_response(
            await tokenize(self.chat_model, await self._bodies.read(request, TokenizeRequest))
        )

    async def detokenize(self, request: Request) -> ASGIApp:
        """Decode token ids to text."""
        return json_response(
            await detokenize(self._engine, await self._bodies.read(request, DetokenizeRequest))
        )

    async def document(self, request: Request) -> ASGIApp:
        """Return this OpenAPI document."""
        adapters = [adapter.name for adapter in await self._adapters.listed()]
        return json_response(document_of(request.app.routes, [*self._names.listed, *adapters]))

    # -- helpers

    async def answer(self, request: Request, is_stream: bool, answer: HttpAnswer) -> ASGIApp:
        """Send an answer, complete or as a stream. Raises the errors before its first event."""
        name = request_id_of(request.scope)
        answer.set_request_id(name)
        headers = self._without_server_tools(name, answer.left_out)
        if not is_stream:
            body = await while_there(answer.whole(), request.receive)
            return Response(body or b"", 200, headers, "application/json")
        stream: DirectStream | EventStream = DirectStream(answer)
        if isinstance(answer, Completion) and not answer.is_one:
            stream = EventStream(answer.events())
        stream.headers += [(key.lower().encode(), text.encode()) for key, text in headers.items()]
        await while_there(stream.begin(), request.receive)  # an error before this has its status
        return stream

    def _without_server_tools(self, name: str, left_out: Sequence[str]) -> dict[str, str]:
        """Response headers that list the ``left_out`` tools. Raises ``ApiError`` if the server
        refuses such tools (``--refuse-server-tools``). name: the request's id, for the log."""
        if not left_out:
            return {}
        kinds = ", ".join(dict.fromkeys(left_out))
        if self._limits.refuse_server_tools:
            raise field_error(
                "tools",
                f"has {kinds}, which the server would have to run and cannot: leave it out, "
                "or start the server without --refuse-server-tools",
            )
        logger.info("request %s: left out tools that a server would have to run: %s", name, kinds)
        return {LEFT_OUT: kinds}

    def _about(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "metronome",
            "root": self._names.first,
            "parent": None,
            "max_model_len": self._max_model_len,
            "default_sampling_params": dict(self._engine.recommended),
        }

    def _about_adapter(self, adapter: AdapterInfo) -> dict[str, object]:
        about = self._about(adapter.name)
        return {**about, "root": adapter.path or adapter.name, "parent": self._names.first}


def make_app(routes: Sequence[ApiRoute]) -> ASGIApp:
    """The ASGI application with these routes, without middleware."""

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        is_short = any(route.path == f"/v1{path}" for route in routes)
        way_out = f"use '/v1{path}', with /v1 in base_url" if is_short else "see /openapi.json"
        error = ApiError(404, f"there is no route {path!r:.80}: {way_out}")
        answer = error_response(error, scope["path"])
        await stamped(answer, scope)(scope, receive, send)

    async def method_not_allowed(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        fitting = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
        allowed = ", ".join(sorted({each for route in fitting for each in route.methods or ()}))
        wrong = ApiError(405, f"{path!r:.80} does not take {request.method:.20}: use {allowed}")
        refusal = error_response(wrong, path)
        refusal.headers["Allow"] = allowed
        stamped(refusal, request.scope)
        return refusal

    app = Starlette(routes=routes, exception_handlers={405: method_not_allowed})
    app.router.default = not_found
    app.router.redirect_slashes = False  # a redirect would go to the host of the Host header
    return app


def routes_of(
    engine: AsyncLLMEngine,
    names: ServedNames,
    adapters: ServedAdapters,
    operations: Operations,
    limits: ServerLimits,
    chat_template: str | None = None,
) -> list[ApiRoute]:
    """All routes of the server. ``chat_template`` is used instead of the model's own template."""
    api = Api(engine, names, adapters, limits, chat_template)
    ollama = OllamaApi(engine, names, adapters, limits, api.chat_model, api.answer)
    text = [*api.text_routes(), *ollama.text_routes()]
    pooled = [*PooledApi(engine, names, adapters, limits).routes(), *ollama.pooled_routes()]
    if engine.runner == "pooling":
        text = [refused(route, f"{names.first} {NO_TEXT}") for route in text]
    else:
        pooled = [refused(route, f"{names.first} {NO_VECTORS}") for route in pooled]
    return [
        *text,
        *pooled,
        *api.routes(),
        *ollama.routes(),
        *AdapterRoutes(adapters, limits.max_body_bytes).routes(operations),
        *operations.routes(),
    ]


def refused(route: ApiRoute, why: str) -> ApiRoute:
    """A route in place of ``route``, which the model does not support."""

    async def refuse(request: Request) -> ASGIApp:
        """Not supported by this model."""
        await swallow(request.receive)
        message = f"{route.path} is not supported: {why}"
        raise ApiError(400, message, code="not_supported")

    return ApiRoute(route.method, route.path, refuse)


async def not_yet(request: Request) -> ASGIApp:
    """Not supported yet (answered with 400, since clients retry after a 501)."""
    await swallow(request.receive)
    raise ApiError(
        400,
        f"{request.scope['path']} is not supported yet: this server generates text only",
        code="not_supported",
    )


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
