"""The clock of a core on another machine, in seconds of the client's own.

Both are CLOCK_MONOTONIC, which counts from the start of each machine. The core tells its time in
each ``welcome`` and ``submitted``; it was read between the question and the answer, so

    answered - received  <=  core's clock - own clock  <=  answered - sent

A batch of outputs tells its time, too: one more lower bound. Each message narrows these bounds, and
the drift of two clocks widens them again in between. On one machine the true difference is nothing;
until the bounds rule that out, it is taken, and no time is changed at all.

Otherwise the lower bound is taken. A core reads between two steps and answers at once: a question
may wait as long as a step takes, the answer does not, so the truth lies close to the lower bound.
The error has one sign, as well. What the core did is dated too late, by up to the way of a message:
never before what the client did to cause it, and never in the client's future.

Durations in place of times would need no measuring, but count from when a message is read: a
deadline or an arrival would move by up to a step.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from engine.messages.requests import AddRequest, CoreOutputs

MAX_DRIFT = 2e-4  # seconds a second by which two clocks part: 100 ppm each, a bad quartz

Events = list[tuple[str, float]]


class ClockOffset:
    """How many seconds the core's clock is ahead of the client's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._may_be_same = True  # may both be one clock?
        self._least, self._most = -math.inf, math.inf
        self._measured_at = 0.0
        self._latest = -math.inf  # time of outputs, on the client's clock
        self._started: dict[str, float] = {}
        """Requests that have started, each with the offset by which all its events are dated."""

    def measure(self, sent: float, answered: float, received: float) -> None:
        """An exchange: the core's time between two of the client's. A message that was not
        requested counts as sent at minus infinity."""
        widened = MAX_DRIFT * (received - self._measured_at)
        self._least = max(self._least - widened, answered - received)
        self._most = min(self._most + widened, answered - sent)
        self._measured_at = received
        if self._least > self._most:  # a machine slept meanwhile: its clock stood still
            self._least, self._most = answered - received, answered - sent
        self._may_be_same = self._may_be_same and self._least <= 0.0 <= self._most
        self.seconds = 0.0 if self._may_be_same else self._least

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

    def from_core(self, batch: CoreOutputs, received: float) -> None:
        """Put the times of outputs, which came at ``heard``, on the client's clock.

        Times of batches do not go back when the offset is known better.
        """
        self.measure(-math.inf, batch.time, received)
        if not self._may_be_same:
            batch.time = min(max(batch.time - self.seconds, self._latest), received)
            self._date_events(batch)
        self._latest = batch.time

    def _date_events(self, batch: CoreOutputs) -> None:
        """Translate all events of one request by one offset: they are sent with its start and again
        with its end, which may be hours later."""
        for started in batch.started:
            seconds = self._started.setdefault(batch.request_ids[started.index], self.seconds)
            started.scheduled_time = min(started.scheduled_time - seconds, batch.time)
            started.events = _earlier(started.events, seconds, batch.time)
        for end in batch.finished:
            seconds = self._started.pop(batch.request_ids[end.index], self.seconds)
            end.events = _earlier(end.events, seconds, batch.time)

    def _later(self, time: float | None) -> float | None:
        return None if time is None else time + self.seconds


def _earlier(events: Events, seconds: float, latest: float) -> Events:
    """The events on the client's clock; none is later than the outputs that report it."""
    return [(event, min(time - seconds, latest)) for event, time in events]
