"""The records of a run: times and counts of each request, and the gaps between tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages.requests import CoreOutputs, Finished, Started
from engine.messages.stats import SchedulerStats
from policylab.sim.history import History
from policylab.sim.job import Job
from policylab.sim.jumps.stretch import Stretch
from policylab.sim.kv_groups import KVPeaks

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

TIMES = ("arrival", "scheduled", "first", "last", "deadline", "ttft", "tbt", "longest_gap")
COUNTS = ("num_prompt", "num_output", "num_cached", "num_preempted", "priority")
NAMES = ("request_id", "user", "tier", "program", "adapter", "outcome")

DONE = "done"
REFUSED = "refused"


class Requests:
    """A table of the requests of a run in order of arrival, stored as columns.

    Times are in seconds since the start of the run: ``arrival``, ``scheduled`` (first time),
    ``first`` and ``last`` token, ``deadline``. Durations are in seconds: the limits ``ttft`` and
    ``tbt``, and ``longest_gap`` between two tokens. NaN means missing. ``outcome`` is "done",
    "refused" or another reason for the end."""

    def __init__(self) -> None:
        self._times = {name: np.full(64, np.nan) for name in TIMES}
        self._counts = {name: np.zeros(64, dtype=np.int64) for name in COUNTS}
        self.names: dict[str, list[str]] = {name: [] for name in NAMES}
        self._waits: dict[str, array[float]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, job: Job) -> int:
        """Add a request that has arrived; returns its row in the table."""
        row = self._size
        if row == len(self._times["arrival"]):
            self._grow()
        self._size += 1
        times, counts = self._times, self._counts
        times["arrival"][row] = job.arrival
        if job.deadline is not None:
            times["deadline"][row] = job.arrival + job.deadline
        if job.ttft is not None:
            times["ttft"][row] = job.ttft
        if job.tbt is not None:
            times["tbt"][row] = job.tbt
        counts["num_prompt"][row] = job.num_prompt
        counts["num_output"][row] = job.num_output
        counts["priority"][row] = job.priority
        for name in NAMES[:-1]:
            self.names[name].append(getattr(job, name))
        self.names["outcome"].append("")
        return row

    def end(self, row: int, outcome: str) -> None:
        """Record how the request in this row ended."""
        self.names["outcome"][row] = outcome

    def wait(self, row: int, waits: dict[str, float]) -> None:
        """Record for how many seconds the request in this row waited, by cause."""
        for cause, seconds in waits.items():
            column = self._waits.setdefault(cause, array("d"))
            column.extend([0.0] * (row + 1 - len(column)))
            column[row] = seconds

    def times(self, name: str) -> Floats:
        """The column of this name (one of ``TIMES``) in seconds [requests]."""
        return self._times[name][: self._size]

    def counts(self, name: str) -> NDArray[np.int64]:
        """A column of counts [requests]."""
        return self._counts[name][: self._size]

    def text(self, name: str) -> NDArray[Any]:
        """The column of this name (one of ``NAMES``) as strings [requests]."""
        return np.array(self.names[name], dtype=object)

    @property
    def waits(self) -> dict[str, Floats]:
        """For each cause of waiting, the seconds that each request waited [requests]."""
        found = {}
        for cause, column in sorted(self._waits.items()):
            whole = np.zeros(self._size)
            whole[: len(column)] = column
            found[cause] = whole
        return found

    @property
    def done(self) -> NDArray[np.bool_]:
        """Mask of the requests that finished normally [requests]."""
        return np.array([outcome == DONE for outcome in self.names["outcome"]], dtype=np.bool_)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each request as a dict for JSON, without empty fields."""
        waits = {cause: column.tolist() for cause, column in self.waits.items()}
        times = {name: self.times(name).tolist() for name in TIMES}
        counts = {name: self.counts(name).tolist() for name in COUNTS}
        for row in range(self._size):
            found: dict[str, Any] = {name: self.names[name][row] for name in NAMES}
            found |= {name: column[row] for name, column in counts.items()}
            found |= {n: value for n, column in times.items() if (value := column[row]) == value}
            found["waits"] = {c: value for c, column in waits.items() if (value := column[row])}
            yield {name: value for name, value in found.items() if value not in ("", {})}

    @classmethod
    def read(cls, rows: Sequence[dict[str, Any]]) -> Requests:
        """Build the table from dicts such as the method ``rows`` makes."""
        found = cls()
        while len(found._times["arrival"]) < len(rows):
            found._grow()
        found._size = len(rows)
        for place, row in enumerate(rows):
            for name in TIMES:
                found._times[name][place] = row.get(name, np.nan)
            for name in COUNTS:
                found._counts[name][place] = row.get(name, 0)
            for name in NAMES:
                found.names[name].append(row.get(name, ""))
            found.wait(place, row.get("waits", {}))
        return found

    def _grow(self) -> None:
        for name, column in self._times.items():
            self._times[name] = np.concatenate([column, np.full(len(column), np.nan)])
        for name, counts in self._counts.items():
            self._counts[name] = np.concatenate([counts, np.zeros_like(counts)])


class TokenTimes:
    """Records the times of first and last tokens, and the gaps between tokens.

    Requests that get their tokens in the same steps share one stored gap per step."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._gaps = array("d")  # flat: end, seconds, number of requests
        self._ids: Sequence[str] | None = None
        self._members: Rows = np.empty(0, dtype=np.intp)  # with the latest token
        self._time = 0.0  # time of the latest token
        self._longest = 0.0  # longest gap since the members changed

    @property
    def gaps(self) -> Floats:
        """The gaps between tokens, one per row [n, 3]: end time (seconds), length (seconds), and
        the number of requests with this gap. The array is a view: read it after the last token."""
        return np.frombuffer(self._gaps).reshape(-1, 3)

    def came(self, ids: Sequence[str], places: dict[str, int], time: float) -> None:
        """Record that these requests (by id) got tokens at ``time``, in seconds. ``places``: the
        row of each request in the table, by id."""
        if ids is self._ids:
            gap = time - self._time
            self._longest = max(self._longest, gap)
            self._gaps.extend((time, gap, len(ids)))
        else:
            self._change(ids, places, time)
        self._time = time

    def stretched(self, ids: Sequence[str], places: dict[str, int], ends: Floats) -> None:
        """Record that these requests (by id) got a token at each of the times ``ends``, in seconds.
        ``places``: the row of each request in the table, by id."""
        self.came(ids, places, float(ends[0]))
        if len(ends) > 1:
            rows = np.empty((len(ends) - 1, 3))
            rows[:, 0] = ends[1:]
            rows[:, 1] = gaps = ends[1:] - ends[:-1]
            rows[:, 2] = len(ids)
            self._gaps.frombytes(rows.tobytes())
            self._longest = max(self._longest, float(gaps.max()))
            self._time = float(ends[-1])

    def _change(self, ids: Sequence[str], places: dict[str, int], time: float) -> None:
        """Record that requests other than those of the last call got tokens at ``time``."""
        self.settle()
        self._ids = ids
        self._members = members = np.array([places[name] for name in ids], dtype=np.intp)
        first, last = self._requests.times("first"), self._requests.times("last")
        longest = self._requests.times("longest_gap")
        before = last[members]
        is_first = np.isnan(before)
        first[members[is_first]] = time
        gaps = time - before[~is_first]
        follow = members[~is_first]
        longest[follow] = np.fmax(longest[follow], gaps)
        shared = gaps == time - self._time
        if count := int(np.count_nonzero(shared)):
            self._gaps.extend((time, time - self._time, count))
        for gap in gaps[~shared].tolist():
            self._gaps.extend((time, gap, 1))

    def settle(self) -> None:
        """Write last token time and longest gap to the table, for the latest call's requests."""
        self._requests.times("last")[self._members] = self._time
        if self._longest:
            longest = self._requests.times("longest_gap")
            longest[self._members] = np.fmax(longest[self._members], self._longest)
        self._longest = 0.0

    def forget(self) -> None:
        """Make the next call of ``came`` look up the table rows of its request ids, even if it gets
        the same list as the last call."""
        self._ids = None


class Seen:
    """Collects the records of a run from the core's outputs. ``start``: start of the run on the
    core's clock, in seconds. ``keeps_history``: also record what happened to each request."""

    def __init__(self, start: float = 0.0, *, keeps_history: bool = False) -> None:
        self.requests = Requests()
        self.history = History() if keeps_history else None
        self._tokens = TokenTimes(self.requests)
        self._start = start
        self._living: dict[str, tuple[int, Job]] = {}  # by id: row in the columns, and job
        self._places: dict[str, int] = {}  # rows of unfinished requests

    @property
    def gaps(self) -> Floats:
        """The gaps between tokens, one per row [n, 3]: end time (seconds), length (seconds), and
        the number of requests with this gap."""
        self._tokens.settle()
        return self._tokens.gaps

    def came(self, job: Job) -> None:
        """Record an accepted job."""
        self._places[job.request_id] = place = self._add(job)
        self._living[job.request_id] = (place, job)

    def refused(self, job: Job) -> None:
        """Record a refused job, which may have been recorded as accepted."""
        self._places.pop(job.request_id, None)
        known = self._living.pop(job.request_id, None)
        self.requests.end(self._add(job) if known is None else known[0], REFUSED)

    def _add(self, job: Job) -> int:
        if self.history is not None:
            self.history.came()
        return self.requests.add(job)

    def stretched(self, stretch: Stretch) -> None:
        """Record one token for each request of the stretch in each of its decode steps."""
        self._tokens.stretched(stretch.request_ids, self._places, stretch.ends - self._start)

    def note(self, batches: Iterable[CoreOutputs]) -> list[tuple[Job, float]]:
        """Record the outputs of a step. Returns each job that ended, with its end time
        (seconds)."""
        ended = []
        for batch in batches:
            ids, counts, time = batch.request_ids, batch.counts, batch.time - self._start
            if batch.token_ids:
                got = ids if counts is None else [n for n, c in zip(ids, counts, strict=True) if c]
                self._tokens.came(got, self._places, time)
            if batch.pooled is not None:
                self._tokens.came([ids[row] for row in batch.pooled.rows], self._places, time)
            for started in batch.started:
                self._scheduled(self._places[ids[started.index]], started)
            if batch.finished:
                self._tokens.settle()
                self._tokens.forget()
            ended += [(self._end(ids[end.index], end, time), time) for end in batch.finished]
        return ended

    def _scheduled(self, place: int, started: Started) -> None:
        scheduled = self.requests.times("scheduled")
        if np.isnan(scheduled[place]):
            scheduled[place] = started.scheduled_time - self._start
            self.requests.counts("num_cached")[place] = started.num_cached_tokens
        if self.history is not None:
            self.history.report(place, started.events, started.waits, self._start)

    def _end(self, name: str, end: Finished, time: float) -> Job:
        del self._places[name]
        place, job = self._living.pop(name)
        self.requests.end(place, DONE if end.reason in ("stop", "length") else end.reason)
        self.requests.counts("num_preempted")[place] = end.num_preemptions
        self.requests.wait(place, end.waits)
        if self.history is not None:
            self.history.report(place, end.events, end.waits, self._start)
            self.history.ended(place, time)
        return job


TOTALS = (
    *("num_steps", "num_scheduled_tokens", "prefix_hits", "num_preemptions"),
    *("num_policy_faults", "num_rescued_steps"),
)


def totals_of(stats: SchedulerStats, peaks: KVPeaks) -> dict[str, Any]:
    """The scheduler's counters for a run. ``peaks``: the most KV blocks in use."""
    found: dict[str, Any] = {name: getattr(stats, name) for name in TOTALS}
    found |= {"kv_peak": peaks.usage, "counters": dict(stats.counters)}
    if stats.has_snapshots:
        found["snapshot_peak"] = peaks.snapshots
    found |= {"kv_groups": peaks.groups(), "prefix_missed": dict(stats.prefix_missed)}
    return found | ({"by_default": stats.by_default} if stats.by_default else {})
