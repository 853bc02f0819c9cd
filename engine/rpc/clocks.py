"""ClockOffset: converts times between the clocks of a client and a core on another machine.

Both clocks are CLOCK_MONOTONIC, which counts from the start of each machine. An answer contains the
core's time ``answered``; the client knows when it sent its message and received the answer, so

    answered - received  <=  core's clock - client's clock  <=  answered - sent

A batch of outputs, which is not an answer, gives only the lower bound. Each message narrows the
bounds, and clock drift widens them in between. While the bounds include 0, both clocks are taken to
be the same, as they are on one machine, and no time is changed.

Otherwise the lower bound is used. A message may wait for a step before the core reads it, but the
answer is sent at once, so the difference is close to this bound. Events of the core are dated too
late by at most the transmission time of a message, and never in the client's future.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from engine.messages.requests import AddRequest, CoreOutputs

MAX_DRIFT = 2e-4  # drift of two clocks in seconds per second: 100 ppm each, a bad quartz

Events = list[tuple[str, float]]


class ClockOffset:
    """The difference between the core's clock and the client's, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._may_be_same = True  # both may be the same clock
        self._least, self._most = -math.inf, math.inf
        self._measured_at = 0.0
        self._latest = -math.inf  # time of the last outputs, on the client's clock
        self._started: dict[str, float] = {}
        """Requests that have started, each with the offset by which all its events are dated."""

    def measure(self, sent: float, answered: float, received: float) -> None:
        """Add a measurement: the core's clock showed ``answered`` between the client's times
        ``sent`` and ``received``. ``sent`` is minus infinity if the message was not an answer."""
        widened = MAX_DRIFT * (received - self._measured_at)
        self._least = max(self._least - widened, answered - received)
        self._most = min(self._most + widened, answered - sent)
        self._measured_at = received
        if self._least > self._most:  # the clock of a machine stopped while it slept
            self._least, self._most = answered - received, answered - sent
        self._may_be_same = self._may_be_same and self._least <= 0.0 <= self._most
        self.seconds = 0.0 if self._may_be_same else self._least

    def to_core(self, request: AddRequest) -> AddRequest:
        """Convert the times of a request to the core's clock."""
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
        """Convert the times of outputs to the client's clock, in place. received: when they
        arrived.

        Times of successive batches never decrease, even if the offset is corrected.
        """
        self.measure(-math.inf, batch.time, received)
        if not self._may_be_same:
            batch.time = min(max(batch.time - self.seconds, self._latest), received)
            self._date_events(batch)
        self._latest = batch.time

    def _date_events(self, batch: CoreOutputs) -> None:
        """Convert the times of requests' events to the client's clock. All events of a request are
        converted with the same offset, because its end repeats the events of its start."""
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
    """Subtract ``seconds`` from the events' times, which become at most ``latest``."""
    return [(event, min(time - seconds, latest)) for event, time in events]
