"""The life of a core in a process of its own: inbox, step, outbox, over and over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from engine.core.client import InprocClient
from engine.core.desk import Desk, Ending
from engine.core.peers import Peers
from engine.ipc.sockets import Socket, Waker

MAX_ARRIVALS = 1000  # messages read between two steps, so that a flood of them stops nobody
PARKED_SECONDS = (0.001, 0.02)  # between two looks at requests that wait for something else
PARKED_SHARE = 0.05  # of the time that they have waited already


@dataclass
class Pulse:
    """The heartbeat: written by the loop alone, read by whoever asks how it is."""

    num_steps: int = 0
    step_began: float | None = None
    """When the present step did; ``None`` while the loop waits for work."""
    num_unfinished: int = 0
    num_clients: int = 0


class CoreLoop:
    """Steps the core while there is work; sleeps until somebody asks for something if not."""

    def __init__(
        self,
        core: InprocClient,
        router: Socket,
        desk: Desk,
        peers: Peers,
        *,
        ending: Ending,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pulse = Pulse()
        self.waker = Waker()
        self._core = core
        self._router = router
        self._desk = desk
        self._peers = peers
        self._ending = ending
        self._clock = clock
        self._idle_since: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def run(self) -> None:
        """Until it is to end. Raises ``EngineDeadError`` if the core dies."""
        while self._take_arrivals():
            self._step()

    def _step(self) -> None:
        now = self._clock()
        self._beat(now)
        for index, batch in self._core.turn().items():
            self._peers.publish(index, batch)
        if not self._core.is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def _take_arrivals(self) -> bool:
        """Carry out what clients asked, having waited for it if there is no other work.

        False: it is time to end.
        """
        if self._idle_since is not None:
            self._sleep(self._patience(self._idle_since))
        for _ in range(MAX_ARRIVALS):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._desk.take(identity, frames, self._clock())
            self._idle_since = None
        return not self._is_over()

    def _sleep(self, seconds: float | None) -> None:
        self._beat(None)
        timeout = None if seconds is None else max(0, math.ceil(1000.0 * seconds))
        if self.waker.fd in dict(self._poller.poll(timeout)):
            self.waker.clear()

    def _patience(self, idle_since: float) -> float | None:
        """How long to wait for arrivals: until something else is due, for ever if nothing is."""
        now = self._clock()
        due = [] if self._ending.at is None else [self._ending.at]
        if self._core.has_unfinished():
            shortest, longest = PARKED_SECONDS
            parked = min(max(shortest, PARKED_SHARE * (now - idle_since)), longest)
            due.append(now + parked)
            due += (time for time in self._peers.deadlines() if time > now)
        return min(due) - now if due else None

    def _is_over(self) -> bool:
        if self._ending.at is None:
            return False
        if self._clock() >= self._ending.at:
            return True
        return not self._core.has_unfinished() and not self._peers.has_backlog()

    def _beat(self, step_began: float | None) -> None:
        pulse = self.pulse
        pulse.num_steps += step_began is not None
        pulse.step_began = step_began
        pulse.num_unfinished = self._core.num_unfinished()
        pulse.num_clients = len(self._peers)
