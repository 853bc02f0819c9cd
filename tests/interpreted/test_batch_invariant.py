"""With `batch_invariant` on a GPU, other requests change no bit of a request's tokens and
log-probabilities. The GPU's kernels are interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.references import engine_for, pool_for
from e2e.tiny_models import CASES, Case, config_of, random_model, save
from support import triton_interpreter
from support.fingerprint import answers

from engine.config.env import INTERPRET_CUDA
from engine.errors import ConfigError

# Norms of heads, and windows with capped scores.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 320,
}
# The last fills its blocks, so that its first new token takes another.
PROMPTS = {
    "one": [5],
    "some": list(range(7, 22)),
    "many": list(range(3, 34)),
    "full": list(range(9, 25)),
}
NUM_NEW = 3
ALONE = {"max_num_seqs": 1, "enforce_eager": True, "enable_prefix_caching": False}
BATCHES: dict[str, dict[str, Any]] = {
    "together, recorded": {"cudagraph_capture_sizes": [3, 40, 64], "enable_prefix_caching": False},
    "one by one in chunks of 7": {**ALONE, "max_num_batched_tokens": 7},
    "preempted": {"max_num_batched_tokens": 48},
    "with drafts": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_interpreter.IS_INTERPRETING:  # else on a GPU
        monkeypatch.setenv(INTERPRET_CUDA, "1")


def saved(name: str, root: Path, **options: Any) -> Path:
    case = CASES[name]
    save(random_model(config_of(Case(case.family, {**case.options, **SMALL, **options})), 3), root)
    return root


def found(path: Path, options: dict[str, Any], *, is_tight: bool = False) -> Any:
    """The answers to ``PROMPTS``. is_tight: in a pool that holds the prompts and no more."""
    made = {"device": "cuda", "batch_invariant": True, "dtype": "bfloat16", "max_model_len": 64}
    made |= {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    if drafting := options.get("speculative_config"):
        made |= {"enforce_eager": True}
        options = {"speculative_config": {**drafting, "model": str(path)}}
    made |= options
    if is_tight:
        with engine_for(str(path), **made, enforce_eager=True) as engine:
            made |= {"num_kv_blocks": pool_for(engine, [*map(len, PROMPTS.values())])}
    with engine_for(str(path), **made) as engine:
        if options.get("max_num_seqs") == 1:
            return {key: answers(engine, {key: ids}, NUM_NEW)[key] for key, ids in PROMPTS.items()}
        together = answers(engine, PROMPTS, NUM_NEW)
        assert (engine.stats().num_preemptions > 0) == is_tight
        return together


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_request_gives_the_same_bits_in_whatever_company(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    alone = found(path, ALONE)
    different = {
        how: found(path, options, is_tight=how == "preempted") != alone
        for how, options in BATCHES.items()
    }
    assert not any(different.values()), different


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3-moe", {}, r"without experts, and Qwen3MoeForCausalLM .* use device='cpu'"),
        ("qwen3", {"quantization": "int8"}, "needs weights that are not quantized.* by 'int8'"),
    ],
)
def test_what_is_cut_by_the_number_of_rows_is_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(saved(name, tmp_path), options)
