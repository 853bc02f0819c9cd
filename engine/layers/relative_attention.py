"""Attention with a bias by distance (MPNet), in torch, one sequence at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch.nn import functional as F

from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from kernels.meta import AttentionMeta


def buckets(length: int, num_buckets: int, max_distance: int) -> torch.Tensor:
    """The row of the table of biases for each distance, key - query, from 1 - length to length - 1:
    [2 * length - 1] int64. Half of the rows are for later keys; small distances have a row each,
    larger ones share rows by their logarithm."""
    distance = torch.arange(1 - length, length)
    half = num_buckets // 2
    exact, size = half // 2, distance.abs()
    scale = (half - exact) / math.log(max_distance / exact)
    large = exact + (torch.log(size.clamp(min=1).float() / exact) * scale).to(torch.long)
    place = torch.where(size < exact, size, large.clamp(max=half - 1))
    return place + torch.where(distance > 0, half, 0)


class RelativeBias:
    """The biases of all heads by distance, for sequences of up to ``max_len`` tokens."""

    def __init__(self, table: torch.Tensor, max_len: int, max_distance: int) -> None:
        """table: [buckets, heads]."""
        rows = buckets(max_len, len(table), max_distance).to(table.device)
        self._line = table.float()[rows].T.contiguous()  # [heads, 2 * max_len - 1]
        self._max_len = max_len

    def of(self, length: int) -> torch.Tensor:
        """Biases [heads, length, length] float32 of a sequence's scores, by query and key."""
        first = self._max_len - length
        line = self._line[:, first : first + 2 * length - 1]
        # Row i begins length - 1 - i places after the line does.
        return line.unfold(1, length, 1).flip(1)


class RelativeAttention:
    """Fused QKV projection, attention in both directions with a bias by distance, output
    projection. Keeps nothing in the KV cache, since a sequence is computed in one step."""

    def __init__(
        self, qkv: Linear, out: Linear, num_heads: int, scale: float, bias: RelativeBias
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.num_heads = num_heads
        self.scale = scale
        self.bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        meta: AttentionMeta,
        kv_layer: torch.Tensor,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute the attention sublayer: x [N, H] -> [N, H]."""
        assert wanted is None, "all tokens of an encoder are computed"
        heads = self.qkv(x).view(len(x), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        out = torch.zeros_like(heads[0])
        starts = meta.query_start.tolist()
        for start, end in pairwise(starts):
            if end > start:
                q, k, v = heads[:, None, :, start:end].float()
                mask = self.bias.of(end - start)
                attended = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
                out[:, start:end] = attended[0].to(out.dtype)
        return self.out(out.transpose(0, 1).reshape(len(x), -1))
