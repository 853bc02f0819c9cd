"""Builds a step's inputs on the device, which has the sampled tokens and the lengths of sequences
by slot.

The host sends the slots of the step's sequences, the number of tokens that each computes, the known
token ids, and new entries of block tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

UNKNOWN = -1  # input id that the host does not know, since it was sampled on the device
REJECTED = -2  # replaces tokens sampled after a rejected draft
LARGEST_TILE = 256  # the most keys that a kernel reads together


class SlotState(NamedTuple):
    """State of the sequence in each slot."""

    num_computed: torch.Tensor  # [slots] int32, tokens whose keys and values are in the cache
    history: torch.Tensor  # [slots, max_len] int32, sampled tokens by position
    block_tables: torch.Tensor  # [G, slots, max_blocks] int32, one for each group of layers
    windows: torch.Tensor  # [G] int32, tokens that a query of the group sees; 0: all


class Inputs(NamedTuple):
    """A step's inputs: S sequences, N tokens, G groups of layers. Padding has id 0, position 0,
    cache slot -1, length 0."""

    input_ids: torch.Tensor  # [N] int32
    positions: torch.Tensor  # [N] int64
    cache_slots: torch.Tensor  # [G, N] int64, block * block_size + offset to write K and V to
    seq_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [G, S, max_blocks] int32


class Drawn(NamedTuple):
    """The R tokens sampled in a step; those of its sequence s are rows starts[s]:starts[s + 1]."""

    tokens: torch.Tensor  # [R] int32; -1: the row got no token
    slots: torch.Tensor  # [R] int32; -1: the row does not sample
    starts: torch.Tensor  # [S + 1] int32
    drafts: torch.Tensor | None  # [R] int32, the draft at the sampled position; -1: none


def preparation(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> Callable[[], None]:
    """A function without arguments that calls `prepare_inputs` with these tensors. They must keep
    their addresses."""
    return partial(prepare_inputs, state, slots, query_start, host_ids, inputs, block_size)


def prepare_inputs(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> None:
    """Fill `inputs` in place. slots [S] int32: slot of each sequence, -1: padding; query_start [S +
    1] int32; host_ids [N] int32: the token ids that the host knows.

    An id that the host does not know (`UNKNOWN`) is taken from the slot's history. Only those
    entries of block tables are copied that attention reads, see `first_read`.
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
        inputs.seq_lens[s] = context + num
        used = -(-(context + num) // block_size)
        for g, window in enumerate(state.windows.tolist()):
            table = state.block_tables[g, slot]
            blocks = table[place // block_size].long()
            inputs.cache_slots[g, rows] = blocks * block_size + place % block_size
            first = first_read(context, window, block_size)
            inputs.block_tables[g, s, first:used] = table[first:used]


def first_read(context: int, window: int, block_size: int) -> int:
    """Index of the first entry of a block table that attention reads for queries from position
    ``context`` on.

    Kernels read whole tiles of keys and mask those before the window, so this is the entry with the
    first key of a tile.
    """
    begin = max(0, context - window + 1) if window else 0
    return begin // LARGEST_TILE * LARGEST_TILE // block_size


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Enter new blocks: block_tables[slots[i], places[i]] = blocks[i], all int32; slot -1 is
    skipped. With several groups of layers, their tables are stacked: row group * number of slots +
    slot."""
    real = slots >= 0
    block_tables[slots[real].long(), places[real].long()] = blocks[real]


def remember(
    history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Enter tokens into the history: history[slots[i], positions[i]] = tokens[i], all int32."""
    history[slots.long(), positions.long()] = tokens


def advance(state: SlotState, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
    """Advance slots [S] by the tokens computed and sampled for them; query_start [S + 1].

    A sequence that samples has one row of ``drawn`` for each of its drafts and one more. Drafts are
    accepted as long as each equals the token sampled at its position. (This accepts a draft with
    the probability that the model gives it, and a seeded request gets the same tokens with and
    without drafts.) Rows after a rejected draft become ``REJECTED``. So does a row that failed
    (token -1) after accepted drafts: the next step computes it again as its sequence's first row,
    and only a first row reports a failure, as without drafts. Accepted tokens are entered into the
    history; for a failed first row, 0.
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
