"""Quantised rows of GGUF files are packed exactly, for each type of tensors.

Dequantised, they have the same bits as the gguf package gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantized

from engine.layers.linear import make_linear
from engine.layers.quantized import GgufWeight, stack
from kernels.cpu.matmul.gguf import TYPES

Kind = GGMLQuantizationType
SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.MXFP4: ()}
PAIRED = (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)
KINDS = [Kind[name] for name in TYPES]
SHAPES = ((1, 256), (70, 512), (3, 600 * 256))


def random_rows(kind: Kind, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Random bytes of rows whose scales are finite float16 numbers of both signs."""
    generator = np.random.default_rng(seed)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), dtype=np.uint8)
    for place in SCALES.get(kind, (0, 2) if kind in PAIRED else (0,)):
        exponents = generator.uniform(-18, 9, (len(blocks), 1))
        signs = generator.choice([-1, 0, 1], (len(blocks), 1), p=[0.45, 0.1, 0.45])
        blocks[:, place : place + 2] = (signs * 2**exponents).astype("<f2").view(np.uint8)
    if kind is Kind.MXFP4:
        blocks[:, 0] %= 250  # larger powers of two overflow
    return torch.from_numpy(blocks.reshape(shape[0], -1))


def wanted_of(rows: torch.Tensor, kind: Kind) -> torch.Tensor:
    values = dequantized(rows.numpy(), kind)
    return torch.from_numpy(values.astype(np.float32)).view(len(rows), -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_have_the_bits_of_the_gguf_package(kind, shape, seed: int) -> None:
    rows = random_rows(kind, shape, seed)
    weight = GgufWeight(rows=rows, kind=kind.name, dtype=torch.float32)
    assert weight.shape == shape
    wanted = wanted_of(rows, kind).view(torch.int32)
    assert torch.equal(weight.dequantize().view(torch.int32), wanted)
    assert torch.equal(weight.quantized().dequantize().view(torch.int32), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_layers_of_stacked_weights_have_the_rows_of_both(kind, seed: int) -> None:
    parts = [random_rows(kind, (number, 256), seed + number) for number in (33, 7)]
    layer = make_linear(
        stack([GgufWeight(rows=rows, kind=kind.name, dtype=torch.float32) for rows in parts])
    )
    ids = torch.tensor([39, 0, 31, 32, 33, 33])
    wanted = torch.cat([wanted_of(rows, kind) for rows in parts])[ids]
    assert torch.equal(layer.rows(ids), wanted)
