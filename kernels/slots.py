"""Operations on device state by slot, so that the host need not know what was sampled.

Their signatures stand in `kernels.reference`: `index` (a step's inputs, block tables, advancing),
`sampling` (tokens), `logits` (masks, edits, penalties, log-probabilities). A slot of -1 is padding
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from kernels.bodies import triton_for
from kernels.cpu import logits, sampling
from kernels.cpu import slots as index
from kernels.reference.index import REJECTED, UNKNOWN, Drawn, Inputs, SlotState
from kernels.reference.logits import BadWords, Edits, Penalties, new_penalties
from kernels.reference.sampling import Columns, Rows

__all__ = [
    "REJECTED",
    "UNKNOWN",
    "BadWords",
    "Columns",
    "Drawn",
    "Edits",
    "Inputs",
    "Penalties",
    "Rows",
    "SlotState",
    "advance",
    "apply_bitmask",
    "apply_edits",
    "are_sound",
    "count_tokens",
    "forbid_words",
    "grow_block_tables",
    "new_penalties",
    "penalise_rows",
    "preparation",
    "remember",
    "sample",
    "sample_allowed",
    "seat",
    "token_logprobs",
]


def _body(x: torch.Tensor, cpu: ModuleType) -> ModuleType:
    return triton_for(x) or cpu


def preparation(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> Callable[[], None]:
    """See `kernels.reference.index`."""
    body = _body(slots, index)
    found: Callable[[], None]
    found = body.preparation(state, slots, query_start, host_ids, inputs, block_size)
    return found


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    """See `kernels.reference.index`."""
    _body(slots, index).grow_block_tables(block_tables, slots, places, blocks)


def remember(
    history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> None:
    """See `kernels.reference.index`."""
    _body(slots, index).remember(history, slots, positions, tokens)


def advance(state: SlotState, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
    """See `kernels.reference.index`."""
    _body(slots, index).advance(state, slots, query_start, drawn)


def sample(rows: Rows, columns: Columns) -> torch.Tensor:
    """See `kernels.reference.sampling`."""
    return _body(rows.logits, sampling).sample(rows, columns)


def sample_allowed(
    rows: Rows, columns: Columns, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> torch.Tensor:
    """See `kernels.reference.sampling`."""
    return _body(rows.logits, sampling).sample_allowed(rows, columns, masks, mask_of_row)


def are_sound(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return _body(scores, logits).are_sound(scores, places)


def apply_bitmask(scores: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> None:
    """See `kernels.reference.logits`, as for all that follow."""
    _body(scores, logits).apply_bitmask(scores, masks, mask_of_row)


def apply_edits(
    scores: torch.Tensor, edits: Edits, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    _body(scores, logits).apply_edits(scores, edits, slots, positions)


def forbid_words(
    scores: torch.Tensor,
    words: BadWords,
    slots: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    num_prompt: torch.Tensor,
) -> None:
    _body(scores, logits).forbid_words(scores, words, slots, positions, history, num_prompt)


def seat(state: Penalties, slot: int, token_ids: torch.Tensor, num_prompt: int) -> None:
    _body(token_ids, logits).seat(state, slot, token_ids, num_prompt)


def count_tokens(
    state: Penalties, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    _body(slots, logits).count_tokens(state, slots, token_ids, num_tokens)


def penalise_rows(
    scores: torch.Tensor, state: Penalties, slots: torch.Tensor, drafts: torch.Tensor | None = None
) -> None:
    _body(scores, logits).penalise_rows(scores, state, slots, drafts)


def token_logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _body(scores, logits).token_logprobs(scores, token_ids)
