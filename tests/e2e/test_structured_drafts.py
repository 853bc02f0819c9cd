"""Text that a grammar forces is drafted: answers stay what they are, and take fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e.test_structured import ASKED, answers, make, params

from engine import LLMEngine, SamplingParams, StructuredOutputsParams

SPEC = {"method": "grammar", "num_speculative_tokens": 6, "adaptive": False}
GRAMMAR: dict[str, Any] = {"speculative_config": SPEC}
FORM = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_available": {"type": "boolean"},
        "category_of_product": {"enum": ["furniture", "groceries"]},
    },
    "required": ["identifier", "is_available", "category_of_product"],
    "additionalProperties": False,
}
MODES: dict[str, dict[str, Any]] = {
    "one step in flight": {"async_scheduling": False},
    "two steps in flight": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 17},
    "preempted": {"num_kv_blocks": 14, "block_size": 16, "max_model_len": 208},
    "by n-grams too": {"speculative_config": {**SPEC, "method": "ngram"}},
    "as many as pay": {"speculative_config": {**SPEC, "adaptive": True}},
}


def form(seed: int | None, **options: Any) -> SamplingParams:
    asked = StructuredOutputsParams(json=FORM, disable_any_whitespace=True)
    temperature = 0.0 if seed is None else 1.0
    options = {"max_tokens": 90, "temperature": temperature, "seed": seed, **options}
    return SamplingParams(structured_outputs=asked, **options)


def everything() -> list[SamplingParams]:
    asked = [params(name, seed, max_tokens=90) for seed, name in enumerate(ASKED)]
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    return [*asked, form(None), form(3, n=2), form(4, logprobs=1), free]


@pytest.fixture(scope="module")
def wanted() -> Iterator[list[Any]]:
    with make(dtype="float32") as engine:
        yield told(engine, everything())


def told(engine: LLMEngine, asked: list[SamplingParams]) -> list[Any]:
    outs = answers(engine, asked)
    return [(out.text, list(out.token_ids), out.finish_reason) for out in outs]


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_without_drafts(mode: str, wanted: list[Any]) -> None:
    with make(dtype="float32", **{**GRAMMAR, **MODES[mode]}) as engine:
        for _ in range(2):
            assert told(engine, everything()) == wanted
        if mode != "as many as pay":
            assert engine.stats().counters["drafts.num_accepted_tokens"] > 0


def test_a_form_takes_fewer_steps_than_tokens() -> None:
    with make(dtype="float32", async_scheduling=False, **GRAMMAR) as engine:
        shares = []
        for seed in range(12):
            steps = 0
            engine.add_request("one", "A thing:", form(seed))
            while engine.has_unfinished_requests():
                steps += 1
                last = engine.step()
            shares.append(steps / len(last[0].outputs[0].token_ids))
    assert min(shares) < 0.75, shares


def test_a_recorded_run_has_no_drafts_that_a_replay_could_not_make(tmp_path: Any) -> None:
    from engine.core.replay import replay

    log = tmp_path / "steps.log"
    with make(dtype="float32", step_log=log, **GRAMMAR) as engine:
        told(engine, [form(seed) for seed in range(4)])
    assert (found := replay(log)).difference is None, str(found)
