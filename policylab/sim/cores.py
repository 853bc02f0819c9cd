"""OneClock: several simulated cores, whose steps end in the order of time.

Each core has a clock of its own. What is sent to a core during a step reaches it when the step
ends; what a step puts out is known when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from engine.errors import PolicyError
from engine.messages.requests import CoreOutputs
from policylab.sim.core import IDLE_SECONDS, SimulatedCore
from policylab.verify.reached import Message


class _Event(NamedTuple):
    """A step of a core ends, with these outputs; ``None``: the core looks for something to do."""

    time: float
    number: int
    core: int
    outputs: Mapping[int, CoreOutputs] | None


class Ended(NamedTuple):
    """A step of a core has ended, and at what time in seconds."""

    core: int
    time: float
    outputs: Mapping[int, CoreOutputs]


class OneClock:
    """The cores of a simulation, and what happens next. ``max_idle_looks``: of a core in turn, each
    after 5 ms, after which a run fails."""

    def __init__(self, cores: Sequence[SimulatedCore], max_idle_looks: int) -> None:
        self.cores = cores
        self._max_idle_looks = max_idle_looks
        self._events: list[_Event] = []
        self._num_events = 0
        self._next: list[_Event | None] = [None] * len(cores)  # of each core; ``None``: it rests
        self._inboxes: list[list[Message]] = [[] for _ in cores]
        self._num_idle = [0] * len(cores)

    @property
    def next_time(self) -> float:
        """When something happens next, in seconds; infinity if nothing does."""
        return self._events[0].time if self._events else inf

    def send(self, core: int, message: Message, now: float) -> None:
        """Let a core call ``message`` before its next step."""
        self._inboxes[core].append(message)
        pending = self._next[core]
        if pending is None or (pending.outputs is None and pending.time > now):
            self._push(core, max(now, self.cores[core].clock.now), None)

    def advance(self) -> Ended | None:
        """Let happen what happens next. Returns the step that has ended; ``None`` if one began."""
        event = heappop(self._events)
        if event is not self._next[event.core]:  # a message has come before
            return None
        if event.outputs is None:
            self._begin(event)
            return None
        self._push(event.core, event.time, None)
        return Ended(event.core, event.time, event.outputs)

    def _begin(self, event: _Event) -> None:
        place, core = event.core, self.cores[event.core]
        core.clock.now = max(core.clock.now, event.time)
        messages, self._inboxes[place] = self._inboxes[place], []
        for message in messages:
            message()
        self._next[place] = None
        if not core.core.has_work:
            return
        outputs = core.step()
        core.end_step()
        if not core.core.is_idle or outputs:
            self._num_idle[place] = 0
            self._push(place, core.clock.now, outputs)
            return
        self._num_idle[place] += 1
        if self._num_idle[place] > self._max_idle_looks:
            seconds = self._num_idle[place] * IDLE_SECONDS
            raise PolicyError(f"for {seconds:g} s core {place} computed nothing, but has requests")
        if (until := core.next_time) < inf:
            self._push(place, until, None)

    def _push(self, core: int, at: float, outputs: Mapping[int, CoreOutputs] | None) -> None:
        event = self._next[core] = _Event(at, self._num_events, core, outputs)
        self._num_events += 1
        heappush(self._events, event)
