"""Attention over the paged cache, one sequence at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.meta import AttentionMeta
from kernels.reference.kv_rows import decode_rows
from kernels.reference.pointwise import wide


class AttentionOptions(NamedTuple):
    """Options of a layer's attention. See kernels.ops.paged_attention."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None
    distances: torch.Tensor | None = None


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: AttentionOptions
) -> torch.Tensor:
    """Attention over the paged cache: q [N, Hq, D] -> [N, Hq * D]; zeros in rows of padding."""
    out = torch.zeros_like(q)
    starts = meta.query_start.tolist()
    for s, seq_len in enumerate(meta.seq_lens.tolist()):
        start, end = starts[s], starts[s + 1]
        if end > start and seq_len > 0:
            keys, values = gather(kv_layer, meta.block_tables[s], seq_len)
            if variant.kv_scales is not None:
                scales = wide(variant.kv_scales).to(wide(q).dtype)[:, :, None, None]
                keys, values = wide(keys) * scales[0], wide(values) * scales[1]
            out[start:end] = attend(q[start:end], keys, values, variant).to(q.dtype)
    return out.flatten(1)


def gather(
    kv_layer: torch.Tensor, blocks: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one sequence's keys and values, each [Hkv, seq_len, D], from its cache blocks. 8-bit
    integers become float32."""
    used = -(-seq_len // kv_layer.shape[3])
    pages = kv_layer[blocks[:used].long()]  # [used, 2, Hkv, block, D]
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
    return decode_rows(keys), decode_rows(values)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: AttentionOptions
) -> torch.Tensor:
    """Attention of a sequence's last T of L positions: q [T, Hq, D]; keys, values: [Hkv, L,
    D]. Returns [T, Hq, D]."""
    num_new, num_heads, _ = q.shape
    group, length = num_heads // keys.shape[0], keys.shape[1]
    q = wide(q)
    keys = wide(keys).to(q.dtype).repeat_interleave(group, dim=0)
    values = wide(values).to(q.dtype).repeat_interleave(group, dim=0)
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * variant.scale  # [Hq, T, L]
    if variant.softcap:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    query_pos = torch.arange(length - num_new, length, device=q.device)[:, None]
    key_pos = torch.arange(length, device=q.device)[None, :]
    if variant.alibi is not None:
        scores = scores + variant.alibi.to(q.dtype)[:, None, None] * (key_pos - query_pos)
    distance = query_pos - key_pos
    if variant.distances is not None:
        place = variant.distances.shape[1] // 2 - distance
        scores = scores + variant.distances.to(q.dtype)[:, place]
    hidden = distance < 0 if variant.causal else torch.zeros_like(distance, dtype=torch.bool)
    if variant.window:
        hidden |= distance.abs() >= variant.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.to(scores.dtype)[:, None, None].expand(num_heads, num_new, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :length]
    # Values that no query attends to may be NaN: with a window, their blocks may have been freed.
    is_seen = (~hidden).any(0)[:, None]
    out = weights @ values.where(is_seen, 0)
    return out.transpose(0, 1)
