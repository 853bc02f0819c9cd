"""The unfinished requests: their order, their slots, and why they wait.

RankedQueue      a list of requests, sorted by rank
WaitLedger       charges each second of waiting to one cause
Roster           which requests wait, run or are parked, and their slots
RunningRows      the rows of the running requests, with arrays that are reused between steps
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from engine.sched.request import Request, Status
from engine.sched.table import Array, Table

Rows = NDArray[np.intp]  # numpy indexes with intp five times faster than with int32
NO_ROWS: Rows = np.empty(0, dtype=np.intp)
MOST_SEEN = 64  # requests at the head of the queue whose own causes are counted


def by_rank(req: Request) -> tuple[object, ...]:
    """The sort key of a request: its rank, then its arrival number."""
    return (*req.rank, req.arrival)


class RankedQueue(Sequence[Request]):
    """Requests sorted by rank, smallest first.

    The ranks are tuples or, after ``rerank_columns``, columns of the table.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[object, ...]] | None = []  # None: ranks are in columns
        self._reqs: list[Request] = []
        self._rows: array[int] | None = array("q")  # None until ``rows`` is read
        self._packed: Rows | None = NO_ROWS  # ``_rows`` as numpy array, until the queue changes
        # By arrival: requests added with a tuple since the ranks were last set as arrays.
        self._late: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy, since requests may leave the queue during the iteration."""
        return iter(self._reqs.copy())

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._reqs[index]

    @property
    def rows(self) -> Rows:
        """The table rows of the requests, in rank order; read-only."""
        if self._rows is None:
            self._rows = array("q", [req.row for req in self._reqs])
        if self._packed is None:
            self._packed = np.array(self._rows, dtype=np.intp)
        return self._packed

    def add(self, req: Request) -> None:
        """Insert a request at its rank."""
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
        """Remove a request. Its rank must not have changed since it was added."""
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
        """Set new ranks and sort. ``ranks``: one rank per request, in the queue's present order."""
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
        """Set new ranks from arrays, and sort the queue. ``ranks[k]``: element k of each request's
        rank, in the queue's present order; ``by_row``: the request in each row of the table."""
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
    """Indices that sort by the first column, equal values by the second, and so on.

    The values of the last column must all differ; NaN is not allowed. Five times as fast as
    ``np.lexsort``.
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
        if group[-1] < 1 << 16:  # numpy uses radix sort for 16 bits
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
    """Causes for which a request waits, as logs and outputs name them."""

    TOKENS = "token budget"
    SEATS = "seats"
    BLOCKS = "KV blocks"
    POLICY = "policy order"
    PAUSED = "paused"
    PREEMPTED = "preempted"  # followed by the cause of the preemption
    NEXT_STEP = "next step"  # it waits for the next plan only


def kind_of(cause: str) -> str:
    """A cause without the name of the request or resource that caused a preemption."""
    return Cause.PREEMPTED if cause.startswith(Cause.PREEMPTED) else cause


class WaitLedger:
    """Attributes each second that a request waits in the queue to one cause.

    Between two plans all waiting requests share one cause: why the earlier plan started no more of
    them, e.g. no free seat. Requests that were refused individually have causes of their own.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}  # seconds by cause, over requests that have ended
        self._totals: dict[str, float] = {}
        self._cause = Cause.NEXT_STEP  # the common cause since the last plan
        self._since = 0.0
        self._refused: dict[int, tuple[Request, str]] = {}  # by row: individual causes since then

    def enter(self, req: Request, now: float, own: str | None = None) -> None:
        """Record that a request starts to wait. ``own``: the cause of its wait; ``None``: the cause
        that all queued requests share, which may change with each plan."""
        req.history.wait_from = now
        req.history.own_cause = own
        if own is None:
            req.history.totals_at_entry = self._totals_at(now)

    def leave(self, req: Request, now: float) -> None:
        """Record that a request stops waiting, or starts to wait for another cause."""
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

    @property
    def cause(self) -> str:
        """The cause that all queued requests share since the last plan."""
        return self._cause

    def cause_of(self, req: Request) -> str:
        """Why a queued or parked request waits now."""
        own = self._refused[req.row][1] if req.row in self._refused else self._cause
        return req.history.own_cause or own

    def waits_of(self, req: Request, now: float) -> dict[str, float]:
        """Seconds by cause that a queued or parked request has waited until now."""
        history = req.history
        waits = defaultdict(float, history.waits)
        if history.own_cause is not None:
            waits[history.own_cause] += now - history.wait_from
            return dict(waits)
        for cause, total in self._totals_at(now).items():
            waits[cause] += total - history.totals_at_entry.get(cause, 0.0)
        if req.row in self._refused:
            waits[self._refused[req.row][1]] += now - self._since
            waits[self._cause] -= now - self._since
        return {cause: seconds for cause, seconds in waits.items() if seconds > 0}

    def close(self, now: float, cause: str, refused: Iterable[tuple[Request, str]]) -> None:
        """Set the cause that all queued requests share until the next plan, except ``refused``:
        pairs of a request and its own cause."""
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
        """Add the waits of an ended request, in seconds by cause, to ``sums``."""
        for cause, seconds in waits.items():
            kind = kind_of(cause)
            self.sums[kind] = self.sums.get(kind, 0.0) + seconds

    def _totals_at(self, now: float) -> dict[str, float]:
        if now == self._since:
            return self._totals
        totals = dict(self._totals)
        totals[self._cause] = totals.get(self._cause, 0.0) + now - self._since
        return totals

    def _charge_own(self, req: Request, now: float) -> None:
        """Charge the time since the last plan to a request's own cause, not the shared one."""
        history, (_, cause) = req.history, self._refused[req.row]
        seconds = now - self._since
        for name, change in ((cause, seconds), (self._cause, -seconds)):
            history.waits[name] = history.waits.get(name, 0.0) + change


class Roster:
    """The waiting, running and parked requests. Each running one has a slot of the worker (a
    seat)."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_seats = max_num_seqs
        self.table = Table()
        self.by_id: dict[str, Request] = {}
        self.by_row: NDArray[np.object_] = np.full(self.table.num_rows, None)
        self.running = RankedQueue()
        self.waiting = RankedQueue()
        self.parked: dict[str, Request] = {}
        self.waits = WaitLedger()
        self.queued_tokens = 0  # prompt tokens of waiting and parked requests
        self.parked_tokens = 0  # prompt tokens of parked requests
        self.freed_slots: list[int] = []  # to be sent to the worker
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.running_rows = RunningRows(self.table)
        self.prompts: dict[int, Request] = {}  # by row: running requests that may still prefill

    @property
    def num_free_seats(self) -> int:
        return len(self._free_slots)

    @property
    def num_queued(self) -> int:
        """Number of waiting and parked requests."""
        return len(self.waiting) + len(self.parked)

    def num_waiting_by_cause(self) -> dict[str, int]:
        """Number of waiting and parked requests, by why they wait now. Only the head of the queue
        is looked at: others count for the cause that the queue shares."""
        if not self.num_queued:
            return {}
        seen = [*self.waiting[:MOST_SEEN], *islice(self.parked.values(), MOST_SEEN)]
        causes = Counter(kind_of(self.waits.cause_of(req)) for req in seen)
        if rest := self.num_queued - len(seen):
            causes[self.waits.cause] += rest
        return dict(causes)

    def requests(self, rows: Rows) -> list[Request]:
        """The requests in these rows of the request table."""
        return cast(list[Request], self.by_row[rows].tolist())

    def running_prompts(self) -> list[Request]:
        """Running requests that have more than one token to compute (prefill)."""
        if not self.prompts:
            return []
        for req in list(self.prompts.values()):
            if req.num_tokens - req.num_computed <= 1:
                del self.prompts[req.row]
        return list(self.prompts.values())

    def add(self, req: Request, now: float) -> None:
        """Add a new request, whose rank must be set, to the queue."""
        self._enqueue(req)
        self.waits.enter(req, now)
        if missing := self.table.num_rows - len(self.by_row):
            self.by_row = np.concatenate([self.by_row, np.full(missing, None)])
        self.by_row[req.row] = req
        self.by_id[req.request_id] = req

    def seat(self, req: Request, now: float) -> None:
        """Start a queued request: give it a slot of the worker."""
        self.waits.leave(req, now)
        self._dequeue(req)
        req.move(Status.RUNNING)
        self.running.add(req)
        self.running_rows.add(req.row)
        self.prompts[req.row] = req
        self.table.slot.at[req.row] = self._free_slots.pop()
        self.table.has_output.at[req.row] = 0

    def unseat(self, req: Request, now: float, cause: str) -> None:
        """Move a running request back to the queue, where it waits for ``cause``."""
        self.waits.enter(req, now, own=cause)
        self._leave_seat(req)
        req.move(Status.WAITING)
        self._enqueue(req)

    def park(self, req: Request, now: float, cause: str) -> None:
        """Take a request out of the queue until ``wake``."""
        self.waits.leave(req, now)
        self.waits.enter(req, now, own=cause)
        self.waiting.remove(req)
        req.move(Status.PARKED)
        self.parked[req.request_id] = req
        self.parked_tokens += req.num_prompt

    def wake(self, req: Request, now: float) -> None:
        """Return a parked request to the queue."""
        self.waits.leave(req, now)
        self.waits.enter(req, now)
        self._unpark(req)
        req.move(Status.WAITING)
        self.waiting.add(req)

    def rank_again(self, req: Request, rank: tuple[Any, ...]) -> None:
        """Set a new rank of a waiting or parked request."""
        if not req.is_waiting:
            req.rank = rank
            return
        self.waiting.remove(req)
        req.rank = rank
        self.waiting.add(req)

    def finish(self, req: Request, now: float) -> None:
        """Remove a finished request. Its row is freed once no step in flight contains it."""
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
        req.move(Status.FINISHED)
        self.table.alive.at[req.row] = 0
        del self.by_id[req.request_id]
        if self.table.in_flight.at[req.row] == 0:
            self.retire(req.row)

    def retire(self, row: int) -> None:
        """Free the row of a finished request that no step in flight contains any more."""
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
    """The table rows of the running requests, in ascending order, and values of these rows that
    stay constant while the same requests run."""

    def __init__(self, rows: Rows, table: Table) -> None:
        self.rows = rows
        self.slots = table.slot.all[rows]
        self.generations = table.generation.all[rows]
        self.limits = table.limit.all[rows]


class RunningRows:
    """The table rows of the running requests; ``list`` has them in ascending order.

    ``version`` changes when a request starts or stops running. It is recorded for each step whose
    plan contains all running requests (a full step). If it is still the same when the step's result
    arrives, arrays cached for these requests can be reused.
    """

    def __init__(self, table: Table) -> None:
        self.list: list[int] = []
        self.version = 0
        self._table = table
        self._columns: RunningColumns | None = None
        self._full_steps: dict[int, int] = {}  # full steps in flight -> version when planned

    def add(self, row: int) -> None:
        insort(self.list, row)
        self._change()

    def remove(self, row: int) -> None:
        del self.list[bisect_left(self.list, row)]
        self._change()

    @property
    def columns(self) -> RunningColumns:
        """Arrays with values of all running requests, cached until ``version`` changes."""
        if self._columns is None:
            self._columns = RunningColumns(np.array(self.list, dtype=np.intp), self._table)
        return self._columns

    def sorted(self, rows: list[int]) -> Rows:
        """Sort ``rows``, all of which belong to running requests, in ascending order."""
        if len(rows) == len(self.list):
            return self.columns.rows
        return np.array(sorted(rows), dtype=np.intp)

    def add_full_step(self, step: int) -> None:
        """Record that this step's plan contains all running requests."""
        self._full_steps[step] = self.version

    def pop_full_step(self, step: int) -> bool:
        """Forget a finished step. True if exactly the requests that run now were in its plan."""
        return self._full_steps.pop(step, -1) == self.version

    def is_full_step(self, step: int) -> bool:
        """True if this step is in flight and contains exactly the requests running now."""
        return self._full_steps.get(step, -1) == self.version

    def _change(self) -> None:
        self.version += 1
        self._columns = None
