"""Records which tokens have KV of the draft model, for each sequence and each block.

The draft model uses the block numbers of the model, but it computes a sequence only to draft for
it. Before that it must compute all tokens that it lacks, even those of a prefix hit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import Column, StepPlan


class DraftWork(NamedTuple):
    """For each sequence, the tokens [start, start + count) that the draft model is to compute."""

    slots: Column
    starts: Column
    counts: Column
    wanted: Column  # number of drafts after the last token
    final: Column  # tokens before this position are final


class KeptStates:
    """Records which copies of a slot's recurrent states the draft model has.

    A pass keeps the states after the last tokens of each sequence in consecutive copies, because
    some of them may be rejected drafts: the next pass begins with an earlier one."""

    def __init__(self, num_slots: int, num_kept: int) -> None:
        """num_kept: states that a pass keeps of a sequence; 0: the draft model has no states."""
        self.num_kept = num_kept
        self.num_copies = num_kept + 1 if num_kept else 0
        self._end: Column = np.zeros(num_slots, dtype=np.int32)  # tokens after the last pass
        self._copy: Column = np.zeros(num_slots, dtype=np.int32)  # that has the state after them
        self._kept: Column = np.zeros(num_slots, dtype=np.int32)  # states of the last pass

    def reachable(self, slots: Column, starts: Column) -> Column:
        """Return the positions ``starts`` from which the draft model is to go on; 0 where the state
        there is not kept."""
        if not self.num_kept:
            return starts
        back = self._end[slots] - starts
        return np.where((back >= 0) & (back < self._kept[slots]), starts, 0).astype(np.int32)

    def copies(self, work: DraftWork) -> Column:
        """The copy with the state before the first token of each sequence of ``work``."""
        back = self._end[work.slots] - work.starts
        found: Column = ((self._copy[work.slots] - back) % self.num_copies).astype(np.int32)
        return found

    def lengths(self, work: DraftWork) -> Column:
        """Number of states that a pass over ``work`` keeps of each sequence."""
        return np.minimum(work.counts, self.num_kept)

    def computed(self, work: DraftWork) -> None:
        """Record that the draft model has computed the tokens of ``work``."""
        if self.num_kept:
            kept = self.lengths(work)
            self._copy[work.slots] = (self.copies(work) + kept) % self.num_copies
            self._end[work.slots] = work.starts + work.counts
            self._kept[work.slots] = kept


class KeptDrafts:
    """Records which tokens of each sequence, and which KV blocks, the draft model has computed."""

    def __init__(
        self, num_slots: int, num_blocks: int, block_size: int, width: int, states: KeptStates
    ) -> None:
        """width: number of entries in a block table; states: of the draft model."""
        self._states = states
        self._block_size = block_size
        self._upto: Column = np.zeros(num_slots, dtype=np.int32)  # computed tokens, by slot
        self._noted: Column = np.zeros(num_slots, dtype=np.int32)  # of these, those in _has_block
        self._num_found: Column = np.zeros(num_slots, dtype=np.int32)  # blocks of the prefix hit
        self._tables: NDArray[np.int32] = np.zeros((num_slots, width), dtype=np.int32)
        self._has_block = np.zeros(num_blocks, dtype=np.bool_)  # all its tokens are computed

    def begin(self, plan: StepPlan) -> None:
        """Prepare for a plan. Blocks of prefix hits keep what the draft model computed, new blocks
        are empty. In each sequence, tokens from its first planned position on (rejected drafts) are
        forgotten."""
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
            if self._states.num_kept:  # blocks have no state with which to continue after them
                self._upto[seq.slot] = self._noted[seq.slot] = 0
                continue
            has = self._has_block[self._tables[seq.slot, :num]]
            is_whole = bool(has.all())
            upto = starts[seq.slot] if is_whole else int(has.argmin()) * self._block_size
            self._upto[seq.slot] = self._noted[seq.slot] = upto

    def work(self, rows: DraftWork, limit: int, budget: int) -> DraftWork:
        """Choose the tokens that the draft model computes after a step, within a ``budget`` of
        tokens. rows: the tokens of the step; limit: first position that the draft model cannot
        compute.

        If the rest of the budget is too small for a sequence, it gets no drafts and computes what
        fits. Call ``computed`` afterwards."""
        ends = rows.starts + rows.counts
        # All rows that want drafts get as many as the row that wants most.
        reaches = ends + rows.wanted.max(initial=0) <= limit
        wanted = np.where(reaches, rows.wanted, 0)
        starts = self._states.reachable(rows.slots, np.minimum(self._upto[rows.slots], rows.starts))
        # Including the sampled token.
        counts = np.maximum(np.minimum(ends + (wanted > 0), limit) - starts, 0)
        before = np.cumsum(counts) - counts
        given = np.clip(budget - before, 0, counts)
        wanted = np.where(given == counts, wanted, 0)
        works = given > 0
        columns = (rows.slots, starts, given, wanted, rows.final)
        return DraftWork(*(column[works].astype(np.int32) for column in columns))

    def computed(self, work: DraftWork) -> None:
        """Record that the draft model has computed the tokens of ``work``."""
        self._states.computed(work)
        upto = work.starts + work.counts - (work.wanted > 0)
        self._upto[work.slots] = upto
        # Whether drafts are accepted is known a step later.
        first = np.minimum(self._noted[work.slots], work.starts)
        certain = np.minimum(upto, work.final)
        self._record(work.slots, first, certain)
        self._noted[work.slots] = certain

    def _record(self, slots: Column, first: Column, end: Column) -> None:
        """Record which KV blocks the draft model has completed by computing the tokens [first, end)
        of each slot. The tokens must be final."""
        size = self._block_size
        columns = (slots.tolist(), (first // size).tolist(), (end // size).tolist())
        for slot, begin, upto in zip(*columns, strict=True):
            if upto > begin:
                self._has_block[self._tables[slot, begin:upto]] = True


def first_group(plan: StepPlan) -> tuple[Column, Column, Column]:
    """Return a plan's changes to block tables of the first KV group: slots, table indices, block
    numbers."""
    columns = (plan.block_slots, plan.block_indices, plan.block_ids)
    if plan.block_groups is None:
        return columns
    is_first = plan.block_groups == 0
    slots, indices, blocks = (column[is_first] for column in columns)
    return slots, indices, blocks


class SpareBlocks:
    """Spare KV blocks outside the pool, into which draft tokens are computed that do not fit into a
    sequence's own blocks."""

    def __init__(self, num_slots: int, num_drafts: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._each = -(-(num_drafts - 1) // block_size) + 1  # drafts may begin anywhere in a block

    @property
    def num_blocks(self) -> int:
        return self._num_slots * self._each

    def tables(self, num_blocks: int, width: int) -> NDArray[np.int32]:
        """Block tables [slots, width] that contain only spare blocks, whose numbers begin at
        ``num_blocks``. A table repeats its slot's few blocks in turn."""
        slots = np.arange(self._num_slots, dtype=np.int32)[:, None]
        turns = np.arange(width, dtype=np.int32) % self._each
        tables: NDArray[np.int32] = num_blocks + slots * self._each + turns
        return tables
