"""KeptDrafts: which tokens have KV of the draft model, by slot and by block.

Model and draft model use the same block numbers, so a prefix hit is valid for both. But the draft
model computes only rows for which drafts are wanted. Before drafting it first computes the tokens
that it has skipped, including those of prefix hits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import Column, StepPlan


class DraftWork(NamedTuple):
    """The tokens [start, start + count) of each row that the draft model computes after a step."""

    slots: Column
    starts: Column
    counts: Column
    wanted: Column  # number of drafts after the last token
    final: Column  # tokens before this position are final


class KeptDrafts:
    """Records which tokens of each sequence, and which blocks, the draft model has computed."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, width: int) -> None:
        """width: entries of a block table."""
        self._block_size = block_size
        self._upto: Column = np.zeros(num_slots, dtype=np.int32)  # computed tokens, by slot
        self._noted: Column = np.zeros(num_slots, dtype=np.int32)  # of these, those in _has_block
        self._num_found: Column = np.zeros(num_slots, dtype=np.int32)  # blocks of the prefix hit
        self._tables: NDArray[np.int32] = np.zeros((num_slots, width), dtype=np.int32)
        self._has_block = np.zeros(num_blocks, dtype=np.bool_)  # all its tokens are computed

    def begin(self, plan: StepPlan) -> None:
        """Register the blocks of a plan. Blocks of a prefix hit keep their content, new blocks are
        empty. What was computed at or after the first position of a row of the plan, such as a
        rejected draft, no longer counts."""
        self._upto[plan.slots] = np.minimum(self._upto[plan.slots], plan.starts)
        if plan.new:
            starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
            for seq in plan.new:
                self._num_found[seq.slot] = starts[seq.slot] // self._block_size
        slots, indices, blocks = first_group(plan)
        self._tables[slots, indices] = blocks
        self._has_block[blocks[indices >= self._num_found[slots]]] = False
        for seq in plan.new:
            num = int(self._num_found[seq.slot])
            has = self._has_block[self._tables[seq.slot, :num]]
            is_whole = bool(has.all())
            upto = starts[seq.slot] if is_whole else int(has.argmin()) * self._block_size
            self._upto[seq.slot] = self._noted[seq.slot] = upto

    def work(self, rows: DraftWork, limit: int, budget: int) -> DraftWork:
        """The tokens that the draft model shall compute after a step with these rows. limit: the
        first position that it cannot compute. budget: the most tokens of all rows together. Call
        ``computed`` once they are computed.

        A row that needs more tokens than are left of the budget computes what is left, and gets no
        drafts.
        """
        ends = rows.starts + rows.counts
        # All rows that want drafts get as many as the row that wants most.
        reaches = ends + rows.wanted.max(initial=0) <= limit
        wanted = np.where(reaches, rows.wanted, 0)
        starts = np.minimum(self._upto[rows.slots], rows.starts)
        # Including the sampled token.
        counts = np.maximum(np.minimum(ends + (wanted > 0), limit) - starts, 0)
        before = np.cumsum(counts) - counts
        given = np.clip(budget - before, 0, counts)
        wanted = np.where(given == counts, wanted, 0)
        works = given > 0
        columns = (rows.slots, starts, given, wanted, rows.final)
        return DraftWork(*(column[works].astype(np.int32) for column in columns))

    def computed(self, work: DraftWork) -> None:
        """Record that the draft model has computed this work."""
        upto = work.starts + work.counts - (work.wanted > 0)
        self._upto[work.slots] = upto
        # Whether drafts are accepted is known a step later.
        first = np.minimum(self._noted[work.slots], work.starts)
        certain = np.minimum(upto, work.final)
        self._record(work.slots, first, certain)
        self._noted[work.slots] = certain

    def _record(self, slots: Column, first: Column, end: Column) -> None:
        """Record that the draft model has computed the tokens [first, end) of these slots, which
        are final: mark each block that they complete."""
        size = self._block_size
        columns = (slots.tolist(), (first // size).tolist(), (end // size).tolist())
        for slot, begin, upto in zip(*columns, strict=True):
            if upto > begin:
                self._has_block[self._tables[slot, begin:upto]] = True


def first_group(plan: StepPlan) -> tuple[Column, Column, Column]:
    """A plan's changes to the block tables of the first KV group: the slots, the indices in their
    tables, and the new block numbers."""
    columns = (plan.block_slots, plan.block_indices, plan.block_ids)
    if plan.block_groups is None:
        return columns
    is_first = plan.block_groups == 0
    slots, indices, blocks = (column[is_first] for column in columns)
    return slots, indices, blocks


class SpareBlocks:
    """Blocks beyond those of the pool, for drafts after the end of a sequence's own blocks. Their
    content is computed again when the drafts have been accepted."""

    def __init__(self, num_slots: int, num_drafts: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._each = -(-(num_drafts - 1) // block_size) + 1  # drafts may begin anywhere in a block

    @property
    def num_blocks(self) -> int:
        return self._num_slots * self._each

    def tables(self, num_blocks: int, width: int) -> NDArray[np.int32]:
        """Block tables [slots, width] that are filled with spare blocks, whose numbers follow the
        ``num_blocks`` of the pool. Each row repeats the blocks of its slot in turn, so adjacent
        entries, which drafts need at once, are different blocks."""
        slots = np.arange(self._num_slots, dtype=np.int32)[:, None]
        turns = np.arange(width, dtype=np.int32) % self._each
        tables: NDArray[np.int32] = num_blocks + slots * self._each + turns
        return tables
