"""The loop of a core in a process of its own: read the inbox, step, queue outputs, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from engine.config.engine import EngineConfig
from engine.core.inproc_client import InprocClient
from engine.core.polling import Work, poll_timeout_ms
from engine.ipc.sockets import Socket, Waker
from engine.rpc.dispatcher import Dispatcher
from engine.rpc.sessions import ClientSessions

MAX_ARRIVALS = 1000  # messages read between two steps, so that a flood of them delays no step
PARKED_SECONDS = (0.001, 0.02)  # between two looks at requests that wait for something else
MAX_WAIT_SECONDS = 1e6  # so that it can be counted in milliseconds
PARKED_SHARE = 0.05  # of the time that they have waited already


@dataclass
class Pulse:
    """The heartbeat: written by the loop alone, read by the control thread."""

    num_steps: int = 0
    step_began: float | None = None
    """When the present step began, with what clients asked before it; ``None`` while the
    loop waits for work."""
    num_unfinished: int = 0
    num_clients: int = 0


class CoreLoop:
    """Steps the core while there is work; otherwise sleeps until a message arrives."""

    def __init__(
        self,
        core: InprocClient,
        router: Socket,
        dispatcher: Dispatcher,
        sessions: ClientSessions,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self.pulse = Pulse()
        self.waker = Waker()
        self._core = core
        self._router = router
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._ending = dispatcher.ending
        self._config = config
        self._clock = clock
        self._idle_since: float | None = None
        self._work: Work = "none"
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def run(self) -> None:
        """Run until it is to end. Raises ``EngineDeadError`` if the core dies."""
        while True:
            self._wait(poll_timeout_ms(self._config, self._work, is_first=True))
            self._take_arrivals()
            if self._is_over():
                return
            self._step()

    def _take_arrivals(self) -> None:
        """Carry out what clients asked. The step counts from here, since any of this may hang."""
        self.pulse.step_began = self._clock()
        self.pulse.num_steps += 1
        for _ in range(MAX_ARRIVALS):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._dispatcher.take(identity, frames, self._clock())
            self._idle_since = None
        self._sessions.tend(self._clock())
        self._count()

    def _step(self) -> None:
        outputs = self._core.turn()
        for index, batch in outputs.items():
            self._sessions.publish(index, batch)
        if self._core.is_idle:
            self._idle_since = self._clock() if self._idle_since is None else self._idle_since
            self._work = "none"
        else:
            self._idle_since = None
            self._work = self._core.next_work(sum(len(b.request_ids) for b in outputs.values()))

    def _wait(self, longest_ms: int) -> None:
        """Wait so long for messages, less if something else is due; not at all while busy."""
        if self._work == "none":
            self.pulse.step_began = None
            self._count()
            longest_ms = min(longest_ms, self._patience_ms())
        if longest_ms and self.waker.fd in dict(self._poller.poll(longest_ms)):
            self.waker.clear()

    def _patience_ms(self) -> int:
        """Milliseconds until something is due that no message announces."""
        now = self._clock()
        due = [self._sessions.next_look()]
        if self._ending.at is not None:
            due.append(self._ending.at)
        if self._core.has_unfinished():
            shortest, longest = PARKED_SECONDS
            waited = 0.0 if self._idle_since is None else now - self._idle_since
            due.append(now + min(max(shortest, PARKED_SHARE * waited), longest))
            due += (time for time in self._sessions.deadlines() if time > now)
        return math.ceil(1000.0 * min(max(0.0, min(due) - now), MAX_WAIT_SECONDS))

    def _is_over(self) -> bool:
        if self._ending.at is None:
            return False
        if self._clock() >= self._ending.at:
            return True
        return not self._core.has_unfinished() and not self._sessions.has_backlog()

    def _count(self) -> None:
        self.pulse.num_unfinished = self._core.num_unfinished()
        self.pulse.num_clients = len(self._sessions)
