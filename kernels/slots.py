"""Operations on what lies by slot on a device, so that the host need not know what was sampled.

Their signatures stand in `kernels.reference`: `index` (a step's inputs, block tables, advancing),
`sampling` (tokens), `logits` (masks, edits, penalties, log-probabilities). A slot of -1 is padding
everywhere. Where no Triton computes, the reference does: that is for tests, not for speed.
"""

from __future__ import annotations

from types import ModuleType

import torch

from kernels.bodies import triton_for
from kernels.reference import index, logits, sampling
from kernels.reference.index import UNKNOWN, Inputs, SlotState
from kernels.reference.logits import BadWords, Edits, Penalties, new_penalties
from kernels.reference.sampling import Columns, Rows

__all__ = [
    "UNKNOWN",
    "BadWords",
    "Columns",
    "Edits",
    "Inputs",
    "Penalties",
    "Rows",
    "SlotState",
    "apply_bitmask",
    "apply_edits",
    "count_tokens",
    "forbid_words",
    "grow_block_tables",
    "new_penalties",
    "penalise_rows",
    "prepare_inputs",
    "sample",
    "seat",
    "settle",
    "token_logprobs",
]


def _body(x: torch.Tensor, reference: ModuleType) -> ModuleType:
    return triton_for(x) or reference


def prepare_inputs(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    host_ids: torch.Tensor,
    inputs: Inputs,
    block_size: int,
) -> None:
    """See `kernels.reference.index`."""
    body = _body(slots, index)
    body.prepare_inputs(state, slots, query_start, host_ids, inputs, block_size)


def grow_block_tables(
    block_tables: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor
) -> None:
    """See `kernels.reference.index`."""
    _body(slots, index).grow_block_tables(block_tables, slots, places, blocks)


def settle(
    state: SlotState,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_drafts: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """See `kernels.reference.index`."""
    _body(slots, index).settle(state, slots, query_start, num_drafts, sampled, num_sampled)


def sample(rows: Rows, columns: Columns) -> torch.Tensor:
    """See `kernels.reference.sampling`."""
    return _body(rows.logits, sampling).sample(rows, columns)


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


def penalise_rows(scores: torch.Tensor, state: Penalties, slots: torch.Tensor) -> None:
    _body(scores, logits).penalise_rows(scores, state, slots)


def token_logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _body(scores, logits).token_logprobs(scores, token_ids)
