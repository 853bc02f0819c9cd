"""Recurrent states: the rows of state tensors that a step reads and writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cpu import slots as cpu
from kernels.reference import index as reference
from kernels.reference.index import Drawn, Inputs, SlotState
from kernels.triton import index as triton

NUM_SLOTS, COPIES, BLOCK = 6, 5, 16
POISON = -77

on_slots = pytest.mark.parametrize("body", [reference, triton, cpu], ids=["torch", "triton", "cpu"])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def state_of(copies: list[int], num_computed: list[int]) -> SlotState:
    return SlotState(
        num_computed=ints(*num_computed),
        history=torch.zeros((NUM_SLOTS, 64), dtype=torch.int32),
        block_tables=torch.ones((1, NUM_SLOTS, 4), dtype=torch.int32),
        windows=ints(0),
        copy=ints(*copies),
        num_copies=COPIES,
    )


def room(num_seqs: int, num_tokens: int) -> Inputs:
    def column(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(size, POISON, dtype=dtype)

    return Inputs(
        column(num_tokens),
        column(num_tokens, dtype=torch.int64),
        column(1, num_tokens, dtype=torch.int64),
        column(num_seqs),
        column(1, num_seqs, 4),
        column(num_seqs),
        column(num_seqs, COPIES - 1),
        column(1),
    )


@on_slots
def test_a_step_reads_one_copy_and_writes_others(body) -> None:
    """A decode, three drafts, a prompt's first chunk, padding, a chunk that samples nothing."""
    state = state_of([0, 3, 4, 1, 2, 0], [9, 5, 0, 7, 8, 1])
    slots, counts, draws = ints(3, 1, 2, -1, 5), [1, 4, 7, 1, 3], [1, 4, 1, 1, 0]
    inputs, ids = room(5, 16), torch.zeros(16, dtype=torch.int32)
    given = (slots, starts_of(counts), ids)
    body.preparation(state, *given, inputs, BLOCK, starts_of(draws))()
    assert inputs.state_reads is not None and inputs.state_writes is not None
    assert inputs.state_reads.tolist() == [3 * 5 + 1, 5 + 3, -1, -1, 25]
    none = [-1] * (COPIES - 1)
    assert inputs.state_writes.tolist() == [
        [3 * 5 + 2, -1, -1, -1],
        [5 + 4, 5 + 0, 5 + 1, 5 + 2],
        [10 + 0, -1, -1, -1],
        none,
        [26, -1, -1, -1],
    ]


@on_slots
def test_the_copy_after_the_last_kept_token_is_the_next(body) -> None:
    """All drafts right, one of them, none, a row that failed, a chunk without samples."""
    state = state_of([0, 3, 4, 1, 2, 0], [9, 5, 0, 7, 8, 1])
    slots, counts, rows = ints(0, 1, 2, 3, 4, -1), [4, 4, 3, 1, 9, 1], [4, 4, 3, 1, 0, 1]
    tokens = ints(5, 6, 7, 8, 5, 6, 7, 8, 1, 2, 3, -1, 4)
    drafts = ints(5, 6, 7, -1, 5, 9, 7, -1, 2, 2, -1, -1, -1)
    row_slots = slots.repeat_interleave(torch.tensor(rows))
    body.advance(state, slots, starts_of(counts), Drawn(tokens, row_slots, starts_of(rows), drafts))
    assert state.copy is not None
    assert state.copy.tolist() == [4, (3 + 2) % 5, 0, 2, 3, 0]
