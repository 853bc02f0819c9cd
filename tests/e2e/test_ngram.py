"""Drafts from a request's own text, end to end: fewer steps, and every token as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e.box_engine import EXACT

from engine import LLM, EngineArgs, LLMEngine, SamplingParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay

SIZES = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SIZES["adaptive"] = False  # what a step takes here is no matter of time
NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", **SIZES}}
FAMILIES = ["llama-llama3", "gemma3", "mixtral", "llama-bf16"]
TRIED = ["batched", "depth-2", "chunk-7", "preempted", "preempted-depth-2"]
NUM_NEW = 30


class Kept(NamedTuple):
    """What a user is told of one answer."""

    text: str
    token_ids: list[int]
    logprobs: object
    finish_reason: str | None
    stop_reason: object


def answers(llm_engine: LLMEngine, params: list[SamplingParams]) -> tuple[list[Kept], int]:
    """What the model in the box says, and the number of steps that it took."""
    texts = [
        "def f(x):\n    return f(x)\n\ndef f(x):\n",
        "one two three one two three one",
        "a a a",
    ]
    for index, own in enumerate(params):
        llm_engine.add_request(str(index), texts[index % len(texts)], own)
    last, steps = {}, 0
    while llm_engine.has_unfinished_requests():
        steps += 1
        for out in llm_engine.step():
            last[int(out.request_id)] = out.outputs[0]
    outs = [last[index] for index in range(len(params))]
    return [
        Kept(o.text, list(o.token_ids), o.logprobs, o.finish_reason, o.stop_reason) for o in outs
    ], steps


ASKED: dict[str, Callable[[], SamplingParams]] = {
    "greedy": lambda: SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True),
    "cold": lambda: SamplingParams(temperature=0.3, seed=3, max_tokens=NUM_NEW, ignore_eos=True),
    "warm": lambda: SamplingParams(temperature=1.0, seed=4, max_tokens=NUM_NEW, ignore_eos=True),
    "hot": lambda: SamplingParams(temperature=2.0, seed=5, max_tokens=NUM_NEW, ignore_eos=True),
    "cut": lambda: SamplingParams(
        temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=6, max_tokens=NUM_NEW
    ),
    "penalised": lambda: SamplingParams(
        temperature=0.5,
        seed=7,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        max_tokens=NUM_NEW,
        ignore_eos=True,
    ),
    "scored": lambda: SamplingParams(temperature=0.4, seed=8, logprobs=2, max_tokens=NUM_NEW),
    "stopped": lambda: SamplingParams(
        temperature=0.2, seed=9, stop=["(", " the"], min_tokens=3, max_tokens=NUM_NEW
    ),
    "biased": lambda: SamplingParams(
        temperature=0.6,
        seed=10,
        logit_bias={5: 2.0, 17: -4.0},
        bad_words=["return"],
        max_tokens=NUM_NEW,
    ),
}
BOX: dict[str, Any] = {
    "model": str(BOX_MODEL),
    "num_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "num_kv_blocks": 200,
    "log_level": "error",
    **EXACT,
}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """One without drafts and one with, with so many steps in flight."""
    options = {**BOX, "async_scheduling": request.param == 2}
    with (
        LLMEngine.from_engine_args(EngineArgs(**options)) as plain,
        LLMEngine.from_engine_args(EngineArgs(**options, **NGRAM)) as drafting,
    ):
        yield plain, drafting


@pytest.mark.parametrize("name", ASKED)
def test_a_request_hears_the_same_with_drafts(
    engines: tuple[LLMEngine, LLMEngine], name: str
) -> None:
    """Alone, the same step computes its logits in the same way: text, scores, and why it ended."""
    check_that_it_hears_the_same(*engines, name)


def check_that_it_hears_the_same(plain: LLMEngine, drafting: LLMEngine, name: str) -> None:
    """A request of this kind, three times with seeds of their own."""
    for index in range(3):
        own = ASKED[name]()
        own.seed = None if own.seed is None else own.seed + 100 * index
        found, num_drafting = answers(drafting, [own])
        wanted, num_plain = answers(plain, [own])
        assert [k._replace(logprobs=None) for k in found] == [
            k._replace(logprobs=None) for k in wanted
        ]
        assert_close(found[0].logprobs, wanted[0].logprobs)
        assert num_drafting <= num_plain


def test_requests_of_every_kind_together_hear_what_they_hear_alone(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    plain, drafting = engines
    params = [make() for make in ASKED.values()]
    found, _ = answers(drafting, params)
    wanted, _ = answers(plain, params)
    assert [k.token_ids for k in found] == [k.token_ids for k in wanted]
    assert [k.text for k in found] == [k.text for k in wanted]


def test_a_text_that_repeats_itself_takes_a_step_for_five_tokens(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    plain, drafting = engines
    params = [
        SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, allowed_token_ids=[77])
    ]
    wanted, num_plain = answers(plain, params)
    found, num_drafting = answers(drafting, params)
    assert found[0].token_ids == wanted[0].token_ids == [77] * 100
    assert num_plain >= 100 and num_drafting <= 24


def assert_close(found: Any, wanted: Any) -> None:
    """The same tokens of every place, with scores as float32 has them in another batch."""
    assert (found is None) == (wanted is None)
    for one, other in zip(found or [], wanted or [], strict=True):
        assert list(one) == list(other)
        for token, scored in one.items():
            assert scored.rank == other[token].rank
            assert scored.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def only_low(params: SamplingParams, prompt: list[int]) -> Callable[..., Any]:
    """Allows no token from 300 on, and cannot go on from one."""

    def process(said: list[int], logits: Any) -> Any:
        if any(token >= 300 for token in said):
            raise ValueError(f"{said} cannot be")
        logits[300:] = -float("inf")
        return logits

    return process


def test_a_processor_that_never_allowed_a_draft_fails_nobody() -> None:
    """Drafts of the prompt are wrong here, and rows behind them are of texts that are not."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True)
    prompt = {"prompt_token_ids": [10, 400, 11, 12, 10, 400, 500, 11, 12, 10] * 3}
    told = []
    for options in ({}, NGRAM):
        with LLM(**BOX, logits_processors=[only_low], **options) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            told.append((output.outputs[0].finish_reason, list(output.outputs[0].token_ids)))
            counters = llm.llm_engine.stats().counters
    assert told[0] == told[1] and told[0][0] == "length"
    assert counters["drafts.num_draft_tokens"] > counters["drafts.num_accepted_tokens"] > 0


@pytest.mark.parametrize(("depth", "adaptive"), [(1, False), (2, True)])
def test_a_run_with_drafts_replays_to_identical_plans(
    tmp_path: Path, depth: int, adaptive: bool
) -> None:
    """How many are worth it is a matter of time, which the log tells."""
    log = tmp_path / "steps.log"
    options = {**BOX, "num_kv_blocks": 16, "max_model_len": 128, "max_num_seqs": 4}
    options["speculative_config"] = {**NGRAM["speculative_config"], "adaptive": adaptive}
    args = EngineArgs(**options, step_log=log, async_scheduling=depth == 2)
    with LLMEngine.from_engine_args(args) as engine:
        answers(engine, [make() for make in ASKED.values()])
    outcome = replay(log)
    assert outcome.difference is None, str(outcome)
    assert outcome.num_requests == len(ASKED) and outcome.num_steps > 30
