"""Drafts from suffixes, of the text and of earlier answers, end to end: every token as without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.test_ngram import ASKED, BOX, answers

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.core.replay import replay

SUFFIX: dict[str, Any] = {
    "speculative_config": {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "adaptive": False,
        "suffix_decoding_max_tree_depth": 8,
        "suffix_decoding_max_spec_factor": 2.0,
    }
}
TRIED = ["batched", "depth-2", "chunk-7", "preempted"]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """One without drafts and one with, with so many steps in flight."""
    options = {**BOX, "async_scheduling": request.param == 2}
    with (
        LLMEngine.from_engine_args(EngineArgs(**options)) as plain,
        LLMEngine.from_engine_args(EngineArgs(**options, **SUFFIX)) as drafting,
    ):
        yield plain, drafting


def test_requests_of_every_kind_hear_the_same_with_suffixes(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    plain, drafting = engines
    params = [make() for make in ASKED.values()]
    wanted, _ = answers(plain, params)
    found, num_first = answers(drafting, params)
    again, num_second = answers(drafting, params)
    for told in (found, again):
        assert [k.token_ids for k in told] == [k.token_ids for k in wanted]
        assert [k.text for k in told] == [k.text for k in wanted]
    assert num_second < num_first


def num_steps(engine: LLMEngine, salt: str | None) -> tuple[list[int], int]:
    """What is said to one seeded request, and the steps that it took."""
    params = SamplingParams(temperature=1.0, seed=77, max_tokens=60, ignore_eos=True)
    prompt: Any = {"prompt": "once upon a time", "cache_salt": salt}
    if salt is None:
        prompt = prompt["prompt"]
    engine.add_request("one", prompt, params)
    steps, tokens = 0, []
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens, steps


def test_what_was_answered_before_takes_fewer_steps_but_with_its_own_salt_only() -> None:
    with LLMEngine.from_engine_args(EngineArgs(**BOX, **SUFFIX)) as engine:
        told = {}
        for salt in (None, "a", "b"):
            tokens, first = num_steps(engine, salt)
            again, second = num_steps(engine, salt)
            assert tokens == again and len(tokens) == 60
            assert second <= 12 and second < first / 3
            told[salt] = tokens, first
        assert told[None] == told["a"] == told["b"], "as if none had been answered before"


@pytest.mark.parametrize("depth", [2])
def test_a_run_with_suffixes_replays_to_identical_plans(tmp_path: Path, depth: int) -> None:
    log = tmp_path / "steps.log"
    sizes = {**BOX, "num_kv_blocks": 16, "max_model_len": 128, "max_num_seqs": 4}
    args = EngineArgs(**sizes, **SUFFIX, step_log=log, async_scheduling=depth == 2)
    with LLMEngine.from_engine_args(args) as engine:
        for _ in range(2):
            answers(engine, [make() for make in ASKED.values()])
        assert engine.stats().counters["drafts.num_accepted_tokens"] > 0
    outcome = replay(log)
    assert outcome.difference is None, str(outcome)
    assert outcome.num_requests == 2 * len(ASKED) and outcome.num_steps > 30
