"""Answers whose result is a vector or a score."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engine.async_engine import AsyncLLMEngine
from engine.frontend.scoring import Comparison, Side, compare
from engine.messages.pooling import PoolingParams, PoolingTask
from engine.messages.vectors import Vectors
from engine.server.answers import OURS
from engine.server.errors import ApiError, field_error
from engine.server.pooled import bodies as b
from engine.server.pooled.inputs import (
    Results,
    as_base64,
    check_number,
    compute,
    gathered,
    inputs_of,
    texts_of,
)

ROUTE_OF: dict[PoolingTask, str] = {
    "embed": "/v1/embeddings",
    "classify": "/classify",
    "token_embed": "/pooling",
    "token_classify": "/pooling",
}
"""The route for the main task of a model."""

INLINE_NUMBERS = 1 << 14  # are encoded in less than 2 ms


@dataclass(frozen=True)
class Call:
    """One HTTP request: its path, the id of its answer, and the model's name in it."""

    engine: AsyncLLMEngine
    path: str
    id: str
    model: str

    @property
    def head(self) -> dict[str, Any]:
        """Fields with which most answers begin."""
        return {"id": self.id, "created": int(time.time()), "model": self.model}

    @property
    def engine_id(self) -> str:
        """The beginning of the ids of engine requests. Clients may send an id twice."""
        return f"{self.id}{OURS}{uuid.uuid4().hex[:12]}"

    def require(self, task: PoolingTask) -> None:
        """Raise ``ApiError`` if the model does not have this task."""
        spec = self.engine.pooled.spec
        if spec is not None and task not in spec.tasks:
            raise ApiError(
                400,
                f"{self.path} is not supported: {self.model} has the tasks "
                f"{', '.join(spec.tasks)}; use {ROUTE_OF[spec.task]}",
                code="not_supported",
            )

    async def results(self, body: b.InputBody, params: PoolingParams) -> Results:
        """The results of the inputs of a request."""
        texts = self.engine.pooled
        given, field_of = inputs_of("input", body.input)
        params, prompts = texts.resolved(params), texts.with_prompts(given, body.prompt_name)
        if not body.add_special_tokens:
            prompts = [
                await self.engine.tokenize(each, False) if isinstance(each, str) else each
                for each in prompts
            ]
        every = [params] * len(prompts)
        outputs = compute(self.engine, self.engine_id, prompts, every, body, field_of)
        return await gathered("input", outputs)

    async def scores(
        self,
        body: b.PooledBody,
        ones: list[str],
        others: list[str],
        field_of: Callable[[Side, int], str],
    ) -> tuple[list[float], b.PooledUsage]:
        """The score of each pair. field_of: the field of the body that has a text, by its side and
        place."""
        work = await asyncio.to_thread(compare, self.engine.pooled, ones, others, body.params(None))
        outputs = compute(
            self.engine,
            self.engine_id,
            work.prompts,
            work.params,
            body,
            lambda index: field_of(*work.origins[index]),
        )
        scores: list[float] = []
        kept: list[Vectors | None] = []  # by prompt
        num_tokens = 0
        async with aclosing(outputs) as source:
            async for output in source:
                kept.append(output.pooled)
                num_tokens += len(output.prompt_token_ids)
                places = work.parts[len(scores)]
                if len(kept) > places[-1]:
                    results = [kept[place] for place in places]
                    scores.append(await _score(work, places, results))
                    kept[-1] = None  # a document is compared once
        return scores, b.PooledUsage(num_tokens, num_tokens)


async def _score(
    work: Comparison, places: Sequence[int], results: Sequence[Vectors | None]
) -> float:
    """The score of one pair, without blocking other tasks. places: of its prompts; results: of
    them."""
    found = [each for each in results if each is not None]
    if work.is_by_token:
        return await asyncio.to_thread(work.score, places, found)
    return work.score(places, found)


async def embed(call: Call, body: b.EmbeddingRequest) -> b.EmbeddingAnswer:
    """The answer to ``/v1/embeddings``. Raises ``ApiError`` or ``RequestError``."""
    call.require("embed")
    vectors, usage = await call.results(body, body.params("embed", body.dimensions))
    encode = as_base64 if body.encoding_format == "base64" else _numbers

    def item(index: int, vector: Vectors) -> b.Embedding:
        return b.Embedding(index=index, embedding=encode(vector))

    return b.EmbeddingAnswer(**call.head, data=await encoded(vectors, item), usage=usage)


async def pool(call: Call, body: b.PoolingRequest) -> b.PoolingAnswer:
    """The answer to ``/pooling``. Raises ``ApiError`` or ``RequestError``."""
    vectors, usage = await call.results(body, body.params(body.task, body.dimensions))

    def item(index: int, vector: Vectors) -> b.Pooled:
        if body.encoding_format == "base64":
            return b.Pooled(index=index, data=as_base64(vector), shape=list(vector.shape))
        return b.Pooled(index=index, data=vector.tolist())

    return b.PoolingAnswer(**call.head, data=await encoded(vectors, item), usage=usage)


async def encoded(vectors: Sequence[Vectors], item: Callable[[int, Vectors], Any]) -> list[Any]:
    """The items of an answer, as JSON. Many numbers are encoded in another thread and one by one,
    so that other tasks run meanwhile."""

    def encode() -> list[msgspec.Raw]:
        every = enumerate(vectors)
        return [msgspec.Raw(msgspec.json.encode(item(index, each))) for index, each in every]

    if sum(vector.size for vector in vectors) <= INLINE_NUMBERS:
        return encode()
    return await asyncio.to_thread(encode)


async def classify(call: Call, body: b.ClassifyRequest) -> b.ClassifyAnswer:
    """The answer to ``/classify``. Raises ``ApiError`` or ``RequestError``."""
    call.require("classify")
    vectors, usage = await call.results(body, body.params("classify"))
    spec = call.engine.pooled.spec
    labels = () if spec is None else spec.labels
    data = []
    for index, each in enumerate(vectors):
        best = int(np.argmax(each))
        label = labels[best] if len(labels) == len(each) else None
        data.append(
            b.Classified(index=index, label=label, probs=each.tolist(), num_classes=len(each))
        )
    return b.ClassifyAnswer(**call.head, data=data, usage=usage)


async def score(call: Call, body: b.ScoreRequest) -> b.ScoreAnswer:
    """The answer to ``/score``. Raises ``ApiError`` or ``RequestError``."""
    given = body.text_1, body.text_2
    ones, others = texts_of("text_1", body.text_1), texts_of("text_2", body.text_2)

    def field_of(side: Side, place: int) -> str:
        name = f"text_{side + 1}"
        return f"{name}[{place}]" if isinstance(given[side], list) else name

    scores, usage = await call.scores(body, ones, others, field_of)
    data = [b.Score(index=index, score=each) for index, each in enumerate(scores)]
    return b.ScoreAnswer(**call.head, data=data, usage=usage)


async def rerank(call: Call, body: b.RerankRequest) -> b.RerankAnswer:
    """The answer to ``/rerank``. Raises ``ApiError`` or ``RequestError``."""
    check_number("documents", len(body.documents))
    documents = [_document(place, each) for place, each in enumerate(body.documents)]
    top_n = len(documents) if body.top_n in (None, 0) else body.top_n
    if top_n is None or top_n < 0:
        raise field_error("top_n", f"is {body.top_n}, must be 1 or more, or 0 for all documents")
    texts = [document["text"] for document in documents]

    def field_of(side: Side, place: int) -> str:
        return f"documents[{place}]" if side else "query"

    scores, usage = await call.scores(body, [body.query], texts, field_of)
    order = sorted(range(len(texts)), key=lambda place: -scores[place])[:top_n]
    results = [
        b.Reranked(
            index=place,
            relevance_score=scores[place],
            document=documents[place] if body.return_documents else None,
        )
        for place in order
    ]
    return b.RerankAnswer(id=call.id, model=call.model, results=results, usage=usage)


def _document(place: int, given: str | dict[str, Any]) -> dict[str, Any]:
    """A document as an object with its text. Raises ``ApiError`` for an object without."""
    if isinstance(given, str):
        return {"text": given}
    if not isinstance(given.get("text"), str):
        raise field_error(f"documents[{place}]", "has no text: send a text, or an object with text")
    return given


def _numbers(vector: Vectors) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers
