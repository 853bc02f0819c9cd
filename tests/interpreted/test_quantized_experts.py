"""Mixtures of quantised experts, kernels interpreted: the logits of what the experts stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e.paged import PagedRun
from e2e.quantized_models import Writer, awq, fp8, gptq, write_model
from e2e.test_forward import assert_same, load, reference_logits, tokens_of
from e2e.test_quantized import AWQ, BLOCKS, FP8, GPTQ
from e2e.tiny_models import CASES, Case

from engine.layers.sublayers import GroupedExperts
from kernels.bodies import CPU_TENSORS

SMALL = {"num_hidden_layers": 2, "intermediate_size": 64, "moe_intermediate_size": 64}


class Stored(NamedTuple):
    """How the experts of a tiny model are stored. All else is plain."""

    model: str
    write: Writer
    stated: dict[str, Any]


FORMS = {
    "awq": Stored("mixtral", awq(32), AWQ),
    "gptq, inputs in any order": Stored(
        "qwen3-moe", gptq(4, 32, desc_act=True), {**GPTQ, "desc_act": True}
    ),
    "8-bit floats in blocks": Stored("qwen3-moe", fp8("block"), BLOCKS),
    "8-bit floats, a scale an output": Stored("mixtral", fp8("channel"), FP8),
}


def write(root: Path, name: str):
    one = FORMS[name]
    case = CASES[one.model]
    small = Case(case.family, {**case.options, **SMALL})
    path = root / name.replace(" ", "-")
    return write_model(path, small, one.write, one.stated, keep=lambda m: ".experts." not in m)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_what_experts_stand_for(tmp_path: Path, name: str, seed: int) -> None:
    made, tokens = write(tmp_path, name), tokens_of(seed, 6)
    CPU_TENSORS.go_to_triton(True)
    try:
        model = load(made.path)
        model.group_experts()
        assert all(isinstance(block.mlp, GroupedExperts) for block in model.blocks)
        assert model.can_be_recorded
        got = PagedRun(model, seed=seed).prefill("a", tokens, 5)
    finally:
        CPU_TENSORS.go_to_triton(False)
    assert_same(got, reference_logits(made.reference, tokens), name)
