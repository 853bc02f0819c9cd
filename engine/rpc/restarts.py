"""Restarts: restarts dead cores, each in a thread, a limited number of times."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError, EngineDeadError
from engine.ipc.process import CoreProcess
from engine.rpc.zmq_client import EngineCoreClient

logger = logging.getLogger("engine.core")

MOST = 5  # restarts of a core within WINDOW_SECONDS
WINDOW_SECONDS = 600.0
PAUSE_SECONDS = 1.0  # before another try after a failed start
JOIN_SECONDS = 10.0  # a shutdown waits at most this long for a start that is being ended
EXPECTED_SECONDS = 5.0  # assumed duration of a start before any was measured


class Starting(NamedTuple):
    """A process that is loading a core, and a function that returns its client when it is ready."""

    child: CoreProcess
    connect: Callable[[], EngineCoreClient]


Start = Callable[[int], Starting]
"""Restarts the core with this index. Raises ``EngineDeadError`` or ``ConfigError``."""


@dataclass
class RestartOutcome:
    """The outcome of a restart."""

    core: int
    seconds: float
    client: EngineCoreClient | None = None
    error: Exception | None = None


class Restarts:
    """Restarts cores, each at most ``most`` times in ``window`` seconds.

    Only the thread of the cores' client may use it, except ``stop``, which any thread may call.
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
        """wake: called in another thread when ``take`` has a new outcome."""
        self.most = most
        self._start = start
        self._wake = wake
        self._window = window
        self._clock = clock
        self._starts: defaultdict[int, deque[float]] = defaultdict(deque)  # times of starts by core
        self._began: dict[int, float] = {}  # start times of cores that are being started
        self._seconds = EXPECTED_SECONDS  # duration of the last start
        self._done: deque[RestartOutcome] = deque()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # protects the children, which ``stop`` kills
        self._children: dict[int, CoreProcess] = {}
        self._is_stopped = threading.Event()

    @property
    def is_pending(self) -> bool:
        """True while a core is being started, or its outcome is not yet returned by ``take``."""
        return bool(self._began)

    @property
    def is_stopped(self) -> bool:
        """True after ``stop``, which makes current starts fail."""
        return self._is_stopped.is_set()

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until a core that is being restarted is ready."""
        if not self._began:
            return self._seconds
        return max(1.0, self._seconds - (self._clock() - min(self._began.values())))

    def why_not(self, core: int) -> str | None:
        """Why this core is not restarted; ``None`` if it may be."""
        if self._is_stopped.is_set():
            return "the engine is ending"
        starts, now = self._starts[core], self._clock()
        while starts and now - starts[0] > self._window:
            starts.popleft()
        if len(starts) >= self.most:
            return f"it was started {self.most} times in {self._window:g} s, the limit"
        return None

    def begin(self, core: int, dead: EngineCoreClient | None = None) -> int:
        """Start a thread that shuts down ``dead``, the core's old client, if any, and restarts the
        core. Returns the number of this attempt. Call it only if ``why_not`` returned ``None``."""
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
        """Return, once, the outcomes of the restarts that have ended."""
        outcomes = []
        while self._done:
            outcome = self._done.popleft()
            del self._began[outcome.core]
            if outcome.error is None:
                self._seconds = outcome.seconds
            outcomes.append(outcome)
        return outcomes

    def stop(self) -> None:
        """Allow no further starts, and end the current ones. May be repeated."""
        self._is_stopped.set()
        with self._lock:
            for child in self._children.values():
                child.kill()

    def close(self) -> None:
        """Stop all restarts, wait for their threads, and shut down cores that are not in use."""
        self.stop()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        for outcome in self.take():
            if outcome.client is not None:
                outcome.client.shutdown()

    # -- in threads

    def _run(self, core: int, dead: EngineCoreClient | None) -> None:
        outcome = RestartOutcome(core, 0.0)
        try:
            if dead is not None:
                dead.shutdown()  # its memory is free after its process has ended
            else:
                self._is_stopped.wait(PAUSE_SECONDS)
            began = self._clock()
            outcome.client = self._started(core)
            outcome.seconds = self._clock() - began
        except Exception as error:  # any error: the core stays dead
            outcome.error = error
            if not isinstance(error, EngineDeadError | ConfigError):
                logger.exception("core %d could not be started again", core)
        self._done.append(outcome)
        self._wake()

    def _started(self, core: int) -> EngineCoreClient:
        if self._is_stopped.is_set():
            raise EngineDeadError("the engine is ending")
        child, connect = self._start(core)
        with self._lock:
            self._children[core] = child
            if self._is_stopped.is_set():
                child.kill()
        try:
            return connect()
        finally:
            with self._lock:
                del self._children[core]
