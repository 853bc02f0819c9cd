"""The routes of models that pool: embeddings, reranking, scores, classes, and other vectors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.async_engine import AsyncLLMEngine
from engine.server.adapters import ServedAdapters
from engine.server.http.answered import request_id_of
from engine.server.http.openapi import ApiRoute
from engine.server.limits import ServerLimits
from engine.server.named import NamedBodies
from engine.server.names import ServedNames
from engine.server.pooled import bodies as b
from engine.server.pooled.answers import Call, classify, embed, pool, rerank, score
from engine.server.streams import while_there

Body = TypeVar("Body", bound=b.PooledBody)


class PooledApi:
    """The handlers of these routes."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        names: ServedNames,
        adapters: ServedAdapters,
        limits: ServerLimits,
    ) -> None:
        self._engine = engine
        self._bodies = NamedBodies(names, adapters, limits)

    def routes(self) -> list[ApiRoute]:
        """The routes, with the types of their bodies for the OpenAPI document."""
        embeddings = (self.embeddings, b.EmbeddingRequest, b.EmbeddingAnswer)
        reranking = (self.rerank, b.RerankRequest, b.RerankAnswer)
        scoring = (self.score, b.ScoreRequest, b.ScoreAnswer)
        return [
            ApiRoute("POST", "/v1/embeddings", *embeddings),
            *(ApiRoute("POST", f"{version}/rerank", *reranking) for version in ("", "/v1", "/v2")),
            *(ApiRoute("POST", f"{version}/score", *scoring) for version in ("", "/v1")),
            ApiRoute("POST", "/classify", self.classify, b.ClassifyRequest, b.ClassifyAnswer),
            ApiRoute("POST", "/pooling", self.pooling, b.PoolingRequest, b.PoolingAnswer),
        ]

    async def embeddings(self, request: Request) -> ASGIApp:
        """Compute embeddings of texts."""
        return await self._answer(request, b.EmbeddingRequest, "embd", embed)

    async def rerank(self, request: Request) -> ASGIApp:
        """Sort documents by how well they fit a query."""
        return await self._answer(request, b.RerankRequest, "rerank", rerank)

    async def score(self, request: Request) -> ASGIApp:
        """Score pairs of texts: one with each of several, or each with its partner."""
        return await self._answer(request, b.ScoreRequest, "score", score)

    async def classify(self, request: Request) -> ASGIApp:
        """Classify texts."""
        return await self._answer(request, b.ClassifyRequest, "classify", classify)

    async def pooling(self, request: Request) -> ASGIApp:
        """Compute the results of any task of the model, also for each token."""
        return await self._answer(request, b.PoolingRequest, "pool", pool)

    async def _answer(
        self,
        request: Request,
        kind: type[Body],
        prefix: str,
        answer: Callable[[Call, Body], Awaitable[msgspec.Struct]],
    ) -> ASGIApp:
        """Read a body and answer it. prefix: begins the answer's id."""
        body = await self._bodies.read(request, kind)
        name = f"{prefix}-{request_id_of(request.scope)}"
        call = Call(self._engine, request.url.path, name, self._bodies.model_of(body))

        async def encoded() -> bytes:
            return msgspec.json.encode(await answer(call, body))

        content = await while_there(encoded(), request.receive)
        return Response(content or b"", media_type="application/json")
