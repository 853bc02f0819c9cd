"""Positions of one step's tokens, shared by every attention and KV operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class AttentionMeta:
    """The step's sequences. S sequences, N tokens; token t of sequence s is row query_start[s] + t.

    The KV cache of a layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` (head-major;
    index 0 of the second axis is K, 1 is V). Block 0 is the null block: never read, never meant.
    """

    query_start: torch.Tensor  # [S + 1] int32
    seq_lens: torch.Tensor  # [S] int32: context plus new tokens
    block_tables: torch.Tensor  # [S, max_blocks] int32
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64: block * block_size + offset, where K and V are written
    block_size: int
    num_decodes: int  # the first num_decodes sequences have exactly one query token
    max_query_len: int
    max_seq_len: int
    scratch: dict[Any, Any] = field(default_factory=dict)  # what an operation works out once a step
    # On a GPU: each row's arithmetic has one order, whatever else is in the batch. On a CPU it has.
    batch_invariant: bool = False
    # Recorded for whatever sequences fit: num_decodes is 0, the longest are the longest there may
    # be, and which sequence has how many tokens is for the device to see.
    is_mixed: bool = False
