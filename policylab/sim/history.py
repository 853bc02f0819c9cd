"""The events, stays in the queue and steps of each request of a run.

The core reports a request's events and total waits by cause with the first output after each start,
and at its end. The increase of the waits between two reports is divided among the stays in the
queue that ended in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import StepPlan

Cells = NDArray[np.int64]
Event = tuple[str, float]

PREEMPTED = "preempted"


class Stay(NamedTuple):
    """One stay of a request in the queue. Times are seconds since the start of the run."""

    start: float
    end: float
    causes: dict[str, float]
    """Seconds waited by cause, the largest first."""
    is_again: bool = False
    """True if the stay followed a preemption of the request."""

    @property
    def cause(self) -> str:
        """The cause of most of the waiting time in this stay; empty if no cause is known."""
        return next(iter(self.causes), "")


class History:
    """Events, stays in the queue and computed steps of each request, in order of arrival.

    ``work`` [n, 4]: spans of consecutive steps in which a request computed the same number of
    tokens: index of the request, first step, last step, tokens per step. In steps without a span, a
    request computed nothing.
    """

    def __init__(self) -> None:
        self.events: list[list[Event]] = []
        """Events "queued", "scheduled", "preempted", in seconds since the start of the run."""
        self.stays: list[list[Stay]] = []
        self.work: Cells = np.empty((0, 4), dtype=np.int64)
        self._known: dict[
            int, tuple[int, dict[str, float]]
        ] = {}  # of unfinished requests: number of events, waits

    def __len__(self) -> int:
        return len(self.events)

    def came(self) -> None:
        """Add an empty entry for the next request that arrives, accepted or refused."""
        self.events.append([])
        self.stays.append([])

    def report(
        self, place: int, events: Sequence[Event], waits: Mapping[str, float], start: float
    ) -> None:
        """Record what the core reports about the request at index ``place``: all its events so far,
        and its total waits (seconds) by cause. ``start``: start of the run on the events' clock."""
        num_known, before = self._known.get(place, (0, {}))
        own = self.events[place]
        own += [(name, time - start) for name, time in events[num_known:]]
        added = {c: s - before.get(c, 0.0) for c, s in waits.items() if s > before.get(c, 0.0)}
        begun = list(stays_of(own))
        fresh = begun[len(self.stays[place]) :]
        self.stays[place] += _shared_out(fresh, added)
        self._known[place] = (len(events), dict(waits))

    def ended(self, place: int, time: float) -> None:
        """Record the end of the request at index ``place`` and of its stay in the queue, if any."""
        own, stays = self.events[place], self.stays[place]
        if own and own[-1][0] != "scheduled":
            _, waits = self._known.get(place, (0, {}))
            rest = dict(waits)
            for stay in stays:
                for cause, seconds in stay.causes.items():
                    rest[cause] = rest.get(cause, 0.0) - seconds
            name, since = own[-1]
            causes = _sorted({cause: seconds for cause, seconds in rest.items() if seconds > 0})
            stays.append(Stay(since, time, causes, name == PREEMPTED))
        self._known.pop(place, None)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each request's events and stays in the queue as plain data, for ``read``."""
        for place, (events, stays) in enumerate(zip(self.events, self.stays, strict=True)):
            yield {"place": place, "events": events, "stays": [list(stay) for stay in stays]}

    @classmethod
    def read(cls, rows: Iterable[dict[str, Any]], work: Sequence[Sequence[int]]) -> History:
        """Rebuild a history. ``rows``: what the method ``rows`` yielded; ``work``: the spans."""
        found = cls()
        for row in rows:
            found.events.append([(name, time) for name, time in row["events"]])
            found.stays.append([Stay(*stay) for stay in row["stays"]])
        found.work = np.array(work, dtype=np.int64).reshape(-1, 4)
        return found


def stays_of(events: Iterable[Event]) -> Iterator[Stay]:
    """Yields the stays in the queue that begin and end within these events, with no causes."""
    since: Event | None = None
    for event in events:
        if event[0] == "scheduled" and since is not None:
            yield Stay(since[1], event[1], {}, since[0] == PREEMPTED)
            since = None
        elif event[0] != "scheduled":
            since = event


def _shared_out(stays: list[Stay], added: dict[str, float]) -> list[Stay]:
    """Divide the waits since the last report among the stays in the queue that ended since. added:
    seconds by cause. A stay after a preemption gets the preemption cause whose wait is closest to
    its length; the last stay gets all that remain. Other stays get the other causes."""
    found = []
    for place, stay in enumerate(stays):
        names = [cause for cause in added if cause.startswith(PREEMPTED) is stay.is_again]
        if stay.is_again and place < len(stays) - 1:
            length = stay.end - stay.start
            names = sorted(names, key=lambda cause: abs(added[cause] - length))[:1]
            shares = {cause: min(added[cause], length) for cause in names}
        else:
            shares = {cause: added[cause] for cause in names}
        for cause, seconds in shares.items():
            added[cause] -= seconds
        shares = {cause: seconds for cause, seconds in shares.items() if seconds > 0}
        found.append(stay._replace(causes=_sorted(shares)))
    return found


def _sorted(causes: dict[str, float]) -> dict[str, float]:
    return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))


class ProcessedWork:
    """Records, for each request, the spans of steps in which it computed the same number of tokens.

    Recording a step takes only a few operations on arrays with an entry per slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._ids: list[str] = [""] * num_slots
        self._counts = np.zeros(num_slots, dtype=np.int64)  # tokens of the latest step, by slot
        self._since = np.zeros(num_slots, dtype=np.int64)
        self._step = 0
        self._spans: list[tuple[str, int, int, int]] = []

    def computed(self, plan: StepPlan) -> None:
        """Record how many tokens each request computes in the step of this plan."""
        for new in plan.new:
            self._close([new.slot])
            self._ids[new.slot] = new.request_id
        if not plan.num_tokens:
            return
        counts = np.zeros_like(self._counts)
        counts[plan.slots] = plan.counts
        changed = np.flatnonzero(counts != self._counts)
        self._close(changed.tolist())
        self._counts = counts
        self._since[changed] = self._step
        self._step += 1

    def _close(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if count := int(self._counts[slot]):
                first = int(self._since[slot])
                self._spans.append((self._ids[slot], first, self._step - 1, count))
                self._counts[slot] = 0

    def spans(self, places: Mapping[str, int]) -> Cells:
        """Returns the spans of all requests, in order of their first step, as rows of
        ``History.work``. ``places``: index of each request, by request id."""
        self._close(range(len(self._ids)))
        found = [(places[name], *span) for name, *span in self._spans]
        found.sort(key=lambda span: (span[1], span[0]))
        return np.array(found, dtype=np.int64).reshape(-1, 4)
