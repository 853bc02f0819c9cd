"""Builds a step's tensors on the device, where sampled tokens and lengths are known.

Persistent state lies by slot; a batch names the slots of its sequences. The host says how many
tokens each sequence computes, which prompt tokens these are, and which blocks were added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

UNKNOWN = -1  # an input id that the host does not know: drawn on the device
REJECTED = -2  # in place of a token drawn after a draft that does not stand


class SlotState(NamedTuple):
    """What the device knows of the sequence in each slot."""

    num_computed: torch.Tensor  # [slots] int32: tokens whose keys and values are in the cache
    history: torch.Tensor  # [slots, max_len] int32: tokens by position, as far as drawn here
    block_tables: torch.Tensor  # [slots, max_blocks] int32


class Inputs(NamedTuple):
    """A step's inputs: S sequences, N tokens. Padding: no token, position 0, slot -1, length 0."""

    input_ids: torch.Tensor  # [N] int32
    positions: torch.Tensor  # [N] int64
    cache_slots: torch.Tensor  # [N] int64: block * block_size + offset, where K and V are written
    seq_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [S, max_blocks] int32


class Drawn(NamedTuple):
    """The tokens that a step drew, R rows. Those of sequence s: starts[s]:starts[s + 1]."""

    tokens: torch.Tensor  # [R] int32, -1 where there is none
    slots: torch.Tensor  # [R] int32, -1: nothing was to be drawn
    starts: torch.Tensor  # [S + 1] int32
    drafts: torch.Tensor | None  # [R] int32: the draft in the place of each; -1: none


def preparation(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> Callable[[], None]:
    """What fills `inputs` from these tensors as they are whenever it is called; see
    `prepare_inputs`. To be kept where their addresses never change."""
    return partial(prepare_inputs, state, slots, query_start, host_ids, inputs, block_size)


def prepare_inputs(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> None:
    """Fill `inputs`. slots [S] int32, -1: padding; query_start [S + 1] int32; host_ids [N] int32.

    An id is the host's unless it is `UNKNOWN`: then it is what was drawn for its place. Of a block
    table only blocks in use are copied.
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
        ids = host_ids[rows]
        inputs.input_ids[rows] = torch.where(ids == UNKNOWN, state.history[slot, place], ids)
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


def remember(
    history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> None:
    """history[slots[i], positions[i]] = tokens[i], all int32."""
    history[slots.long(), positions.long()] = tokens


def advance(state: SlotState, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
    """Advance slots [S] by what was computed and drawn for them; query_start [S + 1].

    A sequence that draws has a row of ``drawn`` after each draft that it computed, and one more.
    Drafts stand as long as they are what was drawn where they stand (a draft without a distribution
    is then accepted with the probability that the model gives it, and a seeded request's tokens
    are the same with drafts and without). The others are rejected: their rows become
    ``REJECTED``. So does a row after drafts that has no token: the next step computes it again as
    the first of its sequence, and only a first row tells a failure, as without drafts. Tokens that
    stand are entered into the history, 0 for a first row that failed.
    """
    bounds, starts = query_start.tolist(), drawn.starts.tolist()
    for s, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        upto = int(state.num_computed[slot]) + bounds[s + 1] - bounds[s]
        rows = range(starts[s], starts[s + 1])
        if len(rows) and drawn.slots[rows[0]] >= 0:
            first, num_kept = upto - len(rows) + 1, 0
            for row in rows:
                token = int(drawn.tokens[row])
                if token < 0 and num_kept:
                    break
                state.history[slot, first + num_kept] = max(token, 0)
                num_kept += 1
                draft = -1 if drawn.drafts is None else int(drawn.drafts[row])
                if token < 0 or token != draft:
                    break
            drawn.tokens[rows[num_kept:]] = REJECTED
            upto -= len(rows) - num_kept
        state.num_computed[slot] = upto
