"""Weights whose parts are stored in different ways stay as they are and multiply as one matrix."""

from __future__ import annotations

import pytest
import torch

from engine.layers.linear import make_linear
from engine.layers.quantized import QuantizedWeight, SplitWeight, plain, stack
from kernels.quantized import Quantized


def quantized(rows: int, bits: int, dtype: torch.dtype, *, outer: bool = False) -> QuantizedWeight:
    """A random weight [rows, 64] in groups of 16, with scales of one or two levels."""
    scales = torch.randint(-30, 30, (rows, 4)) if outer else torch.rand(rows, 4)
    matrix = Quantized(
        values=torch.randint(0, 1 << bits, (rows, 64), dtype=torch.uint8),
        scales=scales.to(torch.int8 if outer else torch.float16),
        bits=bits,
        group_size=16,
        outer_scales=torch.rand(rows, 2) / 30 if outer else None,
        outer_size=32 if outer else 0,
    )
    return QuantizedWeight(matrix=matrix, dtype=dtype)


def test_adjacent_parts_of_one_format_become_one() -> None:
    parts = [quantized(rows, 4, torch.float32) for rows in (8, 3, 5)]
    joined = stack(parts)
    assert isinstance(joined, QuantizedWeight)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_parts_of_other_formats_are_not_widened() -> None:
    parts = [
        quantized(8, 4, torch.float32),
        quantized(4, 4, torch.float32),
        quantized(4, 4, torch.float32, outer=True),
        quantized(4, 6, torch.float32),
        torch.rand(2, 64),
        torch.rand(2, 64),
    ]
    split = stack(parts)
    assert isinstance(split, SplitWeight)
    assert [part.shape[0] for part in split.parts] == [12, 4, 4, 4]
    assert split.shape == (24, 64)
    assert torch.equal(plain(split), torch.cat([plain(part) for part in parts]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num", [1, 5, 300])
def test_split_layers_have_the_outputs_and_rows_of_their_parts(
    num: int, dtype: torch.dtype
) -> None:
    parts = [quantized(40, 4, dtype), quantized(7, 6, dtype), torch.rand(9, 64).to(dtype)]
    biases, x = torch.rand(56), torch.randn(num, 64).to(dtype)
    layer = make_linear(stack(parts), biases)
    wanted = [
        make_linear(part, bias)(x)
        for part, bias in zip(parts, torch.split(biases, [40, 7, 9]), strict=True)
    ]
    assert torch.equal(layer(x), torch.cat(wanted, dim=1))
    ids = torch.tensor([55, 0, 39, 40, 46, 47, 0])
    assert torch.equal(layer.rows(ids).float(), plain(stack(parts))[ids].float())
