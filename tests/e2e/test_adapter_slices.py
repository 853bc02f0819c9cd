"""Ranks have parts of adapters, whose products add up to those of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.adapter_cases import EXPERTS, FAMILIES, HYBRIDS, KINDS, WITH_EXPERTS, AdapterCase, make
from e2e.paged import PagedRun
from e2e.tiny_models import VOCAB, TinyModels
from support.rank_threads import run_ranks

from engine.config.model import ModelConfig, read_model_info
from engine.layers.adapted_linear import StepAdapters
from engine.lora.adapter import AdapterError
from engine.lora.files import read_adapter
from engine.lora.parts import part_of
from engine.lora.placing import Places, place
from engine.lora.products import products_of
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model
from engine.parallel.collectives import Alone, Collectives

MOST = 64  # tokens of a step

EVERY = [
    *(AdapterCase(family, kind, KINDS[kind]) for kind in KINDS for family in FAMILIES),
    *(AdapterCase(family, "experts", EXPERTS) for family in WITH_EXPERTS),
    *(AdapterCase(family, "hybrid", options) for family, options in HYBRIDS.items()),
]
FEW = {("llama", "bias"), ("phi3", "plain"), ("llama", "whole modules"), ("qwen3-moe", "experts")}


def logits(base: Path, adapter: Path | None, ranks: Collectives, prompt: list[int]) -> torch.Tensor:
    """Logits of all tokens of a prompt with an adapter."""
    config, info = ModelConfig(model=str(base), dtype="float32"), read_model_info(base)
    model = load_model(
        config, info, device="cpu", max_model_len=MOST, takes_adapters=True, collectives=ranks
    )
    assert isinstance(model, NativeDecoder)
    layers, step = model.adapted, StepAdapters(MOST)
    layers.attach(1, step, MOST)
    if adapter is None:
        return PagedRun(model).prefill("a", prompt)
    placed = place(read_adapter(str(adapter), "one"), Places(model.mine.whole))
    made = products_of(part_of(placed, model.mine), layers, model.dtype)
    for target, products in made.linears.items():
        layers.linears[target].put(0, products)
        experts = layers.experts_of(target)
        if experts is not None:
            experts.users.add(0)
    assert layers.table is not None
    layers.table.put(0, made.embedding)
    layers.linears["head"].replace(0, made.head)
    step.fill(np.zeros(len(prompt), dtype=np.int64), None, 1)
    return PagedRun(model).prefill("a", prompt)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=[pytest.mark.slow] * ((case.family, case.kind) not in FEW),
        )
        for case in EVERY
        if "dora" not in case.kind and case.kind != "int8 base"
    ],
)
def test_ranks_have_parts_of_adapters(
    case: AdapterCase, tiny_models: TinyModels, tmp_path: Path, seed: int
) -> None:
    made = make(case, tiny_models, tmp_path)
    prompt = random.Random(seed).choices(range(VOCAB), k=19)
    alone = logits(made.base, made.adapter, Alone(), prompt)
    plain = logits(made.base, None, Alone(), prompt)
    assert (alone - plain).abs().max() > 1e-3 * plain.abs().max(), "the adapter changes nothing"
    for size in (2, 4):
        for one in run_ranks(size, lambda r: logits(made.base, made.adapter, r, prompt)):
            error = (one - alone).abs().max() / alone.abs().max()
            assert error < 1e-5, f"{size} ranks are off by {error:.2e} of the largest logit"


def test_dora_of_divided_rows_is_refused_with_the_way_out(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    made = make(AdapterCase("llama", "dora", KINDS["dora"]), tiny_models, tmp_path)
    with pytest.raises(AdapterError, match=r"DoRA.*2 ranks.*tensor_parallel_size=1"):
        run_ranks(2, lambda ranks: logits(made.base, made.adapter, ranks, [1, 2]))
