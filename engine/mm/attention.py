"""Attention of encoders on CPUs, which transformers' modules call by the name ``PACKED``.

torch's attention multiplies bfloat16 on CPUs at a third of the rate of our kernel, which reads keys
and values in blocks: they are copied to blocks first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kernels import AttentionMeta, paged_attention

PACKED = "metronome_packed"
BLOCK = 16  # tokens of a block of keys and values
FEW = 64  # tokens for which copying costs more than it saves


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over all tokens of a sequence, both ways. query, key, value: [S, heads, N, D];
    returns [S, N, heads, D]. Other devices, types, masks and causal attention are left to torch."""
    _, num_heads, num_tokens, size = query.shape
    if (
        attention_mask is not None
        or query.device.type != "cpu"
        or query.dtype != torch.bfloat16
        or options.get("is_causal", getattr(module, "is_causal", True))
        or key.shape != query.shape
        or num_tokens < FEW
        or size % 8
    ):
        by_torch: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return by_torch
    scale = size**-0.5 if scaling is None else scaling
    rows = query.transpose(1, 2).reshape(-1, num_heads, size).contiguous()
    cache, meta = _in_blocks(key, value)
    found = paged_attention(rows, cache, meta, scale=scale, causal=False)
    return found.view(len(query), num_tokens, num_heads, size), None


def _in_blocks(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, AttentionMeta]:
    """Keys and values [S, heads, N, D] in blocks, and where they are."""
    num_seqs, num_heads, num_tokens, size = key.shape
    num_blocks = -(-num_tokens // BLOCK)
    cache = key.new_zeros(1 + num_seqs * num_blocks, 2, num_heads, BLOCK, size)
    blocks = cache[1:].view(num_seqs, num_blocks, 2, num_heads, BLOCK, size)
    whole = num_tokens // BLOCK
    for index, given in enumerate((key, value)):
        tokens = given.transpose(1, 2)
        first = tokens[:, : whole * BLOCK].reshape(num_seqs, whole, BLOCK, num_heads, size)
        blocks[:, :whole, index] = first.transpose(2, 3)
        if whole < num_blocks:
            last = tokens[:, whole * BLOCK :].transpose(1, 2)
            blocks[:, whole, index, :, : num_tokens - whole * BLOCK] = last
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_tokens
    tables = torch.arange(1, len(cache), dtype=torch.int32).view(num_seqs, num_blocks)
    return cache, AttentionMeta(
        query_start=starts,
        seq_lens=torch.full((num_seqs,), num_tokens, dtype=torch.int32),
        block_tables=tables,
        positions=torch.arange(num_tokens).repeat(num_seqs),
        slots=torch.zeros(num_seqs * num_tokens, dtype=torch.int64),  # nothing is written
        block_size=BLOCK,
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, sdpa_mask)
