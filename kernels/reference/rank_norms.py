"""RMS norms over columns of which each rank has some."""

from __future__ import annotations

import torch

from kernels.meta import ColumnGroups


def sums_of_squares(x: torch.Tensor, groups: ColumnGroups) -> torch.Tensor:
    """See `kernels.ops.sums_of_squares`."""
    sums = x.new_zeros((len(x), len(groups.counts)), dtype=torch.float32)
    for first, end, group in groups.spans:
        sums[:, group] += x[:, first:end].float().square().sum(-1)
    return sums


def scale_groups(
    x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, groups: ColumnGroups, eps: float
) -> torch.Tensor:
    """See `kernels.ops.scale_groups`."""
    scales = torch.rsqrt(sums / groups.counts + eps)
    for first, end, group in groups.spans:
        part = x[:, first:end]
        part.copy_(part.float() * scales[:, group, None] * weight[first:end])
    return x
