"""Paged attention of a step: single tokens and drafts to the decode kernel, chunks to the other."""

from __future__ import annotations

import torch

from kernels import tuning
from kernels.meta import AttentionMeta
from kernels.reference import Variant
from kernels.triton.attention_decode import decode_attention
from kernels.triton.attention_prefill import prefill_attention


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: Variant
) -> torch.Tensor:
    """See kernels.ops.paged_attention."""
    out = _room_for_output(q, meta)
    _attend(q, kv_layer, meta, variant, out)
    return out.flatten(1)


def _room_for_output(q: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
    """Contiguous; zeros where the host cannot tell that every row has a sequence."""
    owns_all = len(q) == len(meta.seq_lens) == meta.num_decodes
    return q.new_empty(q.shape) if owns_all else q.new_zeros(q.shape)


def _attend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: Variant,
    out: torch.Tensor,
) -> None:
    num_seqs, singles = len(meta.seq_lens), meta.num_decodes
    # Batch-invariant: a draft always takes the chunk kernel, whatever else is in the step.
    longest = 1 if meta.batch_invariant else tuning.MAX_DECODE_TOKENS
    if 1 < meta.max_query_len <= longest:
        decode_attention(q, kv_layer, meta, variant, num_seqs, out)
        return
    if singles:
        decode_attention(q[:singles], kv_layer, meta, variant, singles, out[:singles])
    if singles < num_seqs and len(q) > singles:
        prefill_attention(q, kv_layer, meta, variant, out)
