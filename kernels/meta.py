"""What the layers of a model need to know of a step: lengths, positions and places in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(slots=True)
class AttentionMeta:
    """The sequences (S) and tokens (N) of a step. Token t of sequence s is row query_start[s] + t
    of the step's tensors.

    The KV cache of a layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; index 0 of
    the second axis is K, 1 is V. Rows of an int8 cache have 4 more elements, the bytes of their
    float32 scale. Block 0 is the null block, whose contents are never used.
    """

    query_start: torch.Tensor  # [S + 1] int32
    seq_lens: torch.Tensor  # [S] int32, cached plus new tokens
    block_tables: torch.Tensor  # [S, max_blocks] int32
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64, block * block_size + offset at which K and V are written
    block_size: int
    num_decodes: int  # the first num_decodes sequences have exactly one query token
    max_query_len: int
    max_seq_len: int
    scratch: dict[Any, Any] = field(default_factory=dict)  # values computed once per step
    # On a GPU, sum each row in an order that does not depend on the batch. A CPU always does.
    batch_invariant: bool = False
    # For a recorded graph that serves any sequences: num_decodes is 0, maximum lengths are the
    # largest possible, and only the device knows the number of tokens of each sequence.
    is_mixed: bool = False
    # The KV group of the layers that read these block tables. All groups of a step share the rest,
    # and ``scratch``.
    group: int = 0
    # [N, rotary_dim]: cosines and sines of the tokens, in place of the layer's table for all
    # positions. ``positions`` are then rows of it.
    cos_sin: torch.Tensor | None = None
    # Tokens that attend to later ones of their media item, too.
    both_ways: BothWays | None = None


@dataclass(slots=True)
class BothWays:
    """The tokens of a step that attend to all tokens of their media item: their rows, and the items
    as sequences that end with the item."""

    rows: torch.Tensor  # [M] int64
    attn: AttentionMeta


@dataclass(slots=True)
class StateMeta:
    """The sequences (S) and tokens (N) of a step, and the rows of state tensors that layers with a
    recurrent state read and write. A state tensor is ``[rows, ...]``.

    With d drafts, a sequence writes its state after each of its last d + 1 tokens, since the last
    drafts may be rejected.
    """

    query_start: torch.Tensor  # [S + 1] int32
    state_reads: torch.Tensor  # [S] int32, row of the state before the step; -1: it is zero
    # [S, W] int32: entry j is the row for the state after the j-th of the last d + 1 tokens; -1:
    # not written. Entries after the first -1 are -1.
    state_writes: torch.Tensor
    num_seqs: torch.Tensor  # [1] int32, S; recorded launches on a CPU read it
    num_decodes: int  # the first num_decodes sequences have exactly one token
    max_query_len: int
    scratch: dict[Any, Any] = field(default_factory=dict)  # values computed once per step
    batch_invariant: bool = False


LayerMeta = AttentionMeta | StateMeta


class ColumnGroups(NamedTuple):
    """Groups of columns that are normalised together, of which a rank has some columns."""

    spans: Sequence[tuple[int, int, int]]  # first column, end, and group of adjacent columns
    runs: torch.Tensor  # [R, 3] int64: the same
    counts: torch.Tensor  # [G] float32: columns of each group on all ranks together

    @classmethod
    def of(
        cls, spans: Sequence[tuple[int, int, int]], counts: Sequence[int], device: torch.device
    ) -> ColumnGroups:
        """Make the tensors on a device."""
        return cls(
            spans,
            torch.tensor(spans, dtype=torch.int64, device=device),
            torch.tensor(counts, dtype=torch.float32, device=device),
        )
