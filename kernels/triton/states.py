"""Recurrent states: the rows of state tensors that a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.index import Inputs, SlotState
from kernels.triton.launch import Launch


@triton.jit
def rows_kernel(
    slots, draw_starts, num_computed, copy, reads, writes, COPIES: tl.constexpr,
):  # fmt: skip
    """One program finds the rows of state tensors that one sequence reads and writes. COPIES: of
    each state."""
    seq = tl.program_id(0)
    slot = tl.load(slots + seq)
    held = tl.load(copy + slot, mask=slot >= 0, other=0)
    context = tl.load(num_computed + slot, mask=slot >= 0, other=0)
    tl.store(reads + seq, tl.where(context > 0, slot * COPIES + held, -1))
    num = tl.maximum(tl.load(draw_starts + seq + 1) - tl.load(draw_starts + seq), 1)
    for j in range(COPIES - 1):
        row = slot * COPIES + (held + 1 + j) % COPIES
        is_written = (slot >= 0) & (j < num)
        tl.store(writes + seq * (COPIES - 1) + j, tl.where(is_written, row, -1))


def rows_launch(state: SlotState, batch: tuple[torch.Tensor, ...], inputs: Inputs) -> Launch:
    """The launch of `rows_kernel`. batch: slots and draw_starts."""
    slots, draw_starts = batch
    args = {
        "slots": slots,
        "draw_starts": draw_starts,
        "num_computed": state.num_computed,
        "copy": state.copy,
        "reads": inputs.state_reads,
        "writes": inputs.state_writes,
        "COPIES": state.num_copies,
    }
    return Launch(rows_kernel, (len(slots),), args, 1, 1)


def step_arguments(meta: StateMeta) -> dict[str, object]:
    """The arguments of a kernel that describe the sequences of a step."""
    return {
        "query_start": meta.query_start,
        "reads": meta.state_reads,
        "writes": meta.state_writes,
        "WRITES": meta.state_writes.shape[1],
    }


@triton.jit
def count_states(writes, seq, WRITES: tl.constexpr):
    """Returns the number of states that each sequence in `seq` writes, of at most WRITES."""
    num = seq * 0
    for j in range(WRITES):
        num += (tl.load(writes + seq * WRITES + j) >= 0).to(tl.int32)
    return num


def example_step(num_writes: int, longest: int = 1) -> StateMeta:
    """A step of 64 tokens without data, for launches to compile ahead."""
    column = torch.empty(64, dtype=torch.int32, device="meta")
    writes = torch.empty((64, num_writes), dtype=torch.int32, device="meta")
    return StateMeta(column, column, writes, column[:1], 64 // longest, longest)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead."""
    column = torch.empty(64, dtype=torch.int32, device="meta")
    table = torch.empty((64, 512), dtype=torch.int32, device="meta")
    state = SlotState(column, table, table[None], column[:1], column, 2)
    inputs = Inputs(column, column, table, column, table[None], column, table[:, :1], column[:1])
    yield rows_launch(state, (column, column), inputs)
