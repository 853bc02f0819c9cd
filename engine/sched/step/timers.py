"""Timers of requests: wake one, or end it, at a certain time."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from heapq import heapify, heappop, heappush

from engine.sched.request import Request

FEW = 64  # timers that are kept even if their requests have ended


class TimerKind(Enum):
    """What is due."""

    WAKE = "wake"
    START_BY = "start by"
    END_BY = "end by"


class Timers:
    """Timers, by seconds on the engine's clock. Those of ended requests are dropped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, TimerKind, Request]] = []
        self._num_added = 0  # breaks ties
        self._clean_at = FEW

    def add(self, time: float, kind: TimerKind, req: Request) -> None:
        if len(self._heap) >= self._clean_at:  # most may be of requests that ended long before
            self._heap = [entry for entry in self._heap if not entry[-1].is_finished]
            heapify(self._heap)
            self._clean_at = max(FEW, 2 * len(self._heap))
        heappush(self._heap, (time, req.arrival, self._num_added, kind, req))
        self._num_added += 1

    def add_deadlines(self, req: Request) -> None:
        """Add the deadlines that came with the request."""
        if req.add.queue_deadline is not None:
            self.add(req.add.queue_deadline, TimerKind.START_BY, req)
        if req.add.end_deadline is not None:
            self.add(req.add.end_deadline, TimerKind.END_BY, req)

    def due(self, now: float) -> Iterator[tuple[TimerKind, Request]]:
        """What is due by now, in order of time."""
        while self._heap and self._heap[0][0] <= now:
            *_, kind, req = heappop(self._heap)
            if not req.is_finished:
                yield kind, req

    def next_time(self) -> float | None:
        """The time of the next timer."""
        while self._heap and self._heap[0][-1].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
