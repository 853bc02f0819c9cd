"""Blocks of quantised GGUF tensors are decoded exactly, bit for bit as the gguf package does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize as dequantized

from engine.models.gguf_blocks import FORMS, Kind, decode
from kernels.reference.quant import dequantize

SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.MXFP4: ()}
PAIRED = (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_decoded_blocks_have_the_bits_of_the_gguf_package(kind, shape, seed: int) -> None:
    rows = random_rows(kind, shape, seed)
    matrix = decode(kind, rows)
    assert matrix.values.shape == shape
    assert int(matrix.values.max()) < 1 << matrix.bits
    wanted = dequantized(rows.numpy(), kind).astype(np.float32).reshape(shape)
    found = dequantize(matrix, torch.float32).numpy()
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
