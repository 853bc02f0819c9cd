"""Steps of layers that keep a recurrent state, and comparisons of kernels on them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from kernels import StateMeta
from kernels.cpu.state_cells import STATE_TYPES


class Part(NamedTuple):
    """The tokens of one sequence in a step, and what is known of its state."""

    tokens: int
    has_state: bool = False
    drafts: int = 0


# A step with prompts and one of decodes, with and without drafts; one sequence has no tokens.
STEPS = {
    "prompts": (Part(1), Part(37), Part(2), Part(9, has_state=True)),
    "decodes": (Part(1, True), Part(1, True), Part(1)),
    "drafts": (Part(1, True), Part(4, True, 3), Part(0), Part(3, True, 1), Part(33, True)),
}
# Prompts of several chunks, which GPUs compute as products of matrices, next to other sequences.
LONG_STEPS = {
    "chunks": (
        *(Part(1, True), Part(70), Part(16, True), Part(0)),
        *(Part(4, True, 3), Part(64), Part(130, True)),
    )
}


def meta_of(parts: Sequence[Part], num_writes: int = 4) -> StateMeta:
    """The metadata of a step. Sequence s reads row s * (num_writes + 1), and writes the next ones;
    a state tensor has (num_writes + 1) rows for each sequence."""
    starts = torch.tensor([0, *(part.tokens for part in parts)]).cumsum(0)
    writes = torch.full((len(parts), num_writes), -1)
    for s, part in enumerate(parts):
        base = s * (num_writes + 1)
        if part.tokens:
            writes[s, : part.drafts + 1] = torch.arange(base + 1, base + part.drafts + 2)
    reads = [s * (num_writes + 1) if part.has_state else -1 for s, part in enumerate(parts)]
    longest = max(part.tokens for part in parts)
    return StateMeta(
        query_start=starts.int(),
        state_reads=torch.tensor(reads, dtype=torch.int32),
        state_writes=writes.int(),
        num_seqs=torch.tensor([len(parts)], dtype=torch.int32),
        num_decodes=len(parts) if longest == 1 else 0,
        max_query_len=longest,
    )


def num_rows(meta: StateMeta) -> int:
    return len(meta.state_reads) * (meta.state_writes.shape[1] + 1)


Step = Callable[[slice, StateMeta], torch.Tensor]
"""Computes some tokens of a sequence, a slice of the step's, and reads and writes its state."""


def check_cuts(step: Step, num_tokens: int, sizes: Sequence[int]) -> None:
    """Assert that one sequence gives the same outputs, bit for bit, in one step and in steps of
    these sizes. Row 1 of the states is overwritten first, then rows are used in turn."""
    whole = step(slice(0, num_tokens), meta_of([Part(num_tokens)], 1))
    first, read, outputs = 0, -1, []
    for number, size in enumerate(sizes):
        meta = meta_of([Part(size, read >= 0)], 1)
        meta.state_reads[0] = read
        read = number % 2
        meta.state_writes[0, 0] = read
        outputs.append(step(slice(first, first + size), meta))
        first += size
    assert first == num_tokens
    assert torch.equal(torch.cat(outputs), whole)


KEPT = [
    pytest.param(dtype, marks=[pytest.mark.slow] * (dtype is torch.float16))
    for dtype in STATE_TYPES
    if dtype.itemsize == 2
]
"""Dtypes of 16 bits for states, as parameters of a test."""
STATE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By the dtype of a state: its tolerance. A last bit of float32 may round to another number."""


def exact_states(state: torch.Tensor) -> torch.Tensor:
    """The states for a truth in float64: of 16 bits if the states themselves are, so that the truth
    rounds them after each token, too."""
    return state.double() if state.dtype is torch.float32 else state.clone()


def check_states(state: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that states are those of the truth."""
    limit = STATE_TOLERANCE[state.dtype]
    given = state.double(), exact.double()
    torch.testing.assert_close(*given, rtol=limit, atol=limit, equal_nan=True)
