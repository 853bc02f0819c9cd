"""Which requests there are, their order and seats, and why they wait.

RankedQueue      requests in order of their ranks
WaitLedger       charges each second of waiting to one cause
Roster           owns membership and seats
RunningRows      the rows that run, and columns of them that seldom change
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import cast, overload

import numpy as np
from numpy.typing import NDArray

from engine.sched.request import Request, Status
from engine.sched.table import Array, Table

Rows = NDArray[np.intp]  # numpy indexes with intp five times faster than with int32
NO_ROWS: Rows = np.empty(0, dtype=np.intp)


def by_rank(req: Request) -> tuple[object, ...]:
    """Sort key: rank, ties by number of arrival."""
    return (*req.rank, req.arrival)


class RankedQueue(Sequence[Request]):
    """A list kept sorted by rank. Smaller goes first.

    Ranks are tuples or, after ``rerank_columns``, numbers in the table: then no key is kept, and
    those few requests that are added or removed between two steps are sought by their ranks.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[object, ...]] | None = []  # None: ranks are in columns
        self._reqs: list[Request] = []
        self._rows: array[int] | None = array("q")  # None until somebody asks for them
        self._packed: Rows | None = NO_ROWS  # the same, while nobody comes or goes
        # By arrival, those that came with tuples since ranks were last given in columns.
        self._late: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Request]:
        """As they are now: an order is read while requests move from queue to queue."""
        return iter(self._reqs.copy())

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._reqs[index]

    @property
    def rows(self) -> Rows:
        """The rows of the table, in order of rank; read-only."""
        if self._rows is None:
            self._rows = array("q", [req.row for req in self._reqs])
        if self._packed is None:
            self._packed = np.array(self._rows, dtype=np.intp)
        return self._packed

    def add(self, req: Request) -> None:
        """Insert at its rank."""
        key = by_rank(req)
        if self._keys is None:
            index = bisect_left(self._reqs, key, key=by_rank)
            self._late[req.arrival] = req
        else:
            index = bisect_left(self._keys, key)
            self._keys.insert(index, key)
        self._reqs.insert(index, req)
        if self._rows is not None:
            self._rows.insert(index, req.row)
        self._packed = None

    def remove(self, req: Request) -> None:
        """Take out; its rank must not have changed since it was added."""
        reqs = self._reqs
        if reqs and reqs[0] is req:
            index = 0
        elif self._keys is None:
            index = bisect_left(reqs, by_rank(req), key=by_rank)
        else:
            index = bisect_left(self._keys, by_rank(req))
        if index == len(reqs) or reqs[index] is not req:
            index = reqs.index(req)
        del reqs[index]
        if self._rows is not None:
            del self._rows[index]
        self._packed = None
        if self._keys is not None:
            del self._keys[index]
        else:
            self._late.pop(req.arrival, None)

    def rerank(self, ranks: Sequence[tuple[object, ...]]) -> None:
        """Give each request, in the order they are in, its new rank, and sort."""
        reqs, keys = self._reqs, []
        for req, rank in zip(reqs, ranks, strict=True):
            req.own_rank = rank
            keys.append((*rank, req.arrival))
        by_arrival: dict[object, Request] = {req.arrival: req for req in reqs}
        keys.sort()
        self._keys = keys
        self._reqs = [by_arrival[key[-1]] for key in keys]
        self._rows = self._packed = None
        self._late.clear()

    def rerank_columns(self, ranks: Sequence[Array], by_row: NDArray[np.object_]) -> None:
        """The same with a column for each place of the ranks. ``by_row``: the requests."""
        if not self._reqs:
            return
        rows = self.rows
        table = self._reqs[0].table
        table.facts.set_ranks(rows, ranks)
        for req in self._late.values() if self._keys is None else self._reqs:
            req.own_rank = None
        self._late.clear()
        self._keys = None
        order = sorted_places([*ranks, table.facts.arrival.all[rows]])
        if (order[1:] > order[:-1]).all():
            return
        self._packed = rows = rows[order]
        self._rows = array("q", rows.astype(np.int64).tobytes())
        self._reqs = by_row[rows].tolist()


def sorted_places(columns: Sequence[Array]) -> Rows:
    """The places in ascending order of their values in the first column, then the second, and so
    on. The last column has no value twice. No column has a NaN.

    Five times as fast as ``lexsort``: most places differ in the first column that varies, and
    unstable sorts of numbers are the fast ones.
    """
    *first, last = columns
    varied = [column for column in first if (column != column[0]).any()]
    column, *others = [*varied, last]
    order = np.argsort(column)
    values = column[order]
    same = values[1:] == values[:-1]
    places = np.arange(len(order))
    for column in others:
        if not same.any():
            break
        tied = np.zeros(len(places), dtype=np.bool_)
        tied[1:] = same
        tied[:-1] |= same
        group = np.cumsum(np.concatenate([[False], ~same]))[tied]
        if group[-1] < 1 << 16:  # sorted by digits
            group = group.astype(np.uint16)
        places = places[tied]
        part = order[places]
        values = column[part]
        within = np.argsort(values)
        within = within[np.argsort(group[within], kind="stable")]
        order[places], values = part[within], values[within]
        same = (values[1:] == values[:-1]) & (group[1:] == group[:-1])
    return order


class Cause:
    """Why a request waits, as logs and outputs say it."""

    TOKENS = "token budget"
    SEATS = "seats"
    BLOCKS = "KV blocks"
    POLICY = "policy order"
    PAUSED = "paused"
    FAILED_LOAD = "failed load"  # within the step: more is to be computed than it was offered
    PREEMPTED = "preempted"  # by whom follows
    NEXT_STEP = "next step"  # it waits only for the next plan


class WaitLedger:
    """Charges the waiting time of requests: each second in the queue to exactly one cause.

    The cost is O(1) a step: between two plans all waiting requests share one cause, whatever closed
    the queue in the earlier one. One running total per cause is kept; a request remembers the
    totals of the moment it entered and takes the difference when it leaves. Only those that were
    offered and refused by themselves, or that wait for something of their own, are charged one by
    one.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}  # of requests that have left the queue
        self._totals: dict[str, float] = {}
        self._cause = Cause.NEXT_STEP  # of the time since the last plan
        self._since = 0.0
        self._refused: dict[int, tuple[Request, str]] = {}  # by row: its own cause since then

    def enter(self, req: Request, now: float, own: str | None = None) -> None:
        """The request begins to wait. With an ``own`` cause, all of the wait is charged to that."""
        req.history.wait_from = now
        req.history.own_cause = own
        if own is None:
            req.history.totals_at_entry = self._totals_at(now)

    def leave(self, req: Request, now: float) -> None:
        """It waits no longer, or for something else."""
        history = req.history
        waited = now - history.wait_from
        if history.own_cause is not None:
            charges = {history.own_cause: waited}
        else:
            before, after = history.totals_at_entry, self._totals_at(now)
            charges = {cause: total - before.get(cause, 0.0) for cause, total in after.items()}
            if req.row in self._refused:
                self._charge_own(req, now)
                del self._refused[req.row]
        for cause, seconds in charges.items():
            if seconds:
                history.waits[cause] = history.waits.get(cause, 0.0) + seconds
        history.queue_seconds += waited

    def close(self, now: float, cause: str, refused: Iterable[tuple[Request, str]]) -> None:
        """A plan was made: until the next one, requests in the queue wait for this cause."""
        for req, _ in self._refused.values():
            self._charge_own(req, now)
        self._totals = self._totals_at(now)
        self._cause, self._since = cause, now
        self._refused = {
            req.row: (req, why)
            for req, why in refused
            if why != cause and req.is_waiting and req.history.own_cause is None
        }

    def add_up(self, waits: dict[str, float]) -> None:
        """A request has ended; its waits go into the sums."""
        for cause, seconds in waits.items():
            # By whom it was preempted is its own history.
            kind = Cause.PREEMPTED if cause.startswith(Cause.PREEMPTED) else cause
            self.sums[kind] = self.sums.get(kind, 0.0) + seconds

    def _totals_at(self, now: float) -> dict[str, float]:
        if now == self._since:
            return self._totals
        totals = dict(self._totals)
        totals[self._cause] = totals.get(self._cause, 0.0) + now - self._since
        return totals

    def _charge_own(self, req: Request, now: float) -> None:
        """Move this interval's charge from the common cause to the request's own."""
        history, (_, cause) = req.history, self._refused[req.row]
        seconds = now - self._since
        for name, change in ((cause, seconds), (self._cause, -seconds)):
            history.waits[name] = history.waits.get(name, 0.0) + change


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
        self.parked_tokens = 0  # of these, of the parked ones
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
        """The requests in rows that are taken."""
        return cast(list[Request], self.by_row[rows].tolist())

    def running_prompts(self) -> list[Request]:
        """Running requests that lack more than one known token."""
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
        self.table.has_output.at[req.row] = 0

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
        self.parked_tokens += req.num_prompt
        if holds:
            self.holding[req.row] = req

    def wake(self, req: Request, now: float) -> None:
        """Back into the queue, at its rank."""
        self.waits.leave(req, now)
        self.waits.enter(req, now)
        self._unpark(req)
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
            self._unpark(req)
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

    def _unpark(self, req: Request) -> None:
        del self.parked[req.request_id]
        self.parked_tokens -= req.num_prompt

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

    def is_whole(self, step: int) -> bool:
        """Is this step in flight, with a row for every request that runs now?"""
        return self._whole.get(step, -1) == self.version

    def _change(self) -> None:
        self.version += 1
        self._columns = None
