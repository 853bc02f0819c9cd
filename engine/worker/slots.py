"""Live sequences, by slot: the host's table, as the scheduler sent them, and the device's own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import NewSeq, StepPlan
from engine.sample.sampler import SlotTables
from engine.worker.platform import Platform
from kernels import slots as on_slots
from kernels.slots import Columns, Drawn, SlotState


class LiveSeqs:
    """The sequence in each slot. ``tokens[slot, p]`` is the token at position p, as far as it came
    with the sequence; zero pages until touched. What was sampled since, the device knows."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_sent: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.seqs: dict[int, NewSeq] = {}
        self.prompt_scored: set[int] = set()  # slots whose prompt log-probabilities are wanted

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, then new sequences."""
        for slot in plan.freed_slots:
            del self.seqs[slot]
            self.prompt_scored.discard(slot)
        for seq in plan.new:
            self.seqs[seq.slot] = seq
            self.tokens[seq.slot, : len(seq.token_ids)] = seq.token_ids
            self.num_sent[seq.slot] = len(seq.token_ids)
            # A resumed request has delivered them already.
            if seq.params.prompt_logprobs is not None and len(seq.token_ids) == seq.num_prompt:
                self.prompt_scored.add(seq.slot)

    def has_scored(self, slots: NDArray[np.int32]) -> bool:
        """Whether prompt log-probabilities are wanted of one of these."""
        return bool(self.prompt_scored) and not self.prompt_scored.isdisjoint(slots.tolist())


class Slots:
    """Tokens, lengths, block tables and sampling parameters of every seat.

    A sampled token is written here at once, so the next step needs nothing from the host.
    """

    def __init__(
        self, platform: Platform, max_num_seqs: int, max_model_len: int, block_size: int
    ) -> None:
        self.block_size = block_size

        def column(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return platform.zeros((max_num_seqs, *width), dtype)

        history = column(torch.int32, max_model_len + 1)
        self.state = SlotState(
            num_computed=column(torch.int32),
            history=history,
            block_tables=column(torch.int32, -(-max_model_len // block_size)),
        )
        self.tables = SlotTables(
            requested=Columns(
                temperature=column(torch.float64),
                top_k=column(torch.int32),
                top_p=column(torch.float64),
                min_p=column(torch.float64),
                seeds=column(torch.int64),
            ),
            history=history,
            num_prompt=column(torch.int32),
        )

    def twin(self, platform: Platform) -> Slots:
        """These sequences for a second model, with lengths and blocks of its own. What was
        requested of them and what was drawn is shared."""
        other, state = copy(self), self.state
        lengths, tables = (
            platform.zeros(tuple(column.shape), column.dtype)
            for column in (state.num_computed, state.block_tables)
        )
        other.state = state._replace(num_computed=lengths, block_tables=tables)
        return other

    def apply(self, newcomers: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None:
        """Enter new sequences, then grow block tables. newcomers: their slots, then a value for
        each column of a slot; blocks: slots, places in their tables, blocks. Either may be empty.
        """
        if newcomers:
            slots, *values = newcomers
            columns = (self.state.num_computed, self.tables.num_prompt, *self.tables.requested)
            for column, new in zip(columns, values, strict=True):
                column[slots] = new
        if blocks:
            on_slots.grow_block_tables(self.state.block_tables, *blocks)

    def remember(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Enter drafts [D] where they would stand: rows after them are edited as if they did."""
        on_slots.remember(self.tables.history, slots, positions, tokens)

    def advance(self, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
        """Advance the slots [S] of a step by what was computed and drawn for them."""
        on_slots.advance(self.state, slots, query_start, drawn)
