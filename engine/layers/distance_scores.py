"""Relative positions of MPNet: scores of attention by head and distance."""

from __future__ import annotations

import math

import torch

ROOM = 16  # distances beyond the longest text, of which kernels may read some


def distance_scores(table: torch.Tensor, max_len: int, max_distance: int) -> torch.Tensor:
    """What is added to the scores of each head by distance, key - query, for texts of up to
    ``max_len`` tokens: [heads, 2 L + 1] float32, with distance 0 at L. table: [buckets, heads];
    max_distance: all distances from this on have the same score."""
    rows = _buckets(max_len + ROOM, len(table), max_distance).to(table.device)
    return table.float()[rows].T.contiguous()


def _buckets(most: int, num_buckets: int, max_distance: int) -> torch.Tensor:
    """The row of the table for each distance from -most to most. Half of the rows are for later
    keys; small distances have a row each, larger ones share rows by their logarithm."""
    distance = torch.arange(-most, most + 1)
    half = num_buckets // 2
    exact, size = half // 2, distance.abs()
    scale = math.log(max_distance / exact)
    large = torch.log(size.clamp(min=1).float() / exact) / scale * (half - exact)
    place = torch.where(size < exact, size, (exact + large.long()).clamp(max=half - 1))
    return place + torch.where(distance > 0, half, 0)
