"""Paged attention of a step: the decode kernel for sequences with few query tokens, the prefill
kernel for prompt chunks."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels import tuning
from kernels.meta import AttentionMeta
from kernels.reference import AttentionOptions
from kernels.triton.attention_decode import decode_launches, launches_of
from kernels.triton.attention_prefill import cut, prefill_launch, prefill_launches
from kernels.triton.launch import Launch, arch_of
from kernels.triton.merge import Parts
from kernels.triton.repeated import again


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: AttentionOptions
) -> torch.Tensor:
    """Attention of a step over the paged cache; see kernels.ops.paged_attention."""
    out = _room_for_output(q, meta)
    options, extras = variant[:4], variant[4:]
    forms = [None if one is None else (one.shape, one.dtype) for one in extras]
    shapes = (q.shape, q.stride(), kv_layer.shape, kv_layer.stride())
    again(
        meta.scratch,
        ("attention", meta.group, shapes, q.dtype, kv_layer.dtype, options, *forms),
        (q, kv_layer, out, *extras),
        lambda: launches(q, kv_layer, meta, variant, out),
    )
    return out.flatten(1)


def _room_for_output(q: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
    """Returns a new contiguous output tensor, zeroed if some rows may belong to no sequence."""
    owns_all = len(q) == len(meta.seq_lens) == meta.num_decodes
    return q.new_empty(q.shape) if owns_all else q.new_zeros(q.shape)


def launches(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: AttentionOptions,
    out: torch.Tensor,
) -> list[Launch]:
    """Returns the kernel launches of one layer's attention in a step, in order. All layers use the
    same scratch memory."""
    if meta.batch_invariant:  # one kernel, tile and order of keys for every token
        chunks = replace(meta, num_decodes=0, is_mixed=False)
        return prefill_launches(q, kv_layer, chunks, variant, out)
    if meta.is_mixed:
        return mixed_launches(q, kv_layer, meta, variant, out)
    num_seqs, singles = len(meta.seq_lens), meta.num_decodes
    if 1 < meta.max_query_len <= tuning.MAX_DECODE_TOKENS:
        return decode_launches(q, kv_layer, meta, variant, num_seqs, out)
    found = []
    if singles:
        found += decode_launches(q[:singles], kv_layer, meta, variant, singles, out[:singles])
    if singles < num_seqs and len(q) > singles:
        found += prefill_launches(q, kv_layer, meta, variant, out)
    return found


def mixed_launches(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: AttentionOptions,
    out: torch.Tensor,
) -> list[Launch]:
    """Returns launches of the decode and the prefill kernel for all sequences. On the device, the
    decode kernel skips sequences of many query tokens; the prefill kernel skips all others."""
    step, sizes = (q, kv_layer, meta, variant), (len(meta.seq_lens), tuning.MAX_DECODE_TOKENS)
    chunks = cut(q, kv_layer, meta, variant)
    parts = Parts.of(out, chunks.splits)
    return [
        *launches_of(step, sizes, out, fills=True),
        prefill_launch(step, chunks, parts),
        *parts.merges,
    ]


def reads_fp8(x: torch.Tensor) -> bool:
    """True if attention on the device of tensor x supports a KV cache of 8-bit floats."""
    return tuning.reads_fp8(arch_of(x))
