"""Answers of the server whose results are vectors and scores, from a core without a model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support.fakes import fake_session
from support.pooling_core import WIDTH, PoolingClient, Words, spec

from engine import AsyncLLMEngine
from engine.errors import RefusedError
from engine.frontend.scoring import similarity
from engine.messages.requests import AddRequest, RequestOutput
from engine.server.errors import ApiError
from engine.server.pooled import answers
from engine.server.pooled import bodies as b
from engine.server.pooled.inputs import gathered


def by_token(request: AddRequest) -> Any:
    """A vector for each token."""
    ids = np.array(request.prompt_token_ids, np.float32)
    return np.stack([ids, ids % 3, ids % 5, np.ones_like(ids)], axis=1)


@asynccontextmanager
async def call_of(client: PoolingClient, **fields: Any) -> AsyncIterator[answers.Call]:
    engine = AsyncLLMEngine(fake_session(client, Words(), spec(**fields)))  # type: ignore[arg-type]
    yield answers.Call(engine, "/path", "id-1", "small")
    engine.shutdown()


async def test_documents_are_ranked_by_the_vectors_of_their_tokens() -> None:
    async with call_of(PoolingClient(by_token), task="token_embed") as call:
        texts = ["9 9 9", "1", "5 2 8"]
        body = b.RerankRequest(query="3 1", documents=list(texts))
        found = await answers.rerank(call, body)
        words = Words()
        vectors = [
            by_token(AddRequest("", words.encode(text), None, 0, 0.0, 1))  # type: ignore[arg-type]
            for text in ("3 1", *texts)
        ]
    want = [similarity("maxsim", vectors[0], each) for each in vectors[1:]]
    order = sorted(range(3), key=lambda place: -want[place])
    assert [each.index for each in found.results] == order
    assert [each.relevance_score for each in found.results] == [want[i] for i in order]
    assert found.usage.total_tokens == 4 + 5 + 3 + 5


async def test_each_pair_is_scored_with_its_own_vectors() -> None:
    async with call_of(PoolingClient(), similarity="dot") as call:
        ones, others = [f"{n}" for n in range(50)], [f"{n + n % 2}" for n in range(50)]
        found = await answers.score(call, b.ScoreRequest(text_1=ones, text_2=others))
    assert [each.score for each in found.data] == [1.0 - n % 2 for n in range(50)]


async def test_a_failed_input_fails_its_request() -> None:
    client = PoolingClient()
    async with call_of(client) as call:
        client.failing = {"-2": "the result has NaN"}
        with pytest.raises(ApiError) as caught:
            await answers.embed(call, b.EmbeddingRequest(input=["1", "2", "3", "4"]))
        assert caught.value.status == 500 and not client.live
        assert len((await answers.embed(call, b.EmbeddingRequest(input=["1", "2"]))).data) == 2


async def test_an_input_that_the_core_refuses_is_named() -> None:
    client = PoolingClient()
    client.refuse = lambda request: len(request.prompt_token_ids) == 4
    async with call_of(client) as call:
        for answer, body, name in (
            (answers.embed, b.EmbeddingRequest(input=["1", "2 3"]), "input[1]"),
            (answers.embed, b.EmbeddingRequest(input="2 3"), "input"),
            (answers.score, b.ScoreRequest(text_1="1", text_2=["2", "2 3"]), "text_2[1]"),
            (answers.score, b.ScoreRequest(text_1="2 3", text_2=["2", "2"]), "text_1"),
            (answers.rerank, b.RerankRequest(query="2", documents=["2 3"]), "documents[0]"),
        ):
            with pytest.raises(ApiError) as caught:
                await answer(call, body)  # type: ignore[operator]
            assert (caught.value.status, caught.value.param) == (400, name)
            assert caught.value.message == f"{name}: the fake core refuses"


async def test_a_queue_that_is_full_is_nobody_in_particular() -> None:
    client = PoolingClient()
    async with call_of(client) as call:
        call.engine.limit_queue(0)
        with pytest.raises(RefusedError, match="the queue is full"):
            await answers.embed(call, b.EmbeddingRequest(input=["1"]))


async def test_an_answer_has_a_limited_size() -> None:
    async def outputs(num: int) -> AsyncGenerator[RequestOutput, None]:
        for index in range(num):
            yield RequestOutput(
                f"{index}", None, [1, 2], [], True, pooled=np.zeros(WIDTH, np.float32)
            )

    assert len((await gathered("input", outputs(5), most=5 * WIDTH)).vectors) == 5
    with pytest.raises(ApiError, match="input has results of over 19 numbers together") as caught:
        await gathered("input", outputs(5), most=5 * WIDTH - 1)
    assert caught.value.param == "input"


async def test_requests_for_another_task_are_sent_elsewhere() -> None:
    async with call_of(PoolingClient(), task="token_classify") as call:
        for answer, body in (
            (answers.embed, b.EmbeddingRequest(input="1")),
            (answers.classify, b.ClassifyRequest(input="1")),
        ):
            with pytest.raises(ApiError, match="small has the tasks token_classify; use /pooling"):
                await answer(call, body)  # type: ignore[operator]


@pytest.mark.parametrize("labels", [("a", "b", "c", "d"), ()])
async def test_the_label_is_that_of_the_largest_number(labels: tuple[str, ...]) -> None:
    async with call_of(PoolingClient(), task="classify", labels=labels) as call:
        found = await answers.classify(call, b.ClassifyRequest(input=["1 1 3", "2"]))
    assert [each.label for each in found.data] == (["d", "a"] if labels else [None, None])
    assert found.data[0].probs == [0.0, 1.0, 0.0, 2.0] and found.data[0].num_classes == WIDTH
