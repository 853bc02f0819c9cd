"""Recurrent states: the rows that a step reads and writes, and the layers that update them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import kernels.cpu as cpu_layers
from kernels import reference as reference_layers
from kernels import triton as triton_layers
from kernels.cpu import slots as cpu
from kernels.meta import StateMeta
from kernels.reference import index as reference
from kernels.reference.index import Drawn, Inputs, SlotState
from kernels.triton import index as triton

NUM_SLOTS, COPIES, BLOCK = 6, 5, 16
POISON = -77

on_slots = pytest.mark.parametrize("body", [reference, triton, cpu], ids=["torch", "triton", "cpu"])
layers = pytest.mark.parametrize("body", [triton_layers, cpu_layers], ids=["triton", "cpu"])


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


def made(rng: np.random.Generator, dtype: torch.dtype, width: int, taps: int, counts: list[int]):
    """Random arguments of ``short_conv`` for sequences of these lengths, and three more tokens."""
    num_seqs, num = len(counts), sum(counts) + 3
    seed = torch.Generator().manual_seed(int(rng.integers(1 << 30)))

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(dtype)

    writes = torch.full((num_seqs, COPIES - 1), -1, dtype=torch.int32)
    for s, count in enumerate(counts):
        for j in range(int(rng.integers(0, min(count, COPIES - 1) + 1))):
            writes[s, j] = s * COPIES + 1 + j
    reads = [s * COPIES if rng.random() < 0.7 else -1 for s in range(num_seqs)]
    longest = max(counts)
    meta = StateMeta(starts_of(counts), ints(*reads), writes, ints(num_seqs), 0, longest)
    state = numbers(num_seqs * COPIES, taps - 1, width)
    bias = numbers(width) if rng.random() < 0.5 else None
    return numbers(num, 3 * width), numbers(width, taps), bias, state, meta


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("width", "taps", "counts"),
    [(64, 3, [1, 1, 1, 1]), (40, 4, [1, 5, 19, 2]), (300, 2, [33, 1, 3]), (8, 1, [4, 2])],
)
def test_a_short_convolution_equals_the_reference(
    body, dtype: torch.dtype, width: int, taps: int, counts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bcx, weight, bias, state, meta = made(rng, dtype, width, taps, counts)
    kept = state.clone()
    wanted = reference_layers.short_conv(bcx, weight, bias, state, meta)
    got = body.short_conv(bcx, weight, bias, kept, meta)
    assert torch.equal(kept, state)
    close = {"rtol": 0.03, "atol": 0.03} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(got, wanted, **close)
    assert not got[sum(counts) :].any()


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_short_convolution_has_the_same_bits_in_chunks(
    body, dtype: torch.dtype, seed: int
) -> None:
    """One sequence, whole and cut anywhere, with the state carried from row to row."""
    rng = np.random.default_rng(seed)
    bcx, weight, bias, state, _ = made(rng, dtype, 72, 3, [40])
    bcx = bcx[:40]

    def run(first: int, end: int, read: int, write: int) -> torch.Tensor:
        meta = StateMeta(ints(0, end - first), ints(read), ints(write)[None], ints(1), 0, 2)
        return body.short_conv(bcx[first:end].contiguous(), weight, bias, state, meta)

    whole = run(0, 40, -1, 4)
    last, parts, row = state[4].clone(), [], -1
    cuts = [0, *sorted(rng.choice(np.arange(1, 40), 9, replace=False).tolist()), 40]
    for first, end in itertools.pairwise(cuts):
        parts.append(run(first, end, row, (row + 1) % 3))
        row = (row + 1) % 3
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state[row], last)
