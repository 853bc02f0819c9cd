"""Tables of the running sequences by slot: the host's table has what the scheduler sent, the
device's table also what was computed since."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column, NewSeq, StepPlan
from engine.sample.sampler import SlotTables
from engine.worker.platform import Platform
from kernels import slots as on_slots
from kernels.slots import Drawn, SamplingColumns, SlotState


class LiveSeqs:
    """The host's table of running sequences by slot. ``tokens[slot, p]``, for p below
    ``num_sent[slot]``, is the token at position p of the slot's sequence. Later tokens are only on
    the device."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_sent: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.seqs: dict[int, NewSeq] = {}
        self.prompt_scored: set[int] = set()  # slots whose prompt log-probabilities are wanted

    def apply(self, plan: StepPlan) -> None:
        """Remove the sequences whose slots the plan frees, then enter the plan's new sequences."""
        for slot in plan.freed_slots:
            del self.seqs[slot]
            self.prompt_scored.discard(slot)
        for seq in plan.new:
            self.seqs[seq.slot] = seq
            self.tokens[seq.slot, : len(seq.token_ids)] = seq.token_ids
            self.num_sent[seq.slot] = len(seq.token_ids)
            # A request that resumes after preemption has delivered them already.
            if seq.params.prompt_logprobs is not None and len(seq.token_ids) == seq.num_prompt:
                self.prompt_scored.add(seq.slot)

    def has_scored(self, slots: NDArray[np.int32]) -> bool:
        """True if a sequence in one of these slots wants prompt log-probabilities."""
        return bool(self.prompt_scored) and not self.prompt_scored.isdisjoint(slots.tolist())


class NewSlots(NamedTuple):
    """Tensors to write to the slots of new sequences; on the device, one entry per sequence [M]."""

    slots: torch.Tensor
    num_computed: torch.Tensor
    num_prompt: torch.Tensor
    requested: SamplingColumns


class Slots:
    """The device's table: tokens, lengths, block tables and sampling parameters of every slot.

    Each step writes its sampled tokens here, so the next step needs nothing from the host.
    """

    def __init__(
        self,
        platform: Platform,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        windows: Sequence[int] = (0,),
        scales: Sequence[int] = (1,),
        *,
        num_copies: int = 0,
    ) -> None:
        """windows: the sliding window of each layer group in tokens, 0 for full attention; scales:
        ``KVLayout.scales``, one per group; num_copies: of each recurrent state, 0 without them."""
        self.block_size = block_size
        self._scales = np.array(scales, dtype=np.int32) if max(scales) > 1 else None
        width = -(-max_model_len // block_size)

        def column(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return platform.zeros((max_num_seqs, *width), dtype)

        history = column(torch.int32, max_model_len + 1)
        self.state = SlotState(
            num_computed=column(torch.int32),
            history=history,
            block_tables=platform.zeros((len(windows), max_num_seqs, width), torch.int32),
            windows=platform.upload(np.array(windows, dtype=np.int32)),
            copy=column(torch.int32) if num_copies else None,
            num_copies=num_copies,
        )
        self.tables = SlotTables(
            requested=SamplingColumns(
                temperature=column(torch.float64),
                top_k=column(torch.int32),
                top_p=column(torch.float64),
                min_p=column(torch.float64),
                seeds=column(torch.int64),
            ),
            history=history,
            num_prompt=column(torch.int32),
        )

    def keep_shifts(self, platform: Platform) -> torch.Tensor:
        """Let rotary positions differ from the indices of tokens by a number for each slot. Returns
        these numbers, [slots] int32 on the device, at first 0. Must be called before any step."""
        shifts = platform.zeros(tuple(self.state.num_computed.shape), torch.int32)
        self.state = self.state._replace(shifts=shifts)
        return shifts

    def twin(self, platform: Platform, num_copies: int) -> Slots:
        """Return a table of the same sequences for a second model (drafts) with one group of
        layers. Lengths, block tables and copies of states are separate; tokens and sampling
        parameters are shared. num_copies: of each recurrent state of that model."""
        other, state = copy(self), self.state
        lengths, tables, windows = (
            platform.zeros(tuple(column.shape), column.dtype)
            for column in (state.num_computed, state.block_tables[:1], state.windows[:1])
        )
        other._scales = None
        copies = platform.zeros(tuple(lengths.shape), torch.int32) if num_copies else None
        other.state = SlotState(lengths, state.history, tables, windows, copies, num_copies)
        return other

    def apply(self, new: NewSlots | None, blocks: Sequence[torch.Tensor]) -> None:
        """Write new sequences into the device's tables, then append new blocks to block tables.
        ``blocks``: [], or three tensors with one entry per new block: row of the stacked block
        tables (see `table_rows`), index in that row, block id."""
        if new is not None:
            self.state.num_computed[new.slots] = new.num_computed
            self.tables.num_prompt[new.slots] = new.num_prompt
            for column, values in zip(self.tables.requested, new.requested, strict=True):
                column[new.slots] = values
        if blocks:
            on_slots.grow_block_tables(self.state.block_tables.flatten(0, 1), *blocks)

    def table_rows(self, plan: StepPlan) -> Column:
        """For each new block of a plan, return the row of its block table in the stacked tables of
        all layer groups: group * number of slots + slot."""
        rows: Column = plan.block_slots.astype(np.int32, copy=False)
        if plan.block_groups is not None:
            rows = rows + plan.block_groups * np.int32(self.state.block_tables.shape[1])
        return rows

    def table_entries(self, plan: StepPlan) -> Column:
        """For each new block of a plan, its index in the KV tensors of the layers that use it."""
        blocks: Column = plan.block_ids
        if self._scales is None:
            return blocks
        groups = 0 if plan.block_groups is None else plan.block_groups
        return blocks * self._scales[groups]

    def remember(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Enter draft tokens [D] into the slots' histories at their positions, as if they were
        accepted, so that logits at later positions are edited accordingly (penalties, bad
        words)."""
        on_slots.remember(self.tables.history, slots, positions, tokens)

    def advance(self, slots: torch.Tensor, query_start: torch.Tensor, drawn: Drawn) -> None:
        """Add the tokens that a step computed and sampled to the sequences in its slots [S]."""
        on_slots.advance(self.state, slots, query_start, drawn)
