"""StepPlan -> the buffer that is staged -> the tensors of a forward pass, built on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.batch import ForwardBatch, last_tokens
from engine.messages.step import Column, StepPlan
from engine.worker.batch import Columns, locate
from engine.worker.cuda.platform import Platform
from engine.worker.cuda.sampler import Draws
from engine.worker.cuda.slots import Changes, Slots, stage_changes
from engine.worker.cuda.staging import DeviceColumns, HostColumns, Staging
from engine.worker.states import LiveSeqs
from kernels import AttentionMeta
from kernels import slots as on_slots
from kernels.slots import UNKNOWN, Inputs


class Extent(NamedTuple):
    """How far a step's attention reaches, as the host knows it; a graph takes the most there is."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int


class Picked(NamedTuple):
    """Sequences of a step, on the device."""

    draws: torch.Tensor  # behind which a token is sampled, [R] int64
    hidden: torch.Tensor | None  # whose last hidden state is wanted; None: those of all tokens


class Staged(NamedTuple):
    """A step that was sent to the device."""

    columns: Columns
    step: DeviceColumns
    draws: Draws
    picked: Picked | None  # None: all of them; they have one token each, as many as a graph holds
    changes: Changes | None


class Batches:
    """Sends steps to the device and builds their inputs there, at addresses that never change."""

    def __init__(
        self, platform: Platform, slots: Slots, live: LiveSeqs, staging: Staging, vocab_size: int
    ) -> None:
        self._slots = slots
        self._live = live
        self._staging = staging
        self._vocab_size = vocab_size
        num_seqs, num_tokens = len(staging.device.slots), len(staging.device.host_ids)

        def room(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=platform.device)

        self._inputs = Inputs(
            input_ids=room(torch.int32, num_tokens),
            positions=room(torch.int64, num_tokens),
            cache_slots=room(torch.int64, num_tokens),
            seq_lens=room(torch.int32, num_seqs),
            block_tables=room(torch.int32, num_seqs, slots.state.block_tables.shape[1]),
        )

    def stage(self, columns: Columns, plan: StepPlan | None = None, *, padded: int = 0) -> Staged:
        """Send these rows, and with a plan all that it changes: one copy.

        padded: these rows have one token each, and are made up to so many with rows of nobody.
        """
        host, num_tokens = self._fill(columns, padded)
        draws = _padded_draws(host, columns, padded) if padded else _draws(columns)
        picked = None if padded else self._pick(draws, len(columns.counts), num_tokens)
        changes = None if plan is None else stage_changes(plan, self._staging, self._vocab_size)
        self._staging.send()
        num_seqs = max(len(columns.counts), padded)
        step = self._staging.device.of(num_seqs, num_tokens)
        return Staged(columns, step, draws, picked, changes)

    def build(self, step: DeviceColumns, extent: Extent) -> ForwardBatch:
        """The forward pass of a step; every hidden state is wanted."""
        num_seqs, num_tokens = len(step.slots), len(step.host_ids)
        inputs = self._inputs_of(num_seqs, num_tokens)
        state, size = self._slots.state, self._slots.block_size
        on_slots.prepare_inputs(state, step.slots, step.query_start, step.host_ids, inputs, size)
        meta = AttentionMeta(
            query_start=step.query_start,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            positions=inputs.positions,
            slots=inputs.cache_slots,
            block_size=size,
            num_decodes=extent.num_decodes,
            max_query_len=extent.max_query_len,
            max_seq_len=extent.max_seq_len,
        )
        return ForwardBatch(inputs.input_ids, inputs.positions, meta)

    def build_picked(self, columns: Columns, step: DeviceColumns, picked: Picked) -> ForwardBatch:
        """The forward pass of a step, of the hidden states that somebody wants."""
        not_single = np.flatnonzero(columns.counts != 1)
        extent = Extent(
            num_decodes=int(not_single[0]) if not_single.size else len(columns.counts),
            max_query_len=int(columns.counts.max()),
            max_seq_len=int((columns.starts + columns.counts).max()),
        )
        batch = self.build(step, extent)
        if picked.hidden is not None and not self._live.prompt_scored:
            batch.wanted = last_tokens(batch.attn, picked.hidden)
        return batch

    def seq_lens(self, num_seqs: int) -> torch.Tensor:
        """Where the next token of each sequence will stand, as `build` has worked it out."""
        return self._inputs.seq_lens[:num_seqs]

    def _inputs_of(self, num_seqs: int, num_tokens: int) -> Inputs:
        ends = (num_tokens, num_tokens, num_tokens, num_seqs, num_seqs)
        return Inputs(*(column[:end] for column, end in zip(self._inputs, ends, strict=True)))

    def _fill(self, columns: Columns, padded: int) -> tuple[HostColumns, int]:
        """Fill the fixed columns of the next buffer; also returns how many tokens they hold."""
        tokens, num = locate(columns), len(columns.counts)
        num_tokens = max(len(tokens.slots), padded)
        host = self._staging.open(num_tokens)
        for column, values, padding in (
            (host.slots, columns.slots, -1),
            (host.draws, np.where(columns.samples, columns.slots, -1), -1),
            (host.num_sampled, columns.samples, 0),
            (host.host_ids, self._known(tokens.slots, tokens.positions), UNKNOWN),
        ):
            column[: len(values)] = values
            column[len(values) : padded] = padding
        host.query_start[: num + 1] = tokens.query_start
        host.query_start[num : padded + 1] = np.arange(num, padded + 1)
        return host, num_tokens

    def _pick(self, draws: Draws, num_seqs: int, num_tokens: int) -> Picked:
        rows = self._staging.add(draws.rows.astype(np.int64))
        if len(draws.rows) == num_tokens:
            return Picked(rows, None)
        # Somebody's must be, or the last layer would have nothing to compute.
        last = np.array([num_seqs - 1], dtype=np.int64)
        return Picked(rows, rows if len(rows) else self._staging.add(last))

    def _known(self, slots: NDArray[np.intp], positions: NDArray[np.int64]) -> Column:
        """The ids of tokens that the scheduler sent; the others only the device knows."""
        ids: Column = np.where(
            positions < self._live.num_sent[slots], self._live.tokens[slots, positions], UNKNOWN
        )
        return ids


def _draws(columns: Columns) -> Draws:
    """A row of logits for each row of the plan that samples."""
    rows = np.flatnonzero(columns.samples).astype(np.int32)
    return Draws(rows, columns.slots[rows], (columns.starts + columns.counts)[rows])


def _padded_draws(host: HostColumns, columns: Columns, padded: int) -> Draws:
    """A row of logits for every row, those of nobody included."""
    positions = np.zeros(padded, dtype=np.int32)
    positions[: len(columns.counts)] = columns.starts + columns.counts
    return Draws(np.arange(padded, dtype=np.int32), host.draws[:padded].copy(), positions)
