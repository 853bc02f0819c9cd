"""What a draft model keeps of the tokens that its model has computed: by slot and by block.

The two share block numbers, so a prefix that is found is found for both. But the draft model
computes only where drafts are wanted, and then catches up first: with what other requests computed
while none were, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import Column, StepPlan


class DraftWork(NamedTuple):
    """What the draft model computes after a step, by row: tokens [start, start + count)."""

    slots: Column
    starts: Column
    counts: Column
    wanted: Column  # drafts after the last token, 0: none
    stand: Column  # tokens before this position are certain to stand


class KeptDrafts:
    """Which tokens of each sequence, and which blocks, the draft model has computed."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, width: int) -> None:
        """width: of a block table."""
        self._block_size = block_size
        self._upto: Column = np.zeros(num_slots, dtype=np.int32)  # by slot: tokens before this
        self._noted: Column = np.zeros(num_slots, dtype=np.int32)  # the same, of blocks that know
        self._num_found: Column = np.zeros(num_slots, dtype=np.int32)  # blocks that it came with
        self._tables: NDArray[np.int32] = np.zeros((num_slots, width), dtype=np.int32)
        self._has_block = np.zeros(num_blocks, dtype=np.bool_)  # all of its tokens

    def begin(self, plan: StepPlan) -> None:
        """Blocks that a sequence comes with hold what they held; those that it grows by nothing.
        From where a row begins other tokens may stand now than drafts that were computed there."""
        self._upto[plan.slots] = np.minimum(self._upto[plan.slots], plan.starts)
        if plan.new:
            starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
            for seq in plan.new:
                self._num_found[seq.slot] = starts[seq.slot] // self._block_size
        slots, indices, blocks = plan.block_slots, plan.block_indices, plan.block_ids
        self._tables[slots, indices] = blocks
        self._has_block[blocks[indices >= self._num_found[slots]]] = False
        for seq in plan.new:
            num = int(self._num_found[seq.slot])
            has = self._has_block[self._tables[seq.slot, :num]]
            is_whole = bool(has.all())
            upto = starts[seq.slot] if is_whole else int(has.argmin()) * self._block_size
            self._upto[seq.slot] = self._noted[seq.slot] = upto

    def work(self, rows: DraftWork, limit: int, budget: int) -> DraftWork:
        """What to compute after a step's rows, which are what the step computed. limit: no token
        at this position or after it is computed. budget: tokens. Say so once it is ``computed``.

        A row of which too much is missing catches up as far as the budget goes, and has no drafts.
        """
        ends = rows.starts + rows.counts
        # All rows that want some go as far as the one that wants most.
        reaches = ends + rows.wanted.max(initial=0) <= limit
        wanted = np.where(reaches, rows.wanted, 0)
        starts = np.minimum(self._upto[rows.slots], rows.starts)
        # With the token that was drawn.
        counts = np.maximum(np.minimum(ends + (wanted > 0), limit) - starts, 0)
        before = np.cumsum(counts) - counts
        given = np.clip(budget - before, 0, counts)
        wanted = np.where(given == counts, wanted, 0)
        works = given > 0
        columns = (rows.slots, starts, given, wanted, rows.stand)
        return DraftWork(*(column[works].astype(np.int32) for column in columns))

    def computed(self, work: DraftWork) -> None:
        """The draft model has computed this."""
        upto = work.starts + work.counts - (work.wanted > 0)
        self._upto[work.slots] = upto
        # Of drafts it is known a step later that they stand.
        first = np.minimum(self._noted[work.slots], work.starts)
        certain = np.minimum(upto, work.stand)
        self._note(work.slots, first, certain)
        self._noted[work.slots] = certain

    def _note(self, slots: Column, first: Column, end: Column) -> None:
        """Tokens [first, end) of these rows are there, and stand."""
        size = self._block_size
        columns = (slots.tolist(), (first // size).tolist(), (end // size).tolist())
        for slot, begin, upto in zip(*columns, strict=True):
            if upto > begin:
                self._has_block[self._tables[slot, begin:upto]] = True


class SpareBlocks:
    """Blocks after those of the pool: drafts reach beyond the blocks of their sequence. What is
    written there is computed again once it is known to stand."""

    def __init__(self, num_slots: int, num_drafts: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._each = -(-(num_drafts - 1) // block_size) + 1  # they may begin anywhere in a block

    @property
    def num_blocks(self) -> int:
        return self._num_slots * self._each

    def tables(self, num_blocks: int, width: int) -> NDArray[np.int32]:
        """Block tables [slots, width] of sequences that have no block of a pool of this many: as
        many neighbours in a table as may be needed at once are different blocks."""
        slots = np.arange(self._num_slots, dtype=np.int32)[:, None]
        turns = np.arange(width, dtype=np.int32) % self._each
        tables: NDArray[np.int32] = num_blocks + slots * self._each + turns
        return tables
