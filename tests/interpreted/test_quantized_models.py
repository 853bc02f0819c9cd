"""Quantised directories and options as a GPU computes them, kernels interpreted, whole models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e.paged import PagedRun
from e2e.test_forward import assert_same, load, reference_logits, tokens_of
from e2e.test_quantized import cosine, written
from e2e.tiny_models import CASES, config_of, random_model, save

from engine.layers.linear import PlainLinear
from engine.layers.quantized_linear import Fp8Linear, WeightOnlyLinear
from kernels.bodies import CPU_TENSORS

WEIGHT_ONLY = (
    "awq-tied-kept",
    "gptq-desc-act",
    "gptq-head",
    "fp8-blocks",
)


@pytest.fixture(autouse=True)
def _as_a_gpu() -> Iterator[None]:
    CPU_TENSORS.go_to_triton(True)
    yield
    CPU_TENSORS.go_to_triton(False)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_stay_packed_and_logits_are_theirs(tmp_path: Path, name: str, seed: int) -> None:
    made, tokens = written(tmp_path, name), tokens_of(seed, 6)
    model = load(made.path)
    assert isinstance(model.blocks[1].mlp.down, WeightOnlyLinear)
    got = PagedRun(model, seed=seed).prefill("a", tokens, 5)
    assert_same(got, reference_logits(made.reference, tokens), name)


@pytest.mark.parametrize("name", ["fp8", "ct-fp8-channel"])
def test_8_bit_floats_multiply_8_bit_inputs(tmp_path: Path, name: str, seed: int) -> None:
    made, tokens = written(tmp_path, name), tokens_of(seed, 6)
    model = load(made.path)
    assert isinstance(model.blocks[0].mixer.qkv, Fp8Linear)
    got = PagedRun(model, seed=seed).prefill("a", tokens)
    assert cosine(got, reference_logits(made.reference, tokens)) > 0.99


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_plain_weights_are_quantised_when_loaded(
    tmp_path: Path, quantization: str, seed: int
) -> None:
    """Tied: the table is read in both directions."""
    model, tokens = random_model(config_of(CASES["qwen2-window"]), seed), tokens_of(seed, 6)
    save(model, tmp_path)
    expected = reference_logits(model.eval(), tokens)
    ours = load(tmp_path, quantization=quantization)
    assert not isinstance(ours.blocks[0].mixer.out, PlainLinear)
    assert isinstance(ours.output.linear, PlainLinear) is (quantization == "fp8")
    got = PagedRun(ours, seed=seed).prefill("a", tokens)
    assert cosine(got, expected) > (0.99 if quantization == "int8" else 0.96)
    ids = torch.tensor([0, 299, 7])
    table = model.get_input_embeddings().weight[ids]
    assert cosine(ours.embedding(ids), table) > 0.9999
