"""A cache of 8-bit floats on a GPU, kernels interpreted: what transformers computes in float32 if
its own cache rounds as ours does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from e2e.references import engine_for, run
from e2e.tiny_models import CASES, Case, config_of, random_model, save
from safetensors.torch import load_file, save_file
from support import triton_interpreter

from engine.config.env import INTERPRET_CUDA
from engine.errors import ConfigError
from kernels.bodies import CPU_TENSORS
from kernels.triton import attention

FP8, LARGEST = torch.float8_e4m3fn, 448.0
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 320,
}
SCALES = {"k": (0.053, 0.071), "v": (0.021, 0.037)}  # by layer
PROMPTS = [[5], list(range(7, 22)), list(range(3, 34)), list(range(3, 30))]
NUM_NEW = 4
GPU = {"device": "cuda", "dtype": "float16", "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if triton_interpreter.IS_INTERPRETING:  # else on a GPU
        monkeypatch.setenv(INTERPRET_CUDA, "1")
        CPU_TENSORS.go_to_triton(True)
    yield
    CPU_TENSORS.go_to_triton(False)


class Made(NamedTuple):
    path: Path
    reference: torch.nn.Module  # in float32, of the numbers that float16 holds
    scales: dict[str, tuple[float, ...]]  # of keys and of values, by layer


def made(path: Path, scaled: bool) -> Made:
    case = CASES["qwen3"]
    model = random_model(config_of(Case(case.family, {**case.options, **SMALL})), seed=3)
    model = model.half().float().eval()
    save(model, path)
    if scaled:
        file = path / "model.safetensors"
        stored = load_file(file)
        for kind, name in (("k", "k_scale"), ("v", "v_proj.v_scale")):
            for layer, scale in enumerate(SCALES[kind]):
                stored[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
        save_file(stored, file)
    return Made(path, model, SCALES if scaled else {"k": (1.0, 1.0), "v": (1.0, 1.0)})


class RoundingCache(transformers.DynamicCache):
    """Keys and values as a cache of 8-bit floats gives them back."""

    def __init__(self, scales: dict[str, tuple[float, ...]]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, keys, values, layer_idx, *others, **options):
        kept = []
        for kind, x in (("k", keys), ("v", values)):
            scale = self._scales[kind][layer_idx]
            kept.append((x / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale)
        return super().update(*kept, layer_idx, *others, **options)


def logits_of(one: Made, ids: list[int]) -> torch.Tensor:
    cache = RoundingCache(one.scales)
    with torch.inference_mode():
        return one.reference(torch.tensor([ids]), past_key_values=cache).logits[0].float()


MODES: dict[str, dict[str, Any]] = {
    "chunks, call by call": {"enforce_eager": True, "max_num_batched_tokens": 11},
    "recorded": {"cudagraph_capture_sizes": [3, 40, 64]},
    "preempted": {"num_kv_blocks": 10, "max_num_batched_tokens": 64},
    "drafts": {
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": 2},
        "enforce_eager": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_rounded_keys_and_values(mode: str, tmp_path: Path) -> None:
    """Prompts that begin alike share blocks; a draft model has such a cache of its own."""
    one, options = made(tmp_path, scaled=True), dict(MODES[mode])
    if mode == "drafts":
        options["speculative_config"] |= {"model": str(one.path)}
    with engine_for(str(one.path), **{**GPU, **options}, kv_cache_dtype="fp8") as engine:
        said, _ = run(engine, PROMPTS, NUM_NEW)
        again, cached = run(engine, PROMPTS[2:], NUM_NEW)
        stats = engine.stats()
    assert again == said[2:] and (min(cached) >= 16 or mode == "preempted")
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    if mode == "drafts":
        assert stats.counters["drafts.num_accepted_tokens"] > 0
    for ids, tokens in zip(PROMPTS, said, strict=True):
        choices = logits_of(one, ids + tokens)[len(ids) - 1 : -1]
        best, chosen = choices.max(-1).values, choices[range(NUM_NEW), tokens]
        assert ((best - chosen) <= 0.02 * choices.abs().amax(-1)).all(), "no token that is best"


def test_the_same_bytes_hold_twice_the_blocks(tmp_path: Path) -> None:
    one, numbers = made(tmp_path, scaled=False), []
    for kept in ("auto", "fp8"):
        sizes = {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 14, "enforce_eager": True}
        with engine_for(str(one.path), **{**GPU, **sizes}, kv_cache_dtype=kept) as engine:
            numbers.append(engine.session.client.decided.num_kv_blocks)
    assert numbers[1] == 2 * numbers[0]


def test_what_no_kernel_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read: there are none."""
    one = made(tmp_path, scaled=False)
    (one.path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="computed in bfloat16 or float16, got float32"):
        engine_for(str(one.path), **{**GPU, "dtype": "float32"}, kv_cache_dtype="fp8")
    monkeypatch.setattr(attention, "arch_of", lambda x: "sm_80")
    with pytest.raises(ConfigError, match=r'9\.0 or 10\.0\..*kv_cache_dtype="auto"'):
        engine_for(str(one.path), **GPU, kv_cache_dtype="fp8")
