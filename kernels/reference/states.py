"""Recurrent states: the rows of a state tensor that a step reads and writes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.meta import StateMeta
from kernels.reference.pointwise import wide


def states_before(state: torch.Tensor, meta: StateMeta) -> list[torch.Tensor]:
    """Returns a copy of each sequence's state before the step; zeros where it has none."""
    rows = meta.state_reads.tolist()
    return [state[row].clone() if row >= 0 else torch.zeros_like(state[0]) for row in rows]


def written_rows(meta: StateMeta, seq: int) -> dict[int, int]:
    """Returns the rows to which a sequence's states are written, by the number of the step's tokens
    that follow the state."""
    rows = [row for row in meta.state_writes[seq].tolist() if row >= 0]
    return dict(enumerate(reversed(rows)))


def advance_states(
    advance: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Advance each sequence's state by its tokens, one after the other. Writes the outputs to `out`
    [N, ...], which is returned, and the states to their rows.

    advance(state, token) returns the state after a token and the token's output. The state is
    rounded to its dtype after each token, so that results do not depend on how a sequence is
    divided into steps."""
    before, bounds = states_before(state, meta), meta.query_start.tolist()
    for s, current in enumerate(before):
        rows, end = written_rows(meta, s), bounds[s + 1]
        for token in range(bounds[s], end):
            after, y = advance(wide(current), token)
            current = after.to(state.dtype)
            out[token] = y.to(out.dtype)
            if (row := rows.get(end - 1 - token)) is not None:
                state[row] = current
    return out
