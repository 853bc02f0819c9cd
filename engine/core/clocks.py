"""The clock of a core on another machine, in seconds of the client's own.

Both are CLOCK_MONOTONIC, which counts from the start of each machine. The core tells its time in
each ``welcome`` and ``submitted``; it was read between the question and the answer, so

    told - heard  <=  core's clock - own clock  <=  told - asked

Each exchange narrows these bounds, and the drift of two clocks widens them again in between. On one
machine the true difference is nothing; as long as the bounds allow that, it is taken, and no time
is changed at all.

Durations in place of times would need no measuring, but count from when a message is read: a core
reads between two steps, so deadlines and arrivals would move by up to a step.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from engine.messages.outputs import CoreOutputs
from engine.messages.requests import AddRequest

MAX_DRIFT = 2e-4  # seconds a second by which two clocks part: 100 ppm each, a bad quartz

Events = list[tuple[str, float]]


class ClockOffset:
    """How far the core's clock is ahead of the client's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._least, self._most = -math.inf, math.inf
        self._measured_at = 0.0

    def measure(self, asked: float, told: float, heard: float) -> None:
        """An exchange: the core's time between two of the client's."""
        widened = MAX_DRIFT * (heard - self._measured_at)
        self._least = max(self._least - widened, told - heard)
        self._most = min(self._most + widened, told - asked)
        self._measured_at = heard
        if self._least > self._most:  # a machine slept meanwhile: its clock stood still
            self._least, self._most = told - heard, told - asked
        is_same = self._least <= 0.0 <= self._most
        self.seconds = 0.0 if is_same else (self._least + self._most) / 2

    def to_core(self, request: AddRequest) -> AddRequest:
        """A request of a client, with its times on the core's clock."""
        if not self.seconds:
            return request
        return replace(
            request,
            arrival_time=request.arrival_time + self.seconds,
            deadline=self._later(request.deadline),
            queue_deadline=self._later(request.queue_deadline),
            end_deadline=self._later(request.end_deadline),
        )

    def from_core(self, batch: CoreOutputs) -> None:
        """Put the times of outputs on the client's clock."""
        if not self.seconds:
            return
        batch.time -= self.seconds
        for started in batch.started:
            started.scheduled_time -= self.seconds
            started.events = self._earlier(started.events)
        for end in batch.finished:
            end.events = self._earlier(end.events)

    def _later(self, time: float | None) -> float | None:
        return None if time is None else time + self.seconds

    def _earlier(self, events: Events) -> Events:
        return [(event, time - self.seconds) for event, time in events]
