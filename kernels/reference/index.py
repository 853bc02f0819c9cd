"""Builds a step's inputs on the device, where sampled tokens and sequence lengths are stored by
slot.

The host sends the slot of each sequence in the step, the number of tokens that it computes, the
token ids that the host knows, and new entries of block tables.
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
    """Device tensors with the state of the sequence in each slot."""

    num_computed: torch.Tensor  # [slots] int32, tokens whose keys and values are in the cache
    history: torch.Tensor  # [slots, max_len] int32, sampled tokens by position
    block_tables: torch.Tensor  # [G, slots, max_blocks] int32, one for each group of layers
    windows: torch.Tensor  # [G] int32, tokens that a query of the group sees; 0: all
    # [slots] int32, the copy that has the sequence's recurrent state; None: the model has none.
    copy: torch.Tensor | None = None
    num_copies: int = 0  # of each state; copy c of slot s is row s * num_copies + c
    # [slots] int32, rotary positions minus indices of tokens; None: they are equal.
    shifts: torch.Tensor | None = None


class Inputs(NamedTuple):
    """Input tensors of a step: S sequences, N tokens, G groups of layers. Padding has token id 0,
    position 0, cache slot -1, length 0."""

    input_ids: torch.Tensor  # [N] int32
    positions: torch.Tensor  # [N] int64
    cache_slots: torch.Tensor  # [G, N] int64, block * block_size + offset to write K and V to
    seq_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [G, S, max_blocks] int32
    # For models with recurrent states; see `kernels.meta.StateMeta`.
    state_reads: torch.Tensor | None = None  # [S] int32
    state_writes: torch.Tensor | None = None  # [S, num_copies - 1] int32
    num_seqs: torch.Tensor | None = None  # [1] int32, S


class Drawn(NamedTuple):
    """The R tokens sampled in a step: tokens[starts[s] : starts[s + 1]] are those of sequence s."""

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
    draw_starts: torch.Tensor | None = None,
) -> Callable[[], None]:
    """Returns a function without arguments that calls `prepare_inputs` with these tensors, whose
    addresses must not change."""
    batch = (slots, query_start, host_ids)
    return partial(prepare_inputs, state, *batch, inputs, block_size, draw_starts)


def prepare_inputs(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
    draw_starts: torch.Tensor | None = None,
) -> None:
    """Fill `inputs` in place. slots [S] int32: slot of each sequence, -1: padding; query_start [S +
    1] int32: index of each sequence's first token; host_ids [N] int32: token ids; draw_starts [S +
    1] int32: index of each sequence's first sampled row, only for a model with recurrent states.

    A token id `UNKNOWN` is replaced by the token in the slot's history. Of block tables, only the
    entries that attention reads are copied (see `first_read`). Positions are shifted by
    ``state.shifts``, if there are any.
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
        inputs.positions[rows] = place if state.shifts is None else place + state.shifts[slot]
        inputs.seq_lens[s] = context + num
        used = -(-(context + num) // block_size)
        for g, window in enumerate(state.windows.tolist()):
            table = state.block_tables[g, slot]
            blocks = table[place // block_size].long()
            inputs.cache_slots[g, rows] = blocks * block_size + place % block_size
            first = first_read(context, window, block_size)
            inputs.block_tables[g, s, first:used] = table[first:used]
    if state.copy is not None:
        assert draw_starts is not None
        prepare_states(state, slots, draw_starts, inputs)


def prepare_states(
    state: SlotState, slots: torch.Tensor, draw_starts: torch.Tensor, inputs: Inputs
) -> None:
    """Fill ``state_reads``, ``state_writes`` and ``num_seqs`` of a step's inputs. slots [S] int32:
    slot of each sequence, -1: padding; draw_starts [S + 1] int32: index of each sequence's first
    sampled row.

    A state tensor has several copies of each slot's state. A step reads one copy and writes others,
    so that a failed step can be computed again and rejected drafts change nothing."""
    assert state.copy is not None and inputs.num_seqs is not None
    assert inputs.state_reads is not None and inputs.state_writes is not None
    inputs.state_reads.fill_(-1)
    inputs.state_writes.fill_(-1)
    inputs.num_seqs.fill_(len(slots))
    starts, num = draw_starts.tolist(), state.num_copies
    for s, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        copy, base = int(state.copy[slot]), slot * num
        if state.num_computed[slot] > 0:
            inputs.state_reads[s] = base + copy
        for j in range(max(1, starts[s + 1] - starts[s])):
            inputs.state_writes[s, j] = base + (copy + 1 + j) % num


def next_copy(copy: int, num_kept: int, num_copies: int) -> int:
    """The copy of a slot's state after a step that read ``copy``. num_kept: number of tokens that
    the step sampled for the sequence and that are kept."""
    return (copy + max(1, num_kept)) % num_copies


def first_read(context: int, window: int, block_size: int) -> int:
    """Returns the index of the first block table entry that attention reads for queries from
    position ``context`` on. window: tokens that a query attends to; 0: all.

    Kernels read whole tiles of keys, so this is the block of the first key in the window's first
    tile.
    """
    begin = max(0, context - window + 1) if window else 0
    return begin // LARGEST_TILE * LARGEST_TILE // block_size


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Enter new blocks: block_tables[slots[i], places[i]] = blocks[i], all int32; slot -1 is
    skipped. The tables of several groups of layers are stacked: slots[i] is then group * number of
    slots + slot."""
    real = slots >= 0
    block_tables[slots[real].long(), places[real].long()] = blocks[real]


def remember(
    history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Enter tokens into the history: history[slots[i], positions[i]] = tokens[i], all int32."""
    history[slots.long(), positions.long()] = tokens


def advance(state: SlotState, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
    """Advance slots [S] by the tokens computed and sampled in a step; query_start [S + 1].

    A sequence that samples has one row of ``drawn`` for each of its drafts and one more. A draft is
    accepted if it and all earlier drafts equal the tokens sampled at their positions, so a seeded
    request gets the same tokens without drafts. Accepted tokens are entered into the history.

    Rows after a rejected draft become ``REJECTED``. If a row failed (token -1), it and all later
    rows become ``REJECTED``, and the next step computes it again; only a failed first row stays -1,
    with token 0 in the history.
    """
    bounds, starts = query_start.tolist(), drawn.starts.tolist()
    for s, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        upto = int(state.num_computed[slot]) + bounds[s + 1] - bounds[s]
        rows, num_kept = range(starts[s], starts[s + 1]), 0
        if len(rows) and drawn.slots[rows[0]] >= 0:
            first = upto - len(rows) + 1
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
        if state.copy is not None:
            state.copy[slot] = next_copy(int(state.copy[slot]), num_kept, state.num_copies)
