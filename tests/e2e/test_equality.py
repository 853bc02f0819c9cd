"""Greedy tokens equal transformers' generate, whatever the engine does meanwhile.

One random tiny model of every family, native and general. A request may differ only at a tie
(margin of the two best logits under 1e-4 of the largest); ties are counted and printed, and may
make up at most 0.1 % of all tokens compared.

Every family meets one of the modes, and every mode an eighth of the families; the rest of the
product is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from e2e.general_models import model_and_reference
from e2e.references import Reference, compare, engine_for, generate, prompts, run
from e2e.tiny_models import TinyModels

from engine.config.kv_groups import request_blocks

T = TypeVar("T")
LONG_ONLY = {"phi3-longrope", "olmo3-yarn"}  # transformers changes tables on the way from 1 token
NATIVE = [
    "llama-llama3",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "olmo2",
    "granite",
    "smollm3",
    "mixtral",
    "qwen3-moe-mixed",
    "llama-bf16",
]
WITH_STATES = [
    "lfm2",
    "lfm2-moe",
    "granite-hybrid-moe",
    "bamba",
    "falcon-h1",
    "nemotron-h-moe",
    "jamba-moe",
    "mamba2",
    "falcon-mamba",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "zamba2",
    "kimi-linear",
    "olmo-hybrid",
]
GENERAL = [
    "gpt2",
    "gpt-neox",
    "phi",
    "starcoder2-window",
    "cohere2-mixed",
    "gemma",
    "olmo3-yarn",
    "gpt-oss-sinks",
    "glm4",
    "deepseek-v3",
]
MODES = {
    # In eights: a family meets one of eight.
    "single": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "batched": {"enable_prefix_caching": False},
    "depth-2": {"async_scheduling": True},
    "chunk-1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunk-7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunk-16": {"max_num_batched_tokens": 16, "max_num_seqs": 6, "async_scheduling": True},
    "preempted": {"block_size": 4},
    "preempted-depth-2": {"block_size": 4, "async_scheduling": True},
}


def spread(values: Sequence[T], usual: int, more: Sequence[str] = ()) -> list[Any]:
    """Each family, and ``more``, with each value. Of ``usual`` values in turn, a pair with one is
    tested always, with the others only in slow tests."""
    return [
        pytest.param(name, value, marks=[pytest.mark.slow] * ((row + place) % usual > 0))
        for row, name in enumerate([*NATIVE, *GENERAL, *more])
        for place, value in enumerate(values)
    ]


@pytest.fixture(scope="module")
def case(request, tiny_models: TinyModels, tmp_path_factory) -> tuple[str, Reference]:
    name = request.param
    path, model = model_and_reference(name, tiny_models, tmp_path_factory.mktemp("general"))
    made = prompts(shortest=12 if name in LONG_ONLY else 1)
    answers = [generate(model, ids) for ids in made]
    reference = Reference(made, [a[0] for a in answers], [a[1] for a in answers])
    return str(path), reference


@pytest.mark.parametrize(
    ("case", "mode"), spread(list(MODES), 8, WITH_STATES), indirect=["case"], scope="module"
)
def test_same_tokens_as_transformers(case, mode, tally):
    path, reference = case
    options = dict(MODES[mode])
    groups = ()
    if mode.startswith("preempted"):  # room for the longest request and a fifth more
        with engine_for(path, dtype="float32", **options) as engine:
            groups = engine.session.client.decided.kv_groups
        longest = max(map(len, reference.prompts)) + len(reference.tokens[0])
        options["num_kv_blocks"] = int(1.2 * request_blocks(groups, 4, longest)) + 1
    with engine_for(path, dtype="float32", **options) as engine:
        tokens, _ = run(engine, reference.prompts)
        compare(reference, tokens, tally)
        # A window gives blocks back: test_windows has what it takes to preempt such requests.
        if mode.startswith("preempted") and not any(group.window for group in groups):
            assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize(("case", "depth"), spread([1, 2], 4), indirect=["case"], scope="module")
def test_same_tokens_from_a_cold_a_warm_and_an_evicted_cache(case, depth, tally):
    path, reference = case
    made = reference.prompts
    options = {"num_kv_blocks": 36, "async_scheduling": depth == 2}
    with engine_for(path, dtype="float32", **options) as engine:
        tokens, cached = run(engine, made)
        compare(reference, tokens, tally)
        for ids, right in zip(made, tokens, strict=True):  # warm: each right behind itself
            run(engine, [ids])
            again, cached = run(engine, [ids])
            assert again == [right]
            assert cached[0] == (len(ids) - 1) // 8 * 8
        strangers = [[(i * 37 + j) % 290 + 5 for j in range(60)] for i in range(8)]
        run(engine, strangers)  # evicts
        tokens, cached = run(engine, made[3:4])
        assert cached == [0]
        compare(Reference(made[3:4], reference.tokens[3:4], reference.margins[3:4]), tokens, tally)
