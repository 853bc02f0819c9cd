"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import kernels
from engine.layers.adapted import Linear
from engine.layers.batch import Wanted
from kernels.meta import AttentionMeta


class Attention:
    """One fused projection, norms and rotation of queries and keys, attention, one projection."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        write: Mapping[str, Any],
        attend: Mapping[str, Any],
    ) -> None:
        """write, attend: this layer's options of ``qkv_rope_write`` and ``paged_attention``."""
        self.qkv = qkv
        self.out = out
        self.write = dict(write)
        self.attend = dict(attend)

    def __call__(
        self,
        x: torch.Tensor,
        meta: AttentionMeta,
        kv_layer: torch.Tensor,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """x: [N, H] -> [N, H], or [R, H] of the wanted rows; writes all K and V to ``kv_layer``."""
        q = kernels.qkv_rope_write(self.qkv(x), kv_layer, meta, **self.write)
        if wanted is not None:
            q, meta = q[wanted.rows], wanted.attn
        return self.out(kernels.paged_attention(q, kv_layer, meta, **self.attend))
