"""QK norm, rotary embedding and the write of K and V to the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.meta import AttentionMeta
from kernels.reference.kv_rows import encode_rows
from kernels.reference.pointwise import rms_norm, wide


class Rope(NamedTuple):
    """Rotary table [max_pos, rot] (each row cosines, then sines), and whether the two dimensions of
    a rotated pair are adjacent (interleaved)."""

    cos_sin: torch.Tensor | None
    interleaved: bool


class HeadNorm(NamedTuple):
    """RMS norms of queries and keys: weights [D] (per head) or [heads * D] (full width)."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float
    add_one: bool


def qkv_rope_write(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    heads: tuple[int, int, int],
    rope: Rope,
    norm: HeadNorm,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm, rotary embedding and KV write; see kernels.ops.qkv_rope_write. heads: (Hq, Hkv, D)."""
    num_heads, num_kv_heads, head_dim = heads
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = qkv.split(widths, dim=-1)
    q = _rotate(_normalise(q, norm.q, head_dim, norm), meta.positions, rope)
    k = _rotate(_normalise(k, norm.k, head_dim, norm), meta.positions, rope)
    v = v.unflatten(-1, (num_kv_heads, head_dim))
    if kv_scales is not None:
        k, v = (wide(x) / scale[:, None] for x, scale in zip((k, v), kv_scales, strict=True))
    write_kv(kv_layer, meta.slots, k, v)
    return q.contiguous()


def write_kv(kv_layer: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k, v [N, Hkv, D] to cache slots [N]; -1 is skipped."""
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], v[kept]
    block, offset = slots // kv_layer.shape[3], slots % kv_layer.shape[3]
    kv_layer[block, 0, :, offset] = encode_rows(k, kv_layer.dtype)
    kv_layer[block, 1, :, offset] = encode_rows(v, kv_layer.dtype)


def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, head_dim: int, norm: HeadNorm
) -> torch.Tensor:
    """Normalise x [N, heads * D] -> [N, heads, D]."""
    per_head = x.unflatten(-1, (-1, head_dim))
    if weight is None:
        return per_head
    if weight.numel() == head_dim:
        return rms_norm(per_head, weight, norm.eps, add_one=norm.add_one)
    return rms_norm(x, weight, norm.eps, add_one=norm.add_one).unflatten(-1, (-1, head_dim))


def _rotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the first rot dimensions of each head of x [N, heads, D]."""
    if rope.cos_sin is None:
        return x
    rot = rope.cos_sin.shape[-1]
    cos, sin = rope.cos_sin[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    head, rest = x[..., :rot], x[..., rot:]
    if rope.interleaved:
        a, b = head[..., ::2], head[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
