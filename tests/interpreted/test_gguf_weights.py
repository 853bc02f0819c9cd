"""Matrices of GGUF files on a GPU: some types stay packed, others are dequantised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from support.made_gguf import pack

from engine.layers.linear import make_linear
from engine.layers.quantized import GgufWeight
from engine.layers.quantized_linear import WeightOnlyLinear
from kernels.bodies import CPU_TENSORS

Kind = GGMLQuantizationType


@pytest.mark.parametrize(
    ("kind", "is_packed"),
    [(Kind.Q4_0, True), (Kind.Q8_0, True), (Kind.Q4_1, False), (Kind.Q6_K, False)],
    ids=str,
)
def test_products(kind: Kind, is_packed: bool, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = np.random.default_rng(seed).normal(size=(48, 256)).astype(np.float32)
    rows = torch.from_numpy(pack(values, kind))
    weight = GgufWeight(rows=rows, kind=kind.name, dtype=torch.float32)
    x = torch.randn(5, 256)
    wanted = x.double() @ weight.dequantize().double().T
    CPU_TENSORS.go_to_triton(device == "cpu")
    try:
        layer = make_linear(weight, device=device)
        found = layer(x.to(device)).cpu().double()
    finally:
        CPU_TENSORS.go_to_triton(False)
    assert isinstance(layer, WeightOnlyLinear) == is_packed
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
