"""Lengths, positions and KV cache slots of a step's tokens, for attention and KV writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
