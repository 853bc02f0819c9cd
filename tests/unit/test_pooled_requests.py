"""Pooled requests in the front end: prompts, truncation, checks, results by index, scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fakes import FakeClient, counting, fake_session
from support.pooling_core import BEGIN, END, WORD, PoolingClient, Words, spec

from engine import AsyncLLMEngine, LLMEngine, PoolingParams
from engine.config.pooling import PoolingSpec
from engine.errors import PromptTooLongError, RequestError, RequestTypeError
from engine.frontend.pooling import PooledTexts
from engine.frontend.scoring import compare, similarity

PROMPTS = {"query": "7 ", "passage": "8 ", "own": "9 "}
MATRYOSHKA = {"is_matryoshka": True, "matryoshka_dimensions": (2, 3)}


def texts(made: PoolingSpec | None = None, most: int = 32) -> PooledTexts:
    return PooledTexts(made, Words(), most)  # type: ignore[arg-type]


def engine_of(client: FakeClient, **fields: Any) -> AsyncLLMEngine:
    return AsyncLLMEngine(fake_session(client, Words(), spec(**fields)))  # type: ignore[arg-type]


def words(*numbers: int) -> list[int]:
    return [BEGIN, *(WORD + number for number in numbers), END]


def test_a_prompt_by_name_or_the_default_one_goes_in_front_of_texts() -> None:
    plain, named = texts(spec()), texts(spec(prompts=PROMPTS, default_prompt_name="own"))
    inputs = ["1", {"prompt": "2"}, [5], {"prompt_token_ids": [5]}]
    assert plain.with_prompts(inputs) == inputs
    assert named.with_prompts(inputs) == ["9 1", {"prompt": "9 2"}, *inputs[2:]]
    assert named.with_prompts(["1"], "query") == ["7 1"]
    assert named.prompt_name("query") == "query" and named.prompt_name("document") == "passage"
    for wrong, message in (("qury", "did you mean 'query'"), ("", "prompts are: query, passage")):
        with pytest.raises(RequestError, match=message):
            named.with_prompts(["1"], wrong)
    with pytest.raises(RequestError, match="prompts are: none"):
        plain.with_prompts(["1"], "query")
    with pytest.raises(RequestError, match="for token ids"):
        named.with_prompts([[1, 2]], "query")


@pytest.mark.parametrize(
    ("longest", "given", "kept"),
    [(None, None, None), (None, -1, 32), (None, 5, 5), (7, None, 7), (7, -1, 7), (7, 5, 5)],
)
def test_what_a_request_leaves_open_is_as_the_directory_says(
    longest: int | None, given: int | None, kept: int | None
) -> None:
    params = PoolingParams(truncate_prompt_tokens=given)
    found = texts(spec(max_seq_length=longest)).resolved(params)
    assert (found.task, found.truncate_prompt_tokens) == ("embed", kept)


def test_tasks_and_dimensions_that_the_model_does_not_have() -> None:
    plain, small = texts(spec()), texts(spec(**MATRYOSHKA))
    any_size = texts(spec(is_matryoshka=True))
    for good, size in ((plain, 4), (small, 4), (small, 2), (any_size, 1)):
        assert good.resolved(PoolingParams(dimensions=size)).dimensions == size
    for wrong, size, message in (
        (plain, 2, "not trained for fewer than 4"),
        (small, 1, "must be one of: 2, 3"),
        (any_size, 5, "must be at most 4"),
    ):
        with pytest.raises(RequestError, match=message):
            wrong.resolved(PoolingParams(dimensions=size))
    with pytest.raises(RequestError, match="'classify', must be one of: embed, token_embed"):
        plain.resolved(PoolingParams(task="classify"))
    with pytest.raises(RequestError, match="no embedding"):
        texts(spec(task="classify")).resolved(PoolingParams(dimensions=2))
    unknown = texts(None).resolved(PoolingParams(task="classify", dimensions=3))
    assert (unknown.task, unknown.dimensions) == ("classify", 3)


def test_a_cut_keeps_the_special_tokens_at_both_ends() -> None:
    made = texts(spec())
    assert made.cut(words(*range(9)), 5) == words(0, 1, 2)
    assert made.cut(list(range(20, 30)), 3) == [20, 21, 22], "ids without special tokens"
    assert made.cut(words(1), 3) == words(1)
    assert made.cut(words(*range(9)), 2) == words(0)[:2], "no text fits between them"


async def results(engine: AsyncLLMEngine, *prompts: Any, **params: Any) -> list[list[float]]:
    every = [engine.pooled.resolved(PoolingParams(**params))] * len(prompts)
    readers = await engine.open_together("r", prompts, every)
    outputs = [await reader.next() for reader in readers]
    for reader in readers:
        reader.close()
    return [[] if output.pooled is None else output.pooled.tolist() for output in outputs]


async def test_encode_yields_one_output() -> None:
    engine = engine_of(PoolingClient(), prompts=PROMPTS, default_prompt_name="own")
    (output,) = [each async for each in engine.encode("1 5", PoolingParams(), "a")]
    assert output.outputs.data.tolist() == [0.0, 0.0, 0.0, 3.0] and output.finished
    assert output.prompt_token_ids == words(9, 1, 5)
    with pytest.raises(RequestTypeError, match="must be PoolingParams, got str"):
        await anext(engine.encode("1", "embed", "b"))  # type: ignore[arg-type]
    engine.shutdown()


async def test_a_prompt_may_fill_the_model_and_a_longer_one_is_refused() -> None:
    client = PoolingClient(max_model_len=6)
    engine = engine_of(client)
    await results(engine, "1 2 3 4")
    with pytest.raises(PromptTooLongError, match="7 tokens, but max_model_len is 6; shorten"):
        await results(engine, "1 2 3 4 5")
    await results(engine, "1 2 3 4 5", truncate_prompt_tokens=-1)
    assert client.done[-1].prompt_token_ids == words(1, 2, 3, 4)
    assert client.done[-1].pooling == PoolingParams(task="embed")
    engine.shutdown()


async def test_inputs_of_a_request_are_computed_in_one_step() -> None:
    client = PoolingClient(seats=1000)
    engine = engine_of(client)
    many = [f"{number}" for number in range(500)]
    found = await results(engine, *many)
    assert [vector.index(1.0) for vector in found] == [(i + WORD) % 4 for i in range(500)]
    assert client.num_steps == 1
    engine.shutdown()


async def test_one_wrong_input_is_named_and_nothing_is_computed() -> None:
    client = PoolingClient()
    engine = engine_of(client)
    for wrong, message in ((["1", [5000]], "5000"), (["1", ""], None), (["1", []], "empty")):
        if message is None:  # the special tokens are a prompt
            await results(engine, *wrong)
            continue
        num_done = len(client.done)
        with pytest.raises(RequestError, match=message) as caught:
            await results(engine, *wrong)
        assert caught.value.index == 1 and len(client.done) == num_done
    engine.shutdown()


async def test_a_failed_request_says_why_when_its_result_is_read() -> None:
    client = PoolingClient()
    client.failing["bad"] = "the result has NaN"
    engine = engine_of(client)
    (output,) = [each async for each in engine.encode([5], None, "bad")]
    assert (output.result, output.error, output.code) == (
        None, "the result has NaN", "request_failed"
    )  # fmt: skip
    with pytest.raises(RequestError, match="'bad' has failed: the result has NaN"):
        _ = output.outputs
    engine.shutdown()


async def test_cancelled_requests_leave_the_core(gate: Any) -> None:
    client = PoolingClient(pace=gate.acquire)
    engine = engine_of(client)
    readers = await engine.open_together("r", [[5], [6]], [PoolingParams(task="embed")] * 2)
    for reader in readers:
        reader.close()
    gate.release(3)
    await results(engine, [7])
    assert not client.live
    engine.shutdown()


async def test_a_queue_counts_a_request_once_however_many_inputs_it_has() -> None:
    engine = engine_of(PoolingClient())
    engine.limit_queue(3)
    assert len(await results(engine, *(f"{i}" for i in range(100)))) == 100
    engine.shutdown()


def test_a_stepped_engine_returns_results_in_outputs() -> None:
    engine = LLMEngine(fake_session(PoolingClient(), Words(), spec()))  # type: ignore[arg-type]
    engine.add_request("a", "1 2", PoolingParams())
    (output,) = engine.step()
    assert output.pooled is not None and output.pooled.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert output.finished and not engine.has_unfinished_requests()


def test_params_that_are_out_of_range() -> None:
    for fields in (
        {"task": "rank"},
        {"dimensions": 0},
        {"dimensions": "3"},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": True},
    ):
        (name,) = fields
        with pytest.raises(RequestError, match=f"^{name} is") as caught:
            PoolingParams(**fields)  # type: ignore[arg-type]
        assert caught.value.param == name


async def test_a_model_that_generates_is_unchanged() -> None:
    engine = AsyncLLMEngine(fake_session(FakeClient(counting)))
    assert engine.runner == "generate" and engine.pooled.spec is None
    engine.shutdown()


ONE, OTHER = np.array([3.0, 4.0]), np.array([4.0, 3.0])


@pytest.mark.parametrize(
    ("kind", "score"),
    [("cosine", 0.96), ("dot", 24.0), ("euclidean", -(2.0**0.5)), ("manhattan", -2.0)],
)
def test_similarities_of_vectors(kind: str, score: float) -> None:
    assert similarity(kind, ONE, OTHER) == pytest.approx(score)
    assert similarity("cosine", ONE, 0 * ONE) == 0.0


def test_similarities_of_vectors_of_each_token() -> None:
    query, document = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[1.0, 1.0], [3.0, 0.0]])
    assert similarity("maxsim", query, document) == 3.0 + 2.0
    assert similarity("meanmaxsim", query, document) == 2.5


def test_pairs_of_texts_for_embeddings() -> None:
    made = texts(spec(prompts=PROMPTS, similarity="dot"))
    one = compare(made, ["1"], ["2", "3"], PoolingParams())
    assert one.prompts == ["7 1", "8 2", "8 3"], "a query is computed once"
    vectors = [np.array([1.0, 2.0], np.float32) * scale for scale in (1, 2, 3)]
    assert [one.score(part, [vectors[i] for i in part]) for part in one.parts] == [10.0, 15.0]
    both = compare(made, ["1", "2"], ["3", "4"], PoolingParams())
    assert both.parts == [(0, 2), (1, 3)] and both.origins[3] == (1, 1)
    late = compare(texts(spec(task="token_embed")), ["1"], ["2"], PoolingParams())
    assert late.similarity == "maxsim" and late.params[0].task == "token_embed"


@pytest.mark.parametrize(
    ("made", "ones", "others", "message"),
    [
        (spec(), ["1", "2"], ["3"], "data_1 has 2 texts and data_2 has 1"),
        (spec(), ["1"], [], "data_2 has 0"),
        (spec(task="classify", hidden_size=3), ["1"], ["2"], "3 classes, and a comparison needs"),
        (spec(task="token_classify"), ["1"], ["2"], "use classify"),
        (None, ["1"], ["2"], "directory is not on this machine"),
    ],
)
def test_texts_that_cannot_be_compared(
    made: PoolingSpec | None, ones: list[str], others: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        compare(texts(made), ones, others, PoolingParams())
