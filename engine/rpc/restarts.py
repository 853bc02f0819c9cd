"""Cores that have died are started again: each in a thread of its own, and not for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError, EngineDeadError
from engine.ipc.process import Child
from engine.rpc.zmq_client import EngineCoreClient

logger = logging.getLogger("engine.core")

MOST = 5  # starts of one core
WINDOW_SECONDS = 600.0  # in which it may be started again that many times
PAUSE_SECONDS = 1.0  # before another try, when a start has failed
JOIN_SECONDS = 10.0  # that a shutdown waits for a start that is being ended
EXPECTED_SECONDS = 5.0  # that a start takes, before any is known


class Starting(NamedTuple):
    """A process that loads a core, and how to become its client once it is ready."""

    child: Child
    meet: Callable[[], EngineCoreClient]


Start = Callable[[int], Starting]
"""Starts the core of this index again. Raises ``EngineDeadError`` or ``ConfigError``."""


@dataclass
class RestartOutcome:
    """What became of the start of a core."""

    core: int
    seconds: float
    client: EngineCoreClient | None = None
    error: Exception | None = None


class Restarts:
    """Starts cores again, at most ``most`` times in ``window`` seconds each.

    Belongs to the thread that drives the cores' client, except ``stop``, which any may call.
    """

    def __init__(
        self,
        start: Start,
        wake: Callable[[], None],
        *,
        most: int = MOST,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wake: called by another thread when ``take`` has something new."""
        self.most = most
        self._start = start
        self._wake = wake
        self._window = window
        self._clock = clock
        self._starts: defaultdict[int, deque[float]] = defaultdict(deque)  # by core: when
        self._began: dict[int, float] = {}  # cores that are being started
        self._seconds = EXPECTED_SECONDS  # that the last start took
        self._done: deque[RestartOutcome] = deque()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # on the children, which ``stop`` kills
        self._children: dict[int, Child] = {}
        self._is_stopped = threading.Event()

    @property
    def is_pending(self) -> bool:
        """Whether a core is being started, or its start has ended and was not taken yet."""
        return bool(self._began)

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called: a start that fails then was ended by it."""
        return self._is_stopped.is_set()

    @property
    def seconds_left(self) -> float:
        """About how long it takes until a core is back."""
        if not self._began:
            return self._seconds
        return max(1.0, self._seconds - (self._clock() - min(self._began.values())))

    def why_not(self, core: int) -> str | None:
        """Why this core is not started again; ``None`` if it may be."""
        if self._is_stopped.is_set():
            return "the engine is ending"
        starts, now = self._starts[core], self._clock()
        while starts and now - starts[0] > self._window:
            starts.popleft()
        if len(starts) >= self.most:
            return f"it was started {self.most} times in {self._window:g} s, the limit"
        return None

    def begin(self, core: int, dead: EngineCoreClient | None = None) -> int:
        """Start this core again, once its last process is gone; ``None``: its last start failed.
        Returns which try it is. ``why_not`` must have returned ``None``."""
        now = self._clock()
        self._starts[core].append(now)
        self._began[core] = now
        thread = threading.Thread(
            target=self._run, args=(core, dead), name=f"restart-core-{core}", daemon=True
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()
        return len(self._starts[core])

    def take(self) -> list[RestartOutcome]:
        """Starts that have ended since the last call."""
        outcomes = []
        while self._done:
            outcome = self._done.popleft()
            del self._began[outcome.core]
            if outcome.error is None:
                self._seconds = outcome.seconds
            outcomes.append(outcome)
        return outcomes

    def stop(self) -> None:
        """Start nothing any more, and end what is being started; harmless when repeated."""
        self._is_stopped.set()
        with self._lock:
            for child in self._children.values():
                child.kill()

    def close(self) -> None:
        """``stop``, and leave nothing over."""
        self.stop()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        for outcome in self.take():
            if outcome.client is not None:
                outcome.client.shutdown()

    # In threads.

    def _run(self, core: int, dead: EngineCoreClient | None) -> None:
        outcome = RestartOutcome(core, 0.0)
        try:
            if dead is not None:
                dead.shutdown()  # its memory is free once its process has gone
            else:
                self._is_stopped.wait(PAUSE_SECONDS)
            began = self._clock()
            outcome.client = self._started(core)
            outcome.seconds = self._clock() - began
        except Exception as error:  # also one that nobody foresaw: the core stays dead
            outcome.error = error
            if not isinstance(error, EngineDeadError | ConfigError):
                logger.exception("core %d could not be started again", core)
        self._done.append(outcome)
        self._wake()

    def _started(self, core: int) -> EngineCoreClient:
        if self._is_stopped.is_set():
            raise EngineDeadError("the engine is ending")
        child, meet = self._start(core)
        with self._lock:
            self._children[core] = child
            if self._is_stopped.is_set():
                child.kill()
        try:
            return meet()
        finally:
            with self._lock:
                del self._children[core]
