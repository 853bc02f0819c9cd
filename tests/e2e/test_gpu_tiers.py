"""KV blocks outside the pool of a GPU: the same tokens with and without. Skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.references import Reference, Tally, compare, engine_for, generate, pool_for, run
from e2e.test_kv_tiers import NUM_NEW, PROMPTS, counters, models
from e2e.tiny_models import TinyModels
from support.kv_stores import slow_profile

pytestmark = pytest.mark.gpu
__all__ = ["models"]

FAMILIES = [
    *("llama", "gemma3", "mistral-window", "qwen3-moe-mixed"),
    *("lfm2", "bamba", "mamba", "jamba-moe", "qwen3.5"),
]
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "block_size": 16}
OPTIONS |= {"max_model_len": 256}
TIGHT = {"num_kv_blocks": "tight", "max_num_seqs": 4, "max_num_batched_tokens": 48}
SITUATIONS: dict[str, dict[str, Any]] = {
    "recorded, two steps in flight": {},
    "call by call": {"enforce_eager": True, "async_scheduling": False},
    "recorded chunks": {"max_num_batched_tokens": 24, "cudagraph_capture_sizes": [8, 24]},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "preempted": TIGHT,
}
FEW = ("llama", "gemma3", "lfm2", "qwen3.5")  # in every situation
OFTEN = ("recorded, two steps in flight", "n-grams", "preempted")
CASES = [
    (family, situation)
    for family in FAMILIES
    for situation in SITUATIONS
    if family in FEW or situation in OFTEN
]


@pytest.fixture
def tally() -> Tally:
    """A tie in a few tokens is no fault."""
    return Tally()


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Any]:
    """Options of stores, from which loading always seems faster than computing."""
    return {
        "kv_offloading_size": 0.05,
        "kv_offload_dir": str(tmp_path / "blocks"),
        "kv_offload_dir_gib": 0.1,
        "cost_profile": slow_profile(tmp_path / "slow.json"),
    }


def with_pool(path: str, options: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """The options with a pool for requests of these lengths, if a tight one is wanted."""
    if options.get("num_kv_blocks") != "tight":
        return options
    roomy = {**options, "num_kv_blocks": 400, "enforce_eager": True}
    with engine_for(path, **roomy) as engine:
        return {**options, "num_kv_blocks": pool_for(engine, lengths)}


@pytest.mark.parametrize(("family", "situation"), CASES)
def test_a_second_engine_loads_what_the_first_has_stored(
    family: str, situation: str, models: Any, stores: dict[str, Any], tally: Tally
) -> None:
    path, reference = models(family)
    lengths = [len(PROMPTS[-2]) + NUM_NEW] * 2
    options = with_pool(path, {**OPTIONS, **SITUATIONS[situation], **stores}, lengths)
    with engine_for(path, **options) as engine:
        first, _ = run(engine, PROMPTS, NUM_NEW)
    compare(reference, first, tally)
    with engine_for(path, **options) as engine:
        tokens, cached = run(engine, PROMPTS, NUM_NEW)
        num_loaded = counters(engine).get("blocks_loaded", 0)
        has_states = engine.session.client.decided.snapshot_blocks > 0
    compare(reference, tokens, tally)
    if not (has_states and situation == "preempted"):  # a tight pool may have no room for states
        assert num_loaded > 0 and sum(cached) > 0.4 * sum(map(len, PROMPTS))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_of_preempted_requests_come_back_from_the_host(
    family: str, tiny_models: TinyModels, stores: dict[str, Any], tally: Tally
) -> None:
    """The pool has room for two of four requests when they end."""
    path, model = str(tiny_models.path(family)), tiny_models.reference(family)
    made, num_new = [ids[:60] for ids in PROMPTS[:4]], 50
    found = [generate(model, ids, num_new) for ids in made]
    reference = Reference(made, [one for one, _ in found], [each for _, each in found])
    options = {**OPTIONS, **stores, "kv_offload_dir": None, "max_num_seqs": 4}
    options = with_pool(path, {**options, "num_kv_blocks": "tight"}, [60 + num_new] * 2)
    with engine_for(path, **options) as engine:
        for _ in range(2):
            tokens, _ = run(engine, made, num_new)
            compare(reference, tokens, tally)
        stats = engine.stats()
        assert stats is not None and stats.num_preemptions > 0
        assert counters(engine)["blocks_loaded"] > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_bits_are_those_that_were_stored(
    kv_cache_dtype: str, models: Any, stores: dict[str, Any]
) -> None:
    """In bfloat16, and in 8 bits; with batch_invariant, what is loaded changes no token."""
    path, _ = models("llama")
    options = {**OPTIONS, **stores, "dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    options |= {"batch_invariant": True}
    found = []
    for _ in range(2):
        with engine_for(path, **options) as engine:
            found.append(run(engine, PROMPTS, NUM_NEW)[0])
            num_loaded = counters(engine).get("blocks_loaded", 0)
    assert found[0] == found[1] and num_loaded > 0
