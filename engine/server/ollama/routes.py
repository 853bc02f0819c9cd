"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from engine.async_engine import AsyncLLMEngine
from engine.server.adapters import ServedAdapters
from engine.server.answers import HttpAnswer
from engine.server.dialogue import ChatModel
from engine.server.errors import ApiError, field_error
from engine.server.http.answered import request_id_of
from engine.server.http.openapi import ApiRoute
from engine.server.limits import ServerLimits
from engine.server.names import ServedNames
from engine.server.ollama.answers import ChatAnswer, GenerateAnswer, head_of, too_long
from engine.server.ollama.bodies import (
    QUEUED,
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    GeneratingBody,
    OllamaBody,
    ShowBody,
    check_alone,
)
from engine.server.ollama.details import ModelDetails, read_details, time_of
from engine.server.ollama.names import TaggedBodies, tagged
from engine.server.ollama.options import check_options, context_of
from engine.server.pooled.answers import Call, encoded
from engine.server.pooled.bodies import EmbeddingRequest
from engine.server.pooled.inputs import Results
from engine.server.streams import swallow, while_there

Json = dict[str, Any]
OLLAMA_VERSION = "0.13.0"
"""The version whose API this is. Some clients need at least a certain one."""
RUNNING = "Ollama is running"
FOREVER = "2318-01-01T00:00:00Z"
"""When the model is unloaded: its server never does that. Ollama's lists have no other form."""
UNMANAGED = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/blobs/{digest}"),
)
Send = Callable[[Request, bool, HttpAnswer], Awaitable[ASGIApp]]


class GreetingRoute(ApiRoute):
    """``GET /`` and ``HEAD /``, by which clients see that a server runs. Browsers get a page."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """No match for a request of a browser."""
        accepted = dict(scope.get("headers", ())).get(b"accept", b"")
        if scope["type"] == "http" and scope["method"] == "GET" and b"text/html" in accepted:
            return Match.NONE, {}
        return super().matches(scope)


class OllamaApi:
    """The handlers of these routes."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        names: ServedNames,
        adapters: ServedAdapters,
        limits: ServerLimits,
        chat_model: ChatModel,
        send: Send,
    ) -> None:
        """send: sends an answer, complete or as a stream."""
        self._engine = engine
        self._names = names
        self._adapters = adapters
        self._bodies = TaggedBodies(names, adapters, limits)
        self._model = chat_model
        self._send = send
        self._began = time.time()
        self._details: ModelDetails | None = None

    def text_routes(self) -> list[ApiRoute]:
        """The routes that generate text."""
        return [
            ApiRoute("POST", "/api/chat", self.chat, ChatBody, dict),
            ApiRoute("POST", "/api/generate", self.generate, GenerateBody, dict),
        ]

    def pooled_routes(self) -> list[ApiRoute]:
        """The routes of models that pool."""
        return [
            ApiRoute("POST", "/api/embed", self.embed, EmbedBody, dict),
            ApiRoute("POST", "/api/embeddings", self.embeddings, EmbeddingsBody, dict),
        ]

    def routes(self) -> list[ApiRoute]:
        """The routes of every model."""
        return [
            GreetingRoute("GET", "/", greet),
            ApiRoute("GET", "/api/version", version, None, dict),
            ApiRoute("GET", "/api/tags", self.tags, None, dict),
            ApiRoute("GET", "/api/ps", self.loaded, None, dict),
            ApiRoute("POST", "/api/show", self.show, ShowBody, dict),
            *(ApiRoute(method, path, unmanaged) for method, path in UNMANAGED),
        ]

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation, in Ollama's form."""
        body, name = await self._bodies.read_named(request, ChatBody)
        if not body.messages:
            return _nothing(body, name, {"message": {"role": "assistant", "content": ""}})
        answer = ChatAnswer(await self._model.loaded(), body, name)
        return await self._send(request, body.stream, answer)

    async def generate(self, request: Request) -> ASGIApp:
        """Answer a prompt, in Ollama's form."""
        body, name = await self._bodies.read_named(request, GenerateBody)
        if not body.prompt:
            return _nothing(body, name, {"response": ""})
        answer = GenerateAnswer(await self._model.loaded(), body, name)
        return await self._send(request, body.stream, answer)

    async def embed(self, request: Request) -> ASGIApp:
        """Compute embeddings of texts, in Ollama's form."""
        body, name = await self._bodies.read_named(request, EmbedBody)
        check_options(body.values)
        began, num_tokens, vectors = time.monotonic(), 0, list[Any]()
        if body.input:
            found = await self._vectors(request, body, name, body.input, body.dimensions)
            if found is None:
                return Response(b"")
            vectors = await encoded(found.vectors, lambda _, vector: vector.tolist())
            num_tokens = found.usage.prompt_tokens
        times = {"total_duration": round((time.monotonic() - began) * 1e9), "load_duration": 0}
        return _json(
            {"model": name, "embeddings": vectors, **times, "prompt_eval_count": num_tokens}
        )

    async def embeddings(self, request: Request) -> ASGIApp:
        """Compute the embedding of one text, in Ollama's older form."""
        body, name = await self._bodies.read_named(request, EmbeddingsBody)
        check_options(body.values)
        if not body.prompt:
            return _json({"embedding": []})
        found = await self._vectors(request, body, name, body.prompt)
        return _json({"embedding": [] if found is None else found.vectors[0].tolist()})

    async def tags(self, request: Request) -> ASGIApp:
        """List the names of the model, and the adapters, in Ollama's form."""
        return _json({"models": await self._listed()})

    async def loaded(self, request: Request) -> ASGIApp:
        """List the same as loaded models, in Ollama's form."""
        listed = await self._listed()
        for each in listed:
            del each["modified_at"]
            each["expires_at"] = FOREVER
            each["size_vram"] = 0  # only the core knows its device
            each["context_length"] = self._engine.max_model_len
        return _json({"models": listed})

    async def show(self, request: Request) -> ASGIApp:
        """Describe the model or an adapter, in Ollama's form."""
        body = await self._bodies.read_any(request, ShowBody)
        name = body.model or body.name
        if not name:
            raise field_error("model", "is missing: add it, it is required")
        adapter = await self._bodies.adapter_of(name)
        details, tokenizer = await self._read_details(), self._engine.tokenizer
        templates = {} if tokenizer is None else tokenizer.templates
        template = self._model.chat_template or templates.get("default", "")
        lines = [f"{key} {value}" for key, value in self._engine.recommended.items()]
        return _json(
            {
                "license": "",
                "modelfile": f"FROM {self._names.first}\n",
                "parameters": "\n".join(lines),
                "template": template,
                "details": details.about(self._names.first if adapter else ""),
                "model_info": details.info(self._engine.max_model_len),
                "capabilities": await self._capabilities(),
                "modified_at": time_of(details.modified or self._began),
            }
        )

    # -- helpers

    async def _vectors(
        self,
        request: Request,
        body: OllamaBody,
        name: str,
        given: str | list[str],
        dimensions: int | None = None,
    ) -> Results | None:
        """The embeddings of texts; ``None`` if the client leaves."""
        call = Call(self._engine, request.url.path, f"embd-{request_id_of(request.scope)}", name)
        call.require("embed")
        limit = self._engine.max_model_len
        most = context_of(body.values, limit)
        pooled = EmbeddingRequest(
            input=[*given] if isinstance(given, list) else given,
            dimensions=dimensions,
            truncate_prompt_tokens=(-1 if most == limit else most) if body.truncate else None,
            **{field: getattr(body, field) for field in (*QUEUED, "model")},
        )
        params = pooled.params("embed", dimensions)
        if not body.truncate:
            await self._check_length(given, most)
        return await while_there(call.results(pooled, params), request.receive)

    async def _check_length(self, given: str | list[str], most: int) -> None:
        """Raise ``ApiError`` if a text has more than ``most`` tokens."""
        for text in self._engine.pooled.with_prompts(given if isinstance(given, list) else [given]):
            assert isinstance(text, str)
            num = len(await self._engine.tokenize(text))
            if num > most:
                raise too_long(f"a text has {num} tokens, the limit is {most}")

    async def _listed(self) -> list[Json]:
        details = await self._read_details()
        parents = dict.fromkeys(self._names.listed, "")
        for adapter in await self._adapters.listed():
            parents[adapter.name] = self._names.first
        return [
            {
                "name": tagged(name),
                "model": tagged(name),
                "modified_at": time_of(details.modified or self._began),
                "size": details.num_bytes,
                "digest": details.digest,
                "details": details.about(parent),
            }
            for name, parent in parents.items()
        ]

    async def _read_details(self) -> ModelDetails:
        if self._details is None:
            self._details = await asyncio.to_thread(read_details, self._engine.model_path)
        return self._details

    async def _capabilities(self) -> list[str]:
        if self._engine.runner == "pooling":
            return ["embedding"]
        chat_format = (await self._model.loaded()).chat_format
        found = ["completion", "tools"]
        if chat_format.parser_factory(has_tools=False) is not None:
            found.append("thinking")
        if self._engine.pictures.are_read:
            found.append("vision")
        return found


async def greet(request: Request) -> ASGIApp:
    """Tell clients of Ollama that the server runs."""
    return PlainTextResponse(RUNNING)


async def version(request: Request) -> ASGIApp:
    """Report the version of Ollama whose API this is."""
    return _json({"version": OLLAMA_VERSION})


async def unmanaged(request: Request) -> ASGIApp:
    """Not supported: the model is chosen when the server starts."""
    await swallow(request.receive)
    raise ApiError(
        400,
        f"{request.scope['path']:.80} is not supported: this server has one model, which is chosen "
        "when it starts: metronome serve MODEL",
        code="not_supported",
    )


def _nothing(body: GeneratingBody, name: str, content: Json) -> Response:
    """The answer to a request that only loads the model, or that would unload it. Raises as
    ``check_alone`` does."""
    check_alone(body)
    reason = "unload" if body.keep_alive in (0, "0", "0s", "0m") else "load"
    return _json({**head_of(name), **content, "done": True, "done_reason": reason})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
