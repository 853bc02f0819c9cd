"""What a model's forward pass is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.meta import AttentionMeta


@dataclass(slots=True)
class Wanted:
    """The tokens whose hidden states somebody will read, each as a decode of its own.

    A prompt is only asked for what follows it, so the last layer needs the queries, the output
    projection and the MLP of few rows; keys and values it needs of all.
    """

    rows: torch.Tensor  # [R] int64, rows of the batch
    attn: AttentionMeta  # R sequences of one query


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of one step, flattened over its sequences (decodes first)."""

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    attn: AttentionMeta
    wanted: Wanted | None = None  # None: every row


def last_tokens(attn: AttentionMeta, sequences: torch.Tensor) -> Wanted:
    """Want the last token of each of these sequences. sequences: [R] int64."""
    rows = attn.query_start[1:][sequences].long() - 1
    count = len(rows)
    return Wanted(
        rows,
        AttentionMeta(
            query_start=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            seq_lens=attn.seq_lens[sequences],
            block_tables=attn.block_tables[sequences],
            positions=attn.positions[rows],
            slots=attn.slots[rows],
            block_size=attn.block_size,
            num_decodes=count,
            max_query_len=1,
            max_seq_len=attn.max_seq_len,
        ),
    )
