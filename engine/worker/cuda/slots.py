"""The device's own table of live sequences, addressed by slot. Nobody else writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column, NewSeq, StepPlan
from engine.sample.sampler import SEED_BITS
from engine.worker.cuda.staging import DeviceColumns, Staging
from kernels import slots as on_slots
from kernels.slots import Columns, Rows, SlotState


class Changes(NamedTuple):
    """What a plan changes in the table, on its way to the device."""

    newcomers: list[torch.Tensor]  # slots, then a value for each column of a slot; [] for nobody
    blocks: list[torch.Tensor]  # slots, places in block tables, blocks; [] for none


class Slots:
    """Tokens, lengths, block tables and sampling parameters of every seat.

    A token that is sampled is known here at once, so the next step needs nothing from the host.
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, max_model_len: int, block_size: int
    ) -> None:
        self.block_size = block_size

        def column(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.zeros((max_num_seqs, *width), dtype=dtype, device=device)

        self.state = SlotState(
            num_computed=column(torch.int32),
            last_tokens=column(torch.int32),
            drafts=column(torch.int32, 1),
            block_tables=column(torch.int32, -(-max_model_len // block_size)),
        )
        self.asked = Columns(
            temperature=column(torch.float64),
            top_k=column(torch.int32),
            top_p=column(torch.float64),
            min_p=column(torch.float64),
            seeds=column(torch.int64),
        )
        self.num_prompt = column(torch.int32)
        # Output tokens by position. Row -1, the last, takes what padding writes.
        self.history = torch.zeros(
            (max_num_seqs + 1, max_model_len + 1), dtype=torch.int32, device=device
        )
        self._no_drafts = column(torch.int32)

    def apply(self, changes: Changes) -> None:
        """Seat the newcomers, then grow block tables."""
        if changes.newcomers:
            slots, *values = changes.newcomers
            columns = (self.state.num_computed, self.num_prompt, *self.asked)
            for column, new in zip(columns, values, strict=True):
                column[slots] = new
        if changes.blocks:
            on_slots.grow_block_tables(self.state.block_tables, *changes.blocks)

    def remember(self, slot: int, first: int, tokens: torch.Tensor) -> None:
        """Enter output tokens that somebody comes back with, from position ``first`` on."""
        self.history[slot, first : first + len(tokens)] = tokens

    def settle(
        self, step: DeviceColumns, rows: Rows, chosen: torch.Tensor, draws: torch.Tensor | None
    ) -> None:
        """Advance the slots of a step by what was computed and chosen [R] for its rows.

        draws: the sequence of each row, [R] int64; None if they are the step's in order.
        """
        tokens = chosen.clamp(min=0)  # of a row that failed, a token like any other
        self.history[rows.slots.long(), rows.positions.long()] = tokens
        if draws is not None:
            tokens = torch.zeros_like(step.slots).index_copy_(0, draws, tokens)
        none = self._no_drafts[: len(step.slots)]
        on_slots.settle(
            self.state, step.slots, step.query_start, none, tokens[:, None], step.num_sampled
        )


def stage_changes(plan: StepPlan, staging: Staging, vocab_size: int) -> Changes:
    """Pack what a plan changes; a newcomer begins where its first row does."""
    newcomers, blocks = [], []
    if plan.new:
        starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        newcomers = [staging.add(column) for column in _columns_of(plan.new, starts, vocab_size)]
    if len(plan.block_ids):
        deltas = (plan.block_slots, plan.block_indices, plan.block_ids)
        blocks = [staging.add(column) for column in deltas]
    return Changes(newcomers, blocks)


def _columns_of(
    new: Sequence[NewSeq], starts: dict[int, int], vocab_size: int
) -> tuple[NDArray[np.generic], ...]:
    """Slots, and in the order of ``Slots.apply`` what is new of them."""
    params = [seq.params for seq in new]
    numbers = (
        [0.0 if p.is_greedy else p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    )
    temperature, top_p, min_p = (np.array(column, dtype=np.float64) for column in numbers)
    top_k: Column = np.array([min(p.top_k, vocab_size) for p in params], dtype=np.int32)
    seeds = np.array([seq.seed & SEED_BITS for seq in new], dtype=np.uint64).view(np.int64)
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
