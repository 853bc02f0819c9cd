"""Which requests there are, by id, by row and by status, and which seats they have."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.sched.request import Request, Status
from engine.sched.state.queues import RankedQueue
from engine.sched.state.table import Table
from engine.sched.state.waits import WaitLedger

Rows = NDArray[np.intp]  # numpy indexes with intp five times faster than with int32
NO_ROWS: Rows = np.empty(0, dtype=np.intp)


class Roster:
    """Owns membership and seats. A seat is a slot in the worker's tables."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_seats = max_num_seqs
        self.table = Table()
        self.by_id: dict[str, Request] = {}
        self.by_row: NDArray[np.object_] = np.full(self.table.num_rows, None)
        self.running = RankedQueue()
        self.waiting = RankedQueue()
        self.parked: dict[str, Request] = {}
        self.holding: dict[int, Request] = {}  # by row; not running, yet they hold blocks
        self.waits = WaitLedger()
        self.queued_tokens = 0  # prompt tokens of waiting and parked requests
        self.freed_slots: list[int] = []  # not sent to the worker yet
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.running_rows = RunningRows(self.table)
        self.prompts: dict[int, Request] = {}  # by row: seated and perhaps not a decode yet

    @property
    def num_free_seats(self) -> int:
        return len(self._free_slots)

    @property
    def num_queued(self) -> int:
        """Requests without a seat."""
        return len(self.waiting) + len(self.parked)

    def waiting_holders(self) -> list[Request]:
        """Waiting requests that hold blocks; those of parked ones are being filled."""
        return [req for req in self.holding.values() if req.is_waiting]

    def lowest_holder(self) -> Request | None:
        """The request that loses its blocks first as the last resort."""
        if holders := self.waiting_holders():
            return holders[-1]
        return self.running[len(self.running) - 1] if len(self.running) else None

    def requests(self, rows: Rows) -> list[Request]:
        """The requests behind rows that are taken."""
        return cast(list[Request], self.by_row[rows].tolist())

    def running_prompts(self) -> list[Request]:
        """Running requests more than one known token behind."""
        if not self.prompts:
            return []
        for req in list(self.prompts.values()):
            if req.num_tokens - req.num_computed <= 1:
                del self.prompts[req.row]
        return list(self.prompts.values())

    def add(self, req: Request, now: float) -> None:
        """A new request joins the queue; its rank is known."""
        self._enqueue(req)
        self.waits.enter(req, now)
        if missing := self.table.num_rows - len(self.by_row):
            self.by_row = np.concatenate([self.by_row, np.full(missing, None)])
        self.by_row[req.row] = req
        self.by_id[req.request_id] = req

    def seat(self, req: Request, now: float) -> None:
        """From the queue to a seat."""
        self.waits.leave(req, now)
        self._dequeue(req)
        self.holding.pop(req.row, None)
        req.move(Status.RUNNING)
        self.running.add(req)
        self.running_rows.add(req.row)
        self.prompts[req.row] = req
        self.table.slot.at[req.row] = self._free_slots.pop()
        self.table.told.at[req.row] = 0

    def unseat(self, req: Request, now: float, cause: str) -> None:
        """From its seat back to the queue, at its rank. The wait is charged to ``cause``."""
        self.waits.enter(req, now, own=cause)
        self._leave_seat(req)
        req.move(Status.WAITING)
        self._enqueue(req)

    def park(self, req: Request, now: float, cause: str, *, holds: bool = False) -> None:
        """Out of the queue until ``wake``; ``holds``: it has blocks."""
        self.waits.leave(req, now)
        self.waits.enter(req, now, own=cause)
        self.waiting.remove(req)
        req.move(Status.PARKED)
        self.parked[req.request_id] = req
        if holds:
            self.holding[req.row] = req

    def wake(self, req: Request, now: float) -> None:
        """Back into the queue, at its rank."""
        self.waits.leave(req, now)
        self.waits.enter(req, now)
        del self.parked[req.request_id]
        req.move(Status.WAITING)
        self.waiting.add(req)

    def finish(self, req: Request, now: float) -> None:
        """Remove the request; only its row stays until its last step in flight has retired."""
        if req.status is not Status.RUNNING:
            self.waits.leave(req, now)
        self.waits.add_up(req.history.waits)
        if req.status is Status.RUNNING:
            self._leave_seat(req)
        elif req.status is Status.WAITING:
            self._dequeue(req)
        else:
            del self.parked[req.request_id]
            self.queued_tokens -= req.num_prompt
        self.holding.pop(req.row, None)
        req.move(Status.FINISHED)
        self.table.alive.at[req.row] = 0
        del self.by_id[req.request_id]
        if self.table.in_flight.at[req.row] == 0:
            self.retire(req.row)

    def retire(self, row: int) -> None:
        """Free the row of a finished request, which no step in flight uses any more."""
        self.by_row[row] = None
        self.table.give_back(row)

    def _enqueue(self, req: Request) -> None:
        self.waiting.add(req)
        self.queued_tokens += req.num_prompt

    def _dequeue(self, req: Request) -> None:
        self.waiting.remove(req)
        self.queued_tokens -= req.num_prompt

    def _leave_seat(self, req: Request) -> None:
        self.running.remove(req)
        self.running_rows.remove(req.row)
        self.prompts.pop(req.row, None)
        slot = self.table.slot.at[req.row]
        self.table.slot.at[req.row] = -1
        self._free_slots.append(slot)
        self.freed_slots.append(slot)


class RunningColumns:
    """Rows in ascending order, and what does not change while the same requests run."""

    def __init__(self, rows: Rows, table: Table) -> None:
        self.rows = rows
        self.slots = table.slot.all[rows]
        self.generations = table.generation.all[rows]
        self.limits = table.limit.all[rows]


class RunningRows:
    """Running requests, by row. ``list`` is ascending and read-only.

    ``version`` changes whenever a request takes or leaves a seat. A plan with a row for each of
    them is noted with it, so that its result can tell whether they are still the same.
    """

    def __init__(self, table: Table) -> None:
        self.list: list[int] = []
        self.version = 0
        self._table = table
        self._columns: RunningColumns | None = None
        self._whole: dict[int, int] = {}  # steps in flight that have all rows -> version then

    def add(self, row: int) -> None:
        insort(self.list, row)
        self._change()

    def remove(self, row: int) -> None:
        del self.list[bisect_left(self.list, row)]
        self._change()

    @property
    def columns(self) -> RunningColumns:
        """The same object until the next request takes or leaves a seat."""
        if self._columns is None:
            self._columns = RunningColumns(np.array(self.list, dtype=np.intp), self._table)
        return self._columns

    def sorted(self, rows: list[int]) -> Rows:
        """Some of the rows in ascending order."""
        if len(rows) == len(self.list):
            return self.columns.rows
        return np.array(sorted(rows), dtype=np.intp)

    def note_whole(self, step: int) -> None:
        """The plan of this step has ``columns.rows``; its result will come."""
        self._whole[step] = self.version

    def take_whole(self, step: int) -> bool:
        """Does the plan of this step have a row for every request that runs now? Called once."""
        return self._whole.pop(step, -1) == self.version

    def _change(self) -> None:
        self.version += 1
        self._columns = None
