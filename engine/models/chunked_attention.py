"""Attention in which a token sees only its own chunk of positions (Llama 4).

A sequence is divided where a chunk ends: what a step computes of each chunk becomes a sequence of
its own, whose first position is the start of the chunk. Keys contain their rotary embedding, so the
change of positions is harmless.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from kernels import AttentionMeta
from kernels.reference.attention import AttentionOptions, attend, gather


class Span(NamedTuple):
    """The tokens of a step that are in one chunk of one sequence."""

    seq: int
    start: int
    """Position at which the chunk starts."""
    first: int
    """Index of the first token among the step's tokens."""
    num_tokens: int
    num_keys: int
    """Number of keys of the chunk after the step."""


def divide(meta: AttentionMeta, size: int) -> list[Span]:
    """Divide a step's sequences at multiples of ``size``, the number of positions in a chunk."""
    spans = []
    starts = meta.query_start.tolist()
    for seq, length in enumerate(meta.seq_lens.tolist()):
        first, position = starts[seq], length - (starts[seq + 1] - starts[seq])
        while position < length:
            start = position // size * size
            end = min(length, start + size)
            spans.append(Span(seq, start, first, end - position, end - start))
            first, position = first + end - position, end
    return spans


def chunked_meta(meta: AttentionMeta, size: int) -> AttentionMeta:
    """The metadata of a step whose sequences are divided into chunks of ``size`` positions, a
    multiple of the block size."""
    spans, device = divide(meta, size), meta.seq_lens.device
    width = size // meta.block_size
    tables = meta.block_tables.new_zeros((len(spans), width))
    for row, span in enumerate(spans):
        table = meta.block_tables[span.seq, span.start // meta.block_size :][:width]
        tables[row, : len(table)] = table
    starts = [0, *(span.first + span.num_tokens for span in spans)]
    num_decodes = next((n for n, span in enumerate(spans) if span.num_tokens > 1), len(spans))
    return replace(
        meta,
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([s.num_keys for s in spans], dtype=torch.int32, device=device),
        block_tables=tables,
        positions=meta.positions % size,
        num_decodes=num_decodes,
        max_query_len=max((span.num_tokens for span in spans), default=0),
        max_seq_len=max((span.num_keys for span in spans), default=0),
        scratch={},
    )


def attend_in_chunks(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    size: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of q [N, Hq, D] within chunks of ``size`` positions that are not a multiple of the
    block size, without compiled kernels. Returns [N, Hq * D]."""
    out = torch.zeros_like(q)
    for span in divide(meta, size):
        block, skipped = divmod(span.start, meta.block_size)
        table = meta.block_tables[span.seq, block:]
        keys, values = gather(kv_layer, table, skipped + span.num_keys)
        rows = slice(span.first, span.first + span.num_tokens)
        found = attend(q[rows], keys[:, skipped:], values[:, skipped:], options)
        out[rows] = found.to(q.dtype)
    return out.flatten(1)
