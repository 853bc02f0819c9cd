"""A draft model, end to end: every token as without it, and what goes wrong said at the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.test_ngram import ASKED, BOX, NUM_NEW, answers, check_that_it_hears_the_same
from e2e.test_structured import answers as structured_answers
from e2e.test_structured import make as structured
from e2e.test_structured import params as structured_params
from e2e.tiny_models import TinyModels

from engine import LLM, EngineArgs, LLMEngine, SamplingParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.errors import ConfigError

SELF: dict[str, Any] = {
    "method": "draft_model",
    "model": str(BOX_MODEL),
    "num_speculative_tokens": 4,
    "adaptive": False,
}
ROUGH = {**SELF, "quantization": "int8"}  # right most of the time


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """One without drafts and one with, with so many steps in flight."""
    options = {**BOX, "async_scheduling": request.param == 2}
    with (
        LLMEngine.from_engine_args(EngineArgs(**options)) as plain,
        LLMEngine.from_engine_args(EngineArgs(**options, speculative_config=ROUGH)) as drafting,
    ):
        yield plain, drafting


@pytest.mark.parametrize("name", ASKED)
def test_a_request_hears_the_same_with_drafts(
    engines: tuple[LLMEngine, LLMEngine], name: str
) -> None:
    check_that_it_hears_the_same(*engines, name)
    assert engines[1].stats().counters["drafts.num_drafts"] > 0


def test_together_most_drafts_of_the_same_model_in_int8_are_right(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    plain, drafting = engines
    params = [make() for make in ASKED.values()]
    wanted, _ = answers(plain, params)
    before = drafting.stats().counters
    found, _ = answers(drafting, params)
    assert [(k.token_ids, k.text) for k in found] == [(k.token_ids, k.text) for k in wanted]
    after = drafting.stats().counters
    num, right = (
        after[f"drafts.{name}"] - before[f"drafts.{name}"]
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert 0.5 * num < right < num


def test_the_model_itself_is_always_right_and_takes_a_step_for_five_tokens() -> None:
    params = [SamplingParams(temperature=t, seed=3, max_tokens=50, ignore_eos=True) for t in (0, 1)]
    with LLMEngine.from_engine_args(EngineArgs(**BOX, speculative_config=SELF)) as engine:
        _, steps = answers(engine, params)
        counters = engine.stats().counters
    assert counters["drafts.num_accepted_tokens"] == counters["drafts.num_draft_tokens"] > 70
    assert steps <= 12


def test_what_was_drafted_is_counted_by_request() -> None:
    params = SamplingParams(temperature=0.6, seed=5, max_tokens=20, n=2, ignore_eos=True)
    with LLM(**BOX, speculative_config=ROUGH) as llm:
        outputs = llm.generate(["one two", "three four five"], params, use_tqdm=False)
        counters = llm.llm_engine.stats().counters
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        told = [out.metrics.counters[f"drafts.{name}"] for out in outputs if out.metrics]
        assert sum(told) == counters[f"drafts.{name}"] > 0 and len(told) == 2
    places = [counters.get(f"drafts.num_accepted_tokens_per_pos.{place}", 0) for place in range(5)]
    assert sum(places) == counters["drafts.num_accepted_tokens"] and places[4] == 0
    assert places == sorted(places, reverse=True)


def test_scores_end_with_the_text() -> None:
    """Drafts that stand behind a stop token belong to no text."""
    with LLM(**BOX, speculative_config=SELF) as llm:
        plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        said = list(llm.generate("one two three", plain, use_tqdm=False)[0].outputs[0].token_ids)
        for place, token in enumerate(said):
            own = SamplingParams(temperature=0, max_tokens=12, logprobs=1, stop_token_ids=[token])
            out = llm.generate("one two three", own, use_tqdm=False)[0].outputs[0]
            assert out.logprobs is not None
            assert len(out.logprobs) == len(out.token_ids) == said.index(token) + 1 <= place + 1


@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_grammars(adaptive: bool) -> None:
    """Drafts that the grammar forbids are cut, text that it forces goes before them."""
    names = ("person, dense", "when", "choice", "grammar")
    asked = [structured_params(name, seed, max_tokens=60) for seed, name in enumerate(names)]
    told = []
    for options in ({}, {"speculative_config": {**SELF, "adaptive": adaptive}}):
        with structured(dtype="float32", **options) as engine:
            told.append([list(out.token_ids) for out in structured_answers(engine, asked)])
            counters = engine.stats().counters
    assert told[0] == told[1]
    assert adaptive or counters["drafts.num_accepted_tokens"] > 0


def test_in_bfloat16_the_same_bits_in_any_company() -> None:
    """Where results do not depend on the batch, drafts change no greedy token either."""
    params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True) for _ in range(3)]
    told = []
    for options in ({}, {"speculative_config": ROUGH}):
        args = EngineArgs(**{**BOX, "dtype": "bfloat16", "batch_invariant": True}, **options)
        with LLMEngine.from_engine_args(args) as engine:
            found, _ = answers(engine, params)
            told.append([k.token_ids for k in found])
    assert told[0] == told[1]


@pytest.mark.parametrize("is_apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_answers(is_apart: bool) -> None:
    """Also with the core in a process of its own."""
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=NUM_NEW, n=2, ignore_eos=True)
    told = []
    for options in ({}, {"speculative_config": ROUGH, "multiprocess": is_apart}):
        with LLM(**BOX, **options) as llm:
            outputs = llm.generate(["a b c a b c a b", "x = x + x = x"], params, use_tqdm=False)
            told.append([[list(one.token_ids) for one in out.outputs] for out in outputs])
    assert told[0] == told[1]


@pytest.mark.parametrize("depth", [2])
def test_a_run_with_a_draft_model_replays_to_identical_plans(tmp_path: Path, depth: int) -> None:
    log = tmp_path / "steps.log"
    options = {**BOX, "num_kv_blocks": 16, "max_model_len": 128, "max_num_seqs": 4}
    options["speculative_config"] = {**ROUGH, "adaptive": True}
    args = EngineArgs(**options, step_log=log, async_scheduling=depth == 2)
    with LLMEngine.from_engine_args(args) as engine:
        answers(engine, [make() for make in ASKED.values()])
    outcome = replay(log)
    assert outcome.difference is None, str(outcome)
    assert outcome.num_requests == len(ASKED)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "lacks 'model'.*write one like"),
    "no directory": ({"model": "/no/such"}, "speculative_config: .*'/no/such' does not exist"),
    "other method": (
        {"method": "ngram"},
        "model is .* for method 'draft_model' and not 'ngram'",
    ),
    "no number": ({"num_speculative_tokens": None}, "lacks 'num_speculative_tokens'"),
    "unknown quantization": ({"quantization": "int3"}, "quantization.*int3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        LLM(**BOX, speculative_config={**SELF, **options})


def test_a_draft_model_with_other_tokens_is_refused(tiny_models: TinyModels) -> None:
    config = {**SELF, "model": str(tiny_models.path("llama"))}
    with pytest.raises(ConfigError, match=r"has 300 tokens and the model has \d+, but"):
        LLM(**BOX, speculative_config=config)
