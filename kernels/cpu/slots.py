"""CPU versions of the operations on per-slot state in `kernels.reference.index`. The loops are
compiled and use one thread, which is faster than waking a second one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from numba import njit

from kernels.cpu.native import Kernel, i32, i64
from kernels.reference.index import LARGEST_TILE, REJECTED, UNKNOWN, Drawn, Inputs, SlotState


def preparation(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
    draw_starts: torch.Tensor | None = None,
) -> Callable[[], None]:
    sizes = (
        slots.shape[0],
        inputs.input_ids.shape[0],
        state.history.stride(0),
        block_size,
        len(state.windows),
        *(of.stride(axis) for of in (state.block_tables, inputs.block_tables) for axis in (0, 1)),
        inputs.cache_slots.stride(0),
        0 if state.shifts is None else state.shifts.data_ptr(),
    )
    tensors = (slots, query_start, host_ids, *state[:4], *inputs[:5], torch.tensor(sizes))
    arguments = tuple(tensor.data_ptr() for tensor in tensors)
    held = (*tensors, state.shifts)

    # The default argument keeps the tensors alive, to which only addresses point.
    def prepare(tensors: tuple[torch.Tensor | None, ...] = held) -> None:
        PREPARE.run(1, *arguments)

    if state.copy is None:
        return prepare
    of_states = (slots, draw_starts, state.num_computed, state.copy, *inputs[5:])
    columns = [tensor for tensor in of_states if tensor is not None]
    places = [tensor.data_ptr() for tensor in columns]

    def prepare_both(tensors: list[torch.Tensor] = columns) -> None:
        prepare()
        PREPARE_STATES.run(1, *places, slots.shape[0], state.num_copies)

    return prepare_both


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    tensors = (block_tables, slots, places, blocks)
    GROW.run(1, *(tensor.data_ptr() for tensor in tensors), slots.shape[0], block_tables.stride(0))


def remember(
    history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> None:
    history.numpy()[slots.numpy(), positions.numpy()] = tokens.numpy()


def advance(state: SlotState, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
    tensors = (slots, query_start, drawn.starts, drawn.slots, drawn.tokens)
    ADVANCE.run(
        1,
        *(tensor.data_ptr() for tensor in tensors),
        0 if drawn.drafts is None else drawn.drafts.data_ptr(),
        state.num_computed.data_ptr(),
        state.history.data_ptr(),
        slots.shape[0],
        state.history.stride(0),
        0 if state.copy is None else state.copy.data_ptr(),
        state.num_copies,
    )


@njit(inline="always")
def _nobody(input_ids, positions, first, end):
    """Set tokens [first, end) of a batch to padding (id 0, position 0), and return `end`."""
    for n in range(first, end):
        input_ids[n] = positions[n] = 0
    return end


@njit(inline="always")
def _shift(positions, slots, starts, shifts):
    """Add to the positions of each sequence the number of its slot. shifts: their
    address, 0 if there are none."""
    for s in range(slots.shape[0] if shifts else 0):
        if slots[s] >= 0:
            shift = i32(shifts + 4 * slots[s], (1,))[0]
            for n in range(starts[s], starts[s + 1]):
                positions[n] += shift


def _prepare_body(row):
    p = i64(row, (14,))
    sizes = i64(p[13], (11,))
    num_seqs, num_tokens, stride_history = sizes[0], sizes[1], sizes[2]
    size, num_groups = sizes[3], sizes[4]
    slots, starts = i32(p[1], (num_seqs,)), i32(p[2], (num_seqs + 1,))
    host_ids = i32(p[3], (num_tokens,))
    input_ids, positions = i32(p[8], (num_tokens,)), i64(p[9], (num_tokens,))
    seq_lens = i32(p[11], (num_seqs,))
    first = 0
    for s in range(num_seqs):
        slot, end = slots[s], starts[s + 1]
        if slot < 0:
            seq_lens[s] = 0
            first = _nobody(input_ids, positions, first, end)
            continue
        context = i32(p[4] + 4 * slot, (1,))[0]
        length = context + end - first
        drawn = i32(p[5] + 4 * slot * stride_history, (length,))
        for n in range(first, end):
            place, known = context + n - first, host_ids[n]
            input_ids[n] = drawn[place] if known == UNKNOWN else known
            positions[n] = place
        seq_lens[s] = length
        first = end
    _nobody(input_ids, positions, first, num_tokens)
    windows = i32(p[7], (num_groups,))
    for g in range(num_groups):
        tables, seq_tables = p[6] + 4 * g * sizes[5], p[12] + 4 * g * sizes[7]
        cache_slots = i64(p[10] + 8 * g * sizes[9], (num_tokens,))
        first = 0
        for s in range(num_seqs):
            slot, end = slots[s], starts[s + 1]
            if slot < 0:
                cache_slots[first:end] = -1
                first = end
                continue
            used = (seq_lens[s] + size - 1) // size
            table = i32(tables + 4 * slot * sizes[6], (used,))
            seq_table = i32(seq_tables + 4 * s * sizes[8], (used,))
            begin = 0
            if windows[g] > 0:
                begin = max(0, seq_lens[s] - (end - first) - windows[g] + 1)
            for place in range(begin // LARGEST_TILE * LARGEST_TILE // size, used):
                seq_table[place] = table[place]
            for n in range(first, end):
                cache_slots[n] = table[positions[n] // size] * size + positions[n] % size
            first = end
        cache_slots[first:num_tokens] = -1
    _shift(positions, slots, starts, sizes[10])


def _prepare_states_body(row):
    p = i64(row, (10,))
    num_seqs, copies = p[8], p[9]
    slots, starts = i32(p[1], (num_seqs,)), i32(p[2], (num_seqs + 1,))
    reads, writes = i32(p[5], (num_seqs,)), i32(p[6], (num_seqs, copies - 1))
    i32(p[7], (1,))[0] = num_seqs
    for s in range(num_seqs):
        reads[s] = -1
        writes[s, :] = -1
        slot = slots[s]
        if slot < 0:
            continue
        copy, base = i32(p[4] + 4 * slot, (1,))[0], slot * copies
        if i32(p[3] + 4 * slot, (1,))[0] > 0:
            reads[s] = base + copy
        for j in range(max(1, starts[s + 1] - starts[s])):
            writes[s, j] = base + (copy + 1 + j) % copies


def _advance_body(row):
    p = i64(row, (13,))
    num_seqs, stride = p[9], p[10]
    slots, bounds = i32(p[1], (num_seqs,)), i32(p[2], (num_seqs + 1,))
    starts = i32(p[3], (num_seqs + 1,))
    num_rows = starts[num_seqs]
    row_slots, tokens = i32(p[4], (num_rows,)), i32(p[5], (num_rows,))
    drafts = i32(p[6], (num_rows if p[6] else 0,))
    for s in range(num_seqs):
        slot = slots[s]
        if slot < 0:
            continue
        num_computed = i32(p[7] + 4 * slot, (1,))
        upto = num_computed[0] + bounds[s + 1] - bounds[s]
        first, end, num_kept = starts[s], starts[s + 1], 0
        if end > first and row_slots[first] >= 0:
            output = i32(p[8] + 4 * (slot * stride + upto - (end - first) + 1), (end - first,))
            stands = True
            while stands:
                token = tokens[first + num_kept]
                output[num_kept] = max(token, 0)
                is_right = token >= 0 and drafts.shape[0] > 0 and token == drafts[first + num_kept]
                num_kept += 1
                stands = is_right and first + num_kept < end and tokens[first + num_kept] >= 0
            for n in range(first + num_kept, end):
                tokens[n] = REJECTED
            upto -= end - first - num_kept
        num_computed[0] = upto
        if p[11]:
            copy = i32(p[11] + 4 * slot, (1,))
            copy[0] = (copy[0] + max(1, num_kept)) % p[12]


def _grow_body(row):
    p = i64(row, (7,))
    num, stride = p[5], p[6]
    slots, places, blocks = i32(p[2], (num,)), i32(p[3], (num,)), i32(p[4], (num,))
    for n in range(num):
        if slots[n] >= 0:
            i32(p[1] + 4 * (slots[n] * stride + places[n]), (1,))[0] = blocks[n]


PREPARE, ADVANCE, GROW = Kernel(_prepare_body), Kernel(_advance_body), Kernel(_grow_body)
PREPARE_STATES = Kernel(_prepare_states_body)
