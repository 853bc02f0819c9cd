"""StepPlan and states -> the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.batch import ForwardBatch, last_tokens
from engine.messages.step import Column, StepPlan
from engine.worker.states import States
from kernels import AttentionMeta


class Columns(NamedTuple):
    """The rows of a plan, or some of them: slots, first positions, token counts, who samples."""

    slots: Column
    starts: Column
    counts: Column
    samples: Column

    @classmethod
    def of(cls, plan: StepPlan) -> Columns:
        return cls(plan.slots, plan.starts, plan.counts, plan.samples)

    def part(self, first: int, last: int) -> Columns:
        """Rows [first, last)."""
        return Columns(*(column[first:last] for column in self))


@dataclass(slots=True)
class Tokens:
    """Where each token of the step is: slot, position, and where its row begins."""

    slots: NDArray[np.intp]  # [N]
    positions: NDArray[np.int64]  # [N]
    query_start: NDArray[np.int32]  # [S + 1]


def locate(columns: Columns) -> Tokens:
    """Flatten the rows to tokens."""
    counts = columns.counts
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    if int(query_start[-1]) == len(counts):  # one token each
        slots = columns.slots.astype(np.intp)
        return Tokens(slots, columns.starts.astype(np.int64), query_start)
    slots = np.repeat(columns.slots, counts).astype(np.intp)
    offsets = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
    return Tokens(slots, np.repeat(columns.starts, counts) + offsets, query_start)


def build_batch(columns: Columns, states: States, *, every_row: bool = False) -> ForwardBatch:
    """The forward pass of these rows. Rows of one token come first in every plan.

    Hidden states are wanted of ``every_row``, or of those behind which a token is sampled (of the
    last row, if there is none).
    """
    tokens = locate(columns)
    seq_lens = columns.starts + columns.counts
    max_seq_len = int(seq_lens.max())
    size = states.block_size
    num_blocks = -(-max_seq_len // size)
    where = states.blocks[tokens.slots, tokens.positions // size].astype(np.int64)
    not_single = np.flatnonzero(columns.counts != 1)
    meta = AttentionMeta(
        query_start=torch.from_numpy(tokens.query_start),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_tables=torch.from_numpy(states.blocks[columns.slots, :num_blocks]),
        positions=torch.from_numpy(tokens.positions),
        slots=torch.from_numpy(where * size + tokens.positions % size),
        block_size=size,
        num_decodes=int(not_single[0]) if not_single.size else len(columns.counts),
        max_query_len=int(columns.counts.max()),
        max_seq_len=max_seq_len,
    )
    ids = states.tokens[tokens.slots, tokens.positions].astype(np.int64)
    wanted = None
    sampling = np.flatnonzero(columns.samples)
    if not every_row and sampling.size < len(ids):
        sequences = sampling if sampling.size else np.array([len(columns.counts) - 1])
        wanted = last_tokens(meta, torch.from_numpy(sequences))
    return ForwardBatch(torch.from_numpy(ids), meta.positions, meta, wanted)
