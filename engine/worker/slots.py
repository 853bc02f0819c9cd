"""The device's own table of live sequences, addressed by slot; nothing else writes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column, NewSeq, StepPlan
from engine.sample.sampler import SlotTables
from engine.sample.spec import SamplingSpec
from engine.worker.platform import Platform
from engine.worker.staging import DeviceColumns, Staging
from kernels import slots as on_slots
from kernels.slots import Columns, Drawn, SlotState


class Changes(NamedTuple):
    """Changes of a plan to the table, on their way to the device."""

    newcomers: list[torch.Tensor]  # slots, then a value for each column of a slot; []: no sequence
    blocks: list[torch.Tensor]  # slots, places in block tables, blocks; [] for none


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

        self.state = SlotState(
            num_computed=column(torch.int32),
            last_tokens=column(torch.int32),
            drafts=column(torch.int32, 1),
            block_tables=column(torch.int32, -(-max_model_len // block_size)),
        )
        self.tables = SlotTables(
            asked=Columns(
                temperature=column(torch.float64),
                top_k=column(torch.int32),
                top_p=column(torch.float64),
                min_p=column(torch.float64),
                seeds=column(torch.int64),
            ),
            history=column(torch.int32, max_model_len + 1),
            num_prompt=column(torch.int32),
        )

    def apply(self, changes: Changes) -> None:
        """Enter new sequences, then grow block tables."""
        if changes.newcomers:
            slots, *values = changes.newcomers
            columns = (self.state.num_computed, self.tables.num_prompt, *self.tables.asked)
            for column, new in zip(columns, values, strict=True):
                column[slots] = new
        if changes.blocks:
            on_slots.grow_block_tables(self.state.block_tables, *changes.blocks)

    def remember(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Enter drafts [D] where they would stand: rows behind them are edited as if they did."""
        on_slots.remember(self.tables.history, slots, positions, tokens)

    def advance(self, step: DeviceColumns, drawn: Drawn) -> None:
        """Advance the slots of a step by what was computed and drawn for them."""
        on_slots.advance(self.state, self.tables.history, step.slots, step.query_start, drawn)


def stage_changes(plan: StepPlan, specs: Sequence[SamplingSpec], staging: Staging) -> Changes:
    """Pack what a plan changes; a new sequence begins where its first row does.
    ``specs``: of the new sequences."""
    newcomers, blocks = [], []
    if plan.new:
        starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        newcomers = [staging.add(column) for column in _columns_of(plan.new, specs, starts)]
    if len(plan.block_ids):
        deltas = (plan.block_slots, plan.block_indices, plan.block_ids)
        blocks = [staging.add(column.astype(np.int32, copy=False)) for column in deltas]
    return Changes(newcomers, blocks)


def _columns_of(
    new: Sequence[NewSeq], specs: Sequence[SamplingSpec], starts: dict[int, int]
) -> tuple[NDArray[np.generic], ...]:
    """Slots, and in the order of ``Slots.apply`` what is new of them."""
    temperature, top_p, min_p = (
        np.array(column, dtype=np.float64)
        for column in zip(*((s.temperature, s.top_p, s.min_p) for s in specs), strict=True)
    )
    top_k: Column = np.array([spec.top_k for spec in specs], dtype=np.int32)
    seeds = np.array([spec.seed for spec in specs], dtype=np.uint64).view(np.int64)
    return (
        np.array([seq.slot for seq in new], dtype=np.int64),
        np.array([starts[seq.slot] for seq in new], dtype=np.int32),
        np.array([seq.num_prompt for seq in new], dtype=np.int32),
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
    )
