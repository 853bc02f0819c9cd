"""RMS norms over columns of which each rank has some."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import reference
from kernels.meta import ColumnGroups

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 7, 300])
def test_parts_are_normalised_as_the_whole(dtype: torch.dtype, num: int, seed: int) -> None:
    """Two groups of 96 columns, which ranks with 120 and 72 columns share."""
    torch.manual_seed(seed)
    x, weight = torch.randn(num, 192).to(dtype), torch.randn(192)
    wanted = torch.cat(
        [
            kernels.rms_norm(part.contiguous(), w.to(dtype), EPS).float()
            for part, w in zip(x.split(96, 1), weight.to(dtype).split(96), strict=True)
        ],
        dim=1,
    )
    device = x.device
    groups = (
        ColumnGroups.of([(0, 96, 0), (96, 120, 1)], [96, 96], device),
        ColumnGroups.of([(0, 72, 1)], [96, 96], device),
    )
    sizes = [120, 72]
    weights = weight.to(dtype).float().split(sizes)
    for ops in (kernels, reference):
        parts = [
            part.clone(memory_format=torch.contiguous_format) for part in x.split([120, 72], 1)
        ]
        pairs = list(zip(parts, groups, strict=True))
        sums = sum(ops.sums_of_squares(part, group) for part, group in pairs)
        for (part, group), own in zip(pairs, weights, strict=True):
            assert ops.scale_groups(part, sums, own, group, EPS) is part
        error = (torch.cat(parts, 1).float() - wanted).abs().max()
        assert error < (1e-5 if dtype is torch.float32 else 0.04)


def test_other_columns_are_unchanged() -> None:
    x = torch.ones(3, 10)
    groups = ColumnGroups.of([(2, 4, 0)], [2], x.device)
    sums = kernels.sums_of_squares(x, groups)
    assert sums.tolist() == [[2.0]] * 3
    kernels.scale_groups(x, sums, torch.full((10,), 5.0), groups, 0.0)
    assert x[0].tolist() == [1, 1, 5, 5, 1, 1, 1, 1, 1, 1]
