"""KV blocks outside the pool: the same tokens with and without, for each kind of layers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import model_and_reference
from e2e.references import (
    Reference,
    Tally,
    compare,
    compare_one,
    engine_for,
    generate,
    pool_for,
    run,
)
from e2e.test_drafts_everywhere import drafting
from e2e.tiny_models import TinyModels
from support.kv_stores import counters
from support.patience import WAIT_SECONDS

from engine import LLMEngine, SamplingParams
from engine.core.replay import replay
from policylab.sim.recorded import resimulate

NUM_NEW = 8
PROMPTS = [[(n * k) % 281 + 3 for k in range(90 + 3 * n)] for n in (7, 11, 13, 17, 19)]
PROMPTS.append(PROMPTS[0][:64] + PROMPTS[1][:40])
FAMILIES = [
    *("llama", "gemma3", "mistral-window", "lfm2", "gemma4-shared-kv", "qwen3.5"),
    *("gemma2", "qwen3-moe-mixed", "granite-hybrid-moe", "mamba2", "jamba-moe", "gpt-oss-sinks"),
]
TIGHT = {"num_kv_blocks": "tight", "max_num_seqs": 4, "max_num_batched_tokens": 48}
SITUATIONS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "two steps in flight": {"async_scheduling": True},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "draft model": {},
    "preempted": TIGHT,
    "preempted, two steps in flight": {**TIGHT, "async_scheduling": True},
    "8-bit cache": {"kv_cache_dtype": "int8"},
}
QUICK = {
    ("llama", "one by one"),
    ("llama", "preempted"),
    ("gemma3", "chunks"),
    ("gemma3", "preempted, two steps in flight"),
    ("mistral-window", "draft model"),
    ("lfm2", "two steps in flight"),
    ("lfm2", "preempted"),
    ("lfm2", "n-grams"),
}
CASES = [
    pytest.param(family, situation, marks=() if (family, situation) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for situation in SITUATIONS
    if (family, situation) != ("mamba2", "8-bit cache")  # it has no cache of 8 bits
]


@pytest.fixture(scope="module")
def models(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the path of a model, and what transformers generates for ``PROMPTS``."""
    known: dict[str, tuple[str, Reference]] = {}

    def get(family: str) -> tuple[str, Reference]:
        if family not in known:
            path, model = model_and_reference(family, tiny_models, tmp_path_factory.mktemp("m"))
            found = [generate(model, prompt, NUM_NEW) for prompt in PROMPTS]
            tokens, margins = [each for each, _ in found], [each for _, each in found]
            known[family] = str(path), Reference(PROMPTS, tokens, margins)
        return known[family]

    return get


@pytest.mark.parametrize(("family", "situation"), CASES)
def test_tokens_are_the_same_with_a_store(
    family: str, situation: str, models: Any, store_options: dict[str, Any], tally: Tally
) -> None:
    """Most of the second engine's prompts come from what the first one has stored."""
    path, reference = models(family)
    options = {**store_options, "block_size": 8, **SITUATIONS[situation]}
    if situation == "draft model":
        options |= drafting("draft_model", path)
    if options.get("num_kv_blocks") == "tight":
        with engine_for(path, **options | {"num_kv_blocks": 400}) as engine:
            options["num_kv_blocks"] = pool_for(engine, [len(PROMPTS[-2]) + NUM_NEW] * 2)
    tallied = tally if situation != "8-bit cache" else Tally()
    with engine_for(path, **options) as engine:
        first, _ = run(engine, PROMPTS, NUM_NEW)
    with engine_for(path, **options) as engine:
        tokens, cached = run(engine, PROMPTS, NUM_NEW)
        num_loaded = counters(engine).get("blocks_loaded", 0)
        has_states = engine.session.client.decided.snapshot_blocks > 0
    if situation == "8-bit cache":
        assert tokens == first
    else:
        compare(reference, first, tallied)
        compare(reference, tokens, tallied)
    if not (has_states and "preempted" in situation):  # a tight pool may have no room for states
        assert num_loaded > 0 and sum(cached) > 0.4 * sum(map(len, PROMPTS))


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_plans_with_loads_are_the_same_in_a_replay(
    family: str, depth: int, models: Any, store_options: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = models(family)
    options = {**store_options, "async_scheduling": depth == 2, "num_kv_blocks": 120}
    for nth in range(2):
        log = tmp_path / f"steps-{nth}"
        with engine_for(path, step_log=str(log), **options) as engine:
            run(engine, [*PROMPTS, *PROMPTS[::-1]], NUM_NEW)
            num_loads = counters(engine).get("loads", 0)
        outcome = replay(log)
        assert outcome.difference is None and outcome.num_steps > 10
        assert resimulate(log)[0].difference is None
    assert num_loads > 0


def test_what_the_last_steps_have_computed_is_stored_at_the_end(
    models: Any, store_options: dict[str, Any]
) -> None:
    path, _ = models("llama")
    for wanted in (0, 88):
        with engine_for(path, **store_options) as engine:
            _, cached = run(engine, [PROMPTS[0][:90]], 1)
        assert cached == [wanted]


def wait_until_stored(engine: LLMEngine, num_blocks: int) -> None:
    """Wait until this many blocks of each group of layers have been stored, if they are to be."""
    deadline = time.monotonic() + WAIT_SECONDS
    stats = engine.stats()
    assert stats is not None
    wanted = num_blocks * len(stats.kv_groups)
    while counters(engine)["blocks_stored"] >= wanted > counters(engine).get("memory.stored", 0):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_resumes_where_it_was(
    family: str, depth: int, models: Any, store_options: dict[str, Any], tally: Tally
) -> None:
    """Its last block was partly filled, and all its blocks are overwritten meanwhile."""
    path, reference = models(family)
    options = store_options | {"block_size": 16, "async_scheduling": depth == 2, "max_num_seqs": 1}
    options |= {"scheduling_policy": "priority", "policy_options": {"preempt_for_waiting": True}}
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    with engine_for(path, **options | {"num_kv_blocks": 400}) as engine:
        options["num_kv_blocks"] = pool_for(engine, [len(PROMPTS[4]) + NUM_NEW])
    with engine_for(path, **options) as engine:
        outputs: dict[str, list[int]] = {}
        engine.add_request("0", PROMPTS[0], params, priority=1)
        while engine.has_unfinished_requests():
            for out in engine.step():
                outputs[out.request_id] = list(out.outputs[0].token_ids)
            if len(outputs.get("0", ())) == 4 and "4" not in outputs:
                outputs["4"] = []
                engine.add_request("4", PROMPTS[4], params)
            elif outputs.get("4") == []:
                wait_until_stored(engine, -(-len(PROMPTS[0]) // 16))
        stats = engine.stats()
        num_loaded = counters(engine)["blocks_loaded"]
    for nth in (0, 4):
        compare_one(reference.tokens[nth], reference.margins[nth], outputs[str(nth)], tally)
    assert stats is not None and num_loaded > 5
    computed_again = stats.preempted_queries - depth - stats.preempted_hits
    assert (stats.num_preemptions, computed_again) == (1, 0)
