"""One step while it is being planned: budgets, grants and, at the end, the plan."""

from __future__ import annotations

import numpy as np

from engine.kv.manager import KVManager
from engine.messages.step import EMPTY, NewSeq, StepPlan
from engine.sched import waits
from engine.sched.request import Request, Status
from engine.sched.roster import Roster, Rows
from engine.sched.table import Table

NO_DELTAS = np.empty((0, 3), dtype=np.int32)


class Step:
    """What was decided so far. A request is offered once; granted or not, it is then considered."""

    def __init__(self, index: int, max_tokens: int, roster: Roster) -> None:
        self.index = index
        self.tokens_left = max_tokens
        self.max_seqs = roster.num_seats
        self.admission_open = True
        self.grants: list[tuple[Request, int]] = []
        self.new: list[Request] = []
        self.preempted: list[Request] = []
        self.silent: set[int] = set()  # rows whose tokens end before a token is due
        self.plain_rows: Rows = EMPTY
        self.plain: list[int] = []  # rows granted by ``Bulk.grant_one``
        self.closed_by = ""  # why admission was closed
        self.refused: list[tuple[Request, str]] = []  # waiting ones refused by themselves
        self._roster = roster
        self._next = 0  # index in the queue from which to look for one not offered yet

    @property
    def is_full(self) -> bool:
        return self.tokens_left <= 0

    @property
    def has_grants(self) -> bool:
        return bool(self.grants or self.plain) or self.plain_rows.size > 0

    @property
    def num_free_seats(self) -> int:
        """Seats that waiting requests may take in this step."""
        free = self._roster.num_free_seats
        return min(free, max(0, self.max_seqs - (self._roster.num_seats - free)))

    def next_waiting(self) -> Request | None:
        """The best waiting request that was not offered in this step, while admission is open."""
        waiting = self._roster.waiting
        while self.admission_open and self._next < len(waiting):
            req = waiting[self._next]
            if req.considered != self.index:
                return req
            self._next += 1
        return None

    def offer(self, req: Request) -> bool:
        """Mark as considered. False if it was before, is parked, or waits while admission is
        closed."""
        considered = req.table.considered.at
        if considered[req.row] == self.index:
            return False
        if req.status is not Status.RUNNING and not (self.admission_open and req.is_waiting):
            return False
        considered[req.row] = self.index
        return True

    def reopen(self, index: int, max_tokens: int) -> None:
        """Begin again under a new index: everybody may be offered tokens once more."""
        self.index, self.tokens_left, self._next = index, max_tokens, 0
        self.max_seqs = self._roster.num_seats
        self.admission_open, self.closed_by = True, ""
        self.preempted.clear()
        self.refused.clear()

    def closing_cause(self) -> str:
        """Why those who still wait were not admitted."""
        if self.closed_by:
            return self.closed_by
        if self.is_full:
            return waits.TOKENS
        if len(self.refused) >= len(self._roster.waiting):  # each for a reason of its own
            return waits.NEXT_STEP
        return waits.POLICY if self.num_free_seats else waits.SEATS

    def close(self, cause: str) -> None:
        """Nobody else is admitted in this step."""
        if self.admission_open:
            self.admission_open, self.closed_by = False, cause

    def skip(self, req: Request, cause: str) -> None:
        """This waiting request alone is passed over."""
        self.refused.append((req, cause))

    def record(self, req: Request, num_tokens: int, *, is_new: bool, samples: bool) -> None:
        """The request computes this many tokens."""
        self.tokens_left -= num_tokens
        self.grants.append((req, num_tokens))
        if is_new:
            self.new.append(req)
        if not samples:
            self.silent.add(req.row)


def canonical_rows(step: Step, table: Table) -> tuple[Rows, Rows]:
    """Rows and token counts: plain rows by number, then the others in order of grant.

    Plain is a row of one token that is not new and not watched, however it was granted; so planning
    in bulk and one by one give the same plan.
    """
    if not step.grants:
        return step.plain_rows, np.ones(len(step.plain_rows), dtype=np.int32)
    new = {req.row for req in step.new}
    plain, others = step.plain_rows.tolist(), []
    for req, count in step.grants:
        if count == 1 and req.row not in new and not table.watched.at[req.row]:
            plain.append(req.row)
        else:
            others.append((req.row, count))
    plain.sort()
    rows = np.array(plain + [row for row, _ in others], dtype=np.int32)
    counts = np.ones(len(rows), dtype=np.int32)
    if others:
        counts[len(plain) :] = [count for _, count in others]
    return rows, counts


def seal(step: Step, roster: Roster, kv: KVManager) -> StepPlan:
    """The plan of a step, and what the worker must be told since the last one.

    Counts are advanced already, so a row's first token is at ``num_computed - count``.
    """
    table = roster.table
    rows, counts = canonical_rows(step, table)
    samples = np.ones(len(rows), dtype=np.int32)
    if step.silent:
        samples[np.isin(rows, list(step.silent))] = 0
    grown = kv.drain()
    deltas = np.array(grown, dtype=np.int32) if grown else NO_DELTAS
    freed, roster.freed_slots = roster.freed_slots, []
    return StepPlan(
        step=step.index,
        rows=rows,
        slots=table.slot.all[rows],
        generations=table.generation.all[rows],
        starts=table.num_computed.all[rows] - counts,
        counts=counts,
        samples=samples,
        new=[new_seq(req) for req in step.new],
        block_slots=table.slot.all[deltas[:, 0]],
        block_indices=deltas[:, 1],
        block_ids=deltas[:, 2],
        freed_slots=freed,
        num_tokens=int(counts.sum()),
        block_groups=deltas[:, 3] if deltas.shape[1] > 3 else None,
    )


def new_seq(req: Request) -> NewSeq:
    """What the worker must know of a request that takes a seat."""
    return NewSeq(
        request_id=req.request_id,
        slot=req.slot,
        token_ids=req.tokens.tolist(),
        num_prompt=req.num_prompt,
        params=req.params,
        seed=req.add.seed,
        stop_token_ids=req.stop_ids,
        bad_words_ids=req.add.bad_words_ids,
    )
