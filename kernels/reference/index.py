"""What a step's tensors are made of on the device, where sampled tokens and lengths are known.

Persistent state lies by slot; a batch names the slots of its sequences. The host says how many
tokens each sequence computes, which prompt tokens these are, and which blocks were added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

UNKNOWN = -1  # an input id that the host does not know: sampled or drafted on the device


class SlotState(NamedTuple):
    """What the device knows of the sequence in each slot."""

    num_computed: torch.Tensor  # [slots] int32: tokens whose keys and values are in the cache
    last_tokens: torch.Tensor  # [slots] int32: sampled last, not computed yet
    drafts: torch.Tensor  # [slots, K] int32: proposals that follow it
    block_tables: torch.Tensor  # [slots, max_blocks] int32


class Inputs(NamedTuple):
    """A step's inputs: S sequences, N tokens. Padding: no token, position 0, slot -1, length 0."""

    input_ids: torch.Tensor  # [N] int32
    positions: torch.Tensor  # [N] int64
    cache_slots: torch.Tensor  # [N] int64: block * block_size + offset, where K and V are written
    seq_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [S, max_blocks] int32


def prepare_inputs(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> None:
    """Fill `inputs`. slots [S] int32, -1: padding; query_start [S + 1] int32; host_ids [N] int32.

    An id is the host's unless it is `UNKNOWN`: then a sequence's first token is the one sampled
    last, the j-th after it draft j - 1. Of a block table only blocks in use are copied.
    """
    inputs.input_ids.zero_()
    inputs.positions.zero_()
    inputs.cache_slots.fill_(-1)
    inputs.seq_lens.zero_()
    bounds = query_start.tolist()
    for s, slot in enumerate(slots.tolist()):
        num = bounds[s + 1] - bounds[s]
        if slot < 0:
            continue
        context = int(state.num_computed[slot])
        rows = slice(bounds[s], bounds[s + 1])
        place = torch.arange(context, context + num, device=slots.device)
        unknown = torch.cat((state.last_tokens[slot : slot + 1], state.drafts[slot]))
        from_device = unknown[torch.arange(num, device=slots.device).clamp(max=len(unknown) - 1)]
        ids = host_ids[rows]
        inputs.input_ids[rows] = torch.where(ids == UNKNOWN, from_device, ids)
        inputs.positions[rows] = place
        blocks = state.block_tables[slot, place // block_size].long()
        inputs.cache_slots[rows] = blocks * block_size + place % block_size
        inputs.seq_lens[s] = context + num
        used = -(-(context + num) // block_size)
        inputs.block_tables[s, :used] = state.block_tables[slot, :used]


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Enter new blocks: block_tables[slots[i], places[i]] = blocks[i], all int32; slot -1: none."""
    real = slots >= 0
    block_tables[slots[real].long(), places[real].long()] = blocks[real]


def settle(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_drafts: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """Advance the slots by what was computed and sampled.

    sampled [S, K + 1] int32, of which num_sampled [S] int32 count: the accepted drafts and one
    token more, or 0 where a prompt is not at its end. num_drafts [S] int32: how many were computed.
    Rejected drafts were computed in vain.
    """
    for s, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        num = int(num_sampled[s])
        computed = int(query_start[s + 1] - query_start[s])
        if num:
            state.last_tokens[slot] = sampled[s, num - 1]
            computed -= int(num_drafts[s]) - (num - 1)
        state.num_computed[slot] += computed
