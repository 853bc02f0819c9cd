"""Builds a step's inputs on the device, so the host need not know the last sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from kernels.reference import index as reference
from kernels.reference.index import Drawn, Inputs, SlotState
from kernels.triton.launch import Launch
from kernels.triton.states import rows_launch

TILE = 256  # tokens or blocks per step
REJECTED = tl.constexpr(reference.REJECTED)
LARGEST_TILE = tl.constexpr(reference.LARGEST_TILE)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "stride_history"])
def prepare_kernel(  # noqa: PLR0913
    slots, query_start, host_ids, num_computed, history, tables, windows,
    input_ids, positions, cache_slots, seq_lens, seq_tables, stride_table, stride_seq_table,
    stride_group, stride_seq_group, stride_slots, shifts,
    num_seqs, num_tokens, stride_history, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill a step's inputs. There is one program per (sequence, group of layers), plus one per
    group for padding tokens; those of group 0 also write the tensors that all groups share. shifts:
    None if positions are indices."""
    seq = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    is_first = group == 0
    cache_slots += group * stride_slots
    row0 = tl.load(query_start + seq)
    row1 = num_tokens
    slot = tl.full([], -1, tl.int64)
    if seq < num_seqs:
        row1 = tl.load(query_start + seq + 1)
        slot = tl.load(slots + seq).to(tl.int64)
    if slot < 0:
        if (seq < num_seqs) & is_first:
            tl.store(seq_lens + seq, 0)
        for start in range(row0, row1, TILE):
            row = start + tl.arange(0, TILE)
            nothing = tl.zeros([TILE], tl.int64)
            tl.store(input_ids + row, nothing.to(tl.int32), mask=is_first & (row < row1))
            tl.store(positions + row, nothing, mask=is_first & (row < row1))
            tl.store(cache_slots + row, nothing - 1, mask=row < row1)
        return
    context = tl.load(num_computed + slot)
    length = context + row1 - row0
    tl.store(seq_lens + seq, length, mask=is_first)
    shift = tl.full([], 0, tl.int32)
    if shifts is not None:
        shift = tl.load(shifts + slot)
    table = tables + group * stride_group + slot * stride_table
    drawn = history + slot * stride_history
    for start in range(row0, row1, TILE):
        row = start + tl.arange(0, TILE)
        mask = row < row1
        token = row - row0
        place = context + token
        known = tl.load(host_ids + row, mask=is_first & mask, other=0)
        made = tl.load(drawn + place, mask=mask & (known < 0), other=0)
        tl.store(input_ids + row, tl.where(known < 0, made, known), mask=is_first & mask)
        tl.store(positions + row, (place + shift).to(tl.int64), mask=is_first & mask)
        block = tl.load(table + place // PAGE, mask=mask, other=0).to(tl.int64)
        tl.store(cache_slots + row, block * PAGE + place % PAGE, mask=mask)
    used = tl.cdiv(length, PAGE)
    window = tl.load(windows + group)
    begin = tl.where(window > 0, tl.maximum(context - window + 1, 0), 0)
    seq_table = seq_tables + group * stride_seq_group + seq.to(tl.int64) * stride_seq_table
    for start in range(begin // LARGEST_TILE * LARGEST_TILE // PAGE, used, TILE):
        place = start + tl.arange(0, TILE)
        block = tl.load(table + place, mask=place < used, other=0)
        there = seq_table + place
        tl.store(there, block, mask=place < used)


@triton.jit(do_not_specialize=["num"])
def grow_kernel(tables, slots, places, blocks, stride, num, TILE: tl.constexpr):
    """Set tables[slots[i], places[i]] = blocks[i] for i < num; TILE entries per program."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + entry, mask=entry < num, other=-1)
    place = tl.load(places + entry, mask=slot >= 0, other=0)
    block = tl.load(blocks + entry, mask=slot >= 0, other=0)
    tl.store(tables + slot.to(tl.int64) * stride + place, block, mask=slot >= 0)


@triton.jit(do_not_specialize=["stride_history"])
def advance_kernel(  # noqa: PLR0913
    slots, query_start, starts, row_slots, tokens, drafts, num_computed, history, stride_history,
    copy, COPIES: tl.constexpr,
):  # fmt: skip
    """One program advances one sequence. drafts: [R], the draft token to compare with each row's
    sampled token, or None without drafts. COPIES: of each recurrent state, 0 without them."""
    seq = tl.program_id(0)
    slot = tl.load(slots + seq).to(tl.int64)
    if slot < 0:
        return
    upto = tl.load(num_computed + slot) + tl.load(query_start + seq + 1)
    upto -= tl.load(query_start + seq)
    row0 = tl.load(starts + seq)
    num = tl.load(starts + seq + 1) - row0
    if num > 0:
        num = tl.where(tl.load(row_slots + row0) < 0, 0, num)
    there = history + slot * stride_history + upto - num + 1
    num_kept = 0
    num_right = 0
    for i in range(num):
        token = tl.load(tokens + row0 + i)
        # Accepted if all earlier drafts were right and, after drafts, the row has a token.
        stands = (num_right == i) & ((token >= 0) | (i == 0))
        known = tl.maximum(token, 0)
        tl.store(there + i, known, mask=stands)
        tl.store(tokens + row0 + i, REJECTED, mask=stands == 0)
        num_kept += stands.to(tl.int32)
        if drafts is not None:
            is_right = (token >= 0) & (token == tl.load(drafts + row0 + i))
            num_right += (stands & is_right).to(tl.int32)
    upto -= num - num_kept
    tl.store(num_computed + slot, upto)
    if COPIES > 0:
        held = tl.load(copy + slot)
        tl.store(copy + slot, (held + tl.maximum(num_kept, 1)) % COPIES)


def preparation(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
    draw_starts: torch.Tensor | None = None,
) -> Callable[[], None]:
    """Returns a function that fills a step's inputs; see kernels.reference.index.preparation."""
    launch = prepare_launch(state, (slots, query_start, host_ids), inputs, block_size)
    if state.copy is None:
        return launch.run
    assert draw_starts is not None
    of_states = rows_launch(state, (slots, draw_starts), inputs)

    def prepare() -> None:
        launch.run()
        of_states.run()

    return prepare


def prepare_launch(
    state: SlotState, batch: tuple[torch.Tensor, ...], inputs: Inputs, block_size: int
) -> Launch:
    """The launch of `prepare_kernel`. batch: slots, query_start and host_ids."""
    slots, query_start, host_ids = batch
    args = {
        "slots": slots,
        "query_start": query_start,
        "host_ids": host_ids,
        "num_computed": state.num_computed,
        "history": state.history,
        "tables": state.block_tables,
        "windows": state.windows,
        "input_ids": inputs.input_ids,
        "positions": inputs.positions,
        "cache_slots": inputs.cache_slots,
        "seq_lens": inputs.seq_lens,
        "seq_tables": inputs.block_tables,
        "stride_table": state.block_tables.stride(1),
        "stride_seq_table": inputs.block_tables.stride(1),
        "stride_group": state.block_tables.stride(0),
        "stride_seq_group": inputs.block_tables.stride(0),
        "stride_slots": inputs.cache_slots.stride(0),
        "shifts": state.shifts,
        "num_seqs": len(slots),
        "num_tokens": len(inputs.input_ids),
        "stride_history": state.history.stride(0),
        "PAGE": block_size,
        "TILE": TILE,
    }
    return Launch(prepare_kernel, (len(slots) + 1, len(state.windows)), args, 4, 1)


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Enter new blocks in block tables; see kernels.reference.index.grow_block_tables."""
    if len(slots):
        grow_launch(block_tables, slots, places, blocks).run()


def grow_launch(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> Launch:
    args = {
        "tables": block_tables,
        "slots": slots,
        "places": places,
        "blocks": blocks,
        "stride": block_tables.stride(0),
        "num": len(slots),
        "TILE": TILE,
    }
    return Launch(grow_kernel, (triton.cdiv(len(slots), TILE),), args, 4, 1)


def remember(
    history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Enter tokens into the history; see kernels.reference.index.remember."""
    reference.remember(history, slots, positions, tokens)


def advance(state: SlotState, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
    """Advance slots by a step's tokens; see kernels.reference.index.advance."""
    if len(slots):
        advance_launch(state, (slots, query_start), drawn).run()


def advance_launch(state: SlotState, batch: tuple[torch.Tensor, ...], drawn: Drawn) -> Launch:
    """The launch of `advance_kernel`. batch: slots and query_start."""
    slots, query_start = batch
    args = {
        "slots": slots,
        "query_start": query_start,
        "starts": drawn.starts,
        "row_slots": drawn.slots,
        "tokens": drawn.tokens,
        "drafts": drawn.drafts,
        "num_computed": state.num_computed,
        "history": state.history,
        "stride_history": state.history.stride(0),
        "copy": state.copy,
        "COPIES": state.num_copies,
    }
    return Launch(advance_kernel, (len(slots),), args, 1, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: block sizes of 16 to 64 tokens."""
    column = torch.empty(64, dtype=torch.int32, device="meta")
    table = torch.empty((64, 512), dtype=torch.int32, device="meta")
    tables = torch.empty((2, 64, 512), dtype=torch.int32, device="meta")
    state = SlotState(column, table, tables, column[:2])
    slots = torch.empty((2, 64), dtype=torch.int64, device="meta")
    inputs = Inputs(column, column.long(), slots, column, tables)
    for block_size in (16, 32, 64):
        for shifts in (None, column):
            shifted = state._replace(shifts=shifts)
            yield prepare_launch(shifted, (column, column, column), inputs, block_size)
    with_states = state._replace(copy=column, num_copies=2)
    yield grow_launch(table, column, column, column)
    for drafts in (None, column):
        drawn = Drawn(column, column, column, drafts)
        for slots_of in (state, with_states):
            yield advance_launch(slots_of, (column, column), drawn)
