"""The processes of the ranks of a group, other than rank 0."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec

from engine.core.rank_watch import Calls, RankProcess, RankWatch
from engine.errors import RankError
from engine.ipc.process import NO_VALUES, Child
from engine.ipc.ring import SPIN_SECONDS, RingWriter, Stopped
from engine.worker.main import serve_rank
from engine.worker.rank import CALL, RankReport, RankWorker

CLOSE_SECONDS = 1.7  # a rank that does not end is killed, before its core would be


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How the ranks of a group are started and watched."""

    name: str = ""
    """Put before the names of ranks in log lines, such as ``core 1``."""
    log_level: str = "info"
    ready_timeout: float = 600.0
    """Seconds that a rank may take to load or to allocate."""
    hang_timeout: float = 300.0
    """Seconds that a rank may take for a step."""
    spin_seconds: float = SPIN_SECONDS
    """How long a rank looks for the next plan before it sleeps."""
    environments: Sequence[Mapping[str, str]] = ()
    """Variables for the processes of ranks 1, 2, ...; (): none."""


class Answers(NamedTuple):
    """What ranks 1, 2, ... report of a call."""

    watch: RankWatch
    number: int  # of the call
    name: str
    limit: float  # seconds

    @property
    def are_there(self) -> bool:
        return self.watch.has_answers(self.number)

    def wait(self) -> list[RankReport]:
        return self.watch.answers(self.number, self.name, self.limit)


def start_ranks(makes: Sequence[Callable[[], RankWorker]], options: GroupOptions) -> Ranks:
    """Start the processes of ranks 1, 2, ... on this machine.

    makes: a function for each, which makes its worker in its process. Raises ``OSError`` on a
    system without anonymous shared memory, ``EngineDeadError`` if a process cannot be started."""
    environments = options.environments or [NO_VALUES] * len(makes)
    with ExitStack() as failing:
        ring = RingWriter(len(makes))
        failing.callback(ring.close)
        children: list[Child] = []
        for rank, (make, values) in enumerate(zip(makes, environments, strict=True), 1):
            name = f"{options.name} rank {rank}".strip()
            arguments = (ring.handle, rank, options.spin_seconds, make, options.log_level, name)
            one = Child(
                name, serve_rank, *arguments, environment=values, close_seconds=CLOSE_SECONDS
            )
            children.append(one)
            failing.callback(children[-1].close)
        ranks = Ranks(ring, children, options)
        failing.pop_all()
    return ranks


class Ranks:
    """The processes of ranks 1, 2, ..., what carries messages to them, and the thread that watches
    them."""

    def __init__(
        self, calls: Calls, children: Sequence[RankProcess], options: GroupOptions
    ) -> None:
        self.options = options
        self.at_end: Callable[[], object] = lambda: None
        """Called when the processes have ended."""
        self.calls = calls
        self.children = children
        self.watch = RankWatch(calls, children, options.hang_timeout)
        self._num_calls = 0
        # At exit the thread must end before the children, whose lines it reads.
        self._unwatch = weakref.finalize(self, self.watch.close)
        self._unwatch.atexit = False
        atexit.register(self._unwatch)

    def __len__(self) -> int:
        return len(self.children)

    def send(self, *parts: bytes) -> None:
        """Let all of these ranks carry out something. Raises ``RankError`` if the group has
        stopped."""
        try:
            self.calls.send(*parts)
        except Stopped:
            self.raise_failure()

    @property
    def is_stopped(self) -> bool:
        return self.calls.is_stopped

    def reported(self, index: int, word: int) -> int:
        return self.calls.reported(index, word)

    def started(self) -> None:
        self.watch.limits_steps = True

    def fail(self, error: RankError) -> None:
        self.watch.fail(error)

    def start_error_of(self, rank: int, report: RankReport) -> Exception:
        return self.watch.start_error_of(rank, report)

    def on_failure(self, notify: Callable[[RankError], object]) -> None:
        self.watch.on_failure(notify)

    def call(self, name: str, *args: Any, is_start: bool = False) -> Answers:
        self.send(CALL, msgspec.msgpack.encode([name, args]))
        number = self._num_calls
        self._num_calls += 1
        limit = self.options.ready_timeout if is_start else self.options.hang_timeout
        return Answers(self.watch, number, name, limit)

    def check(self) -> None:
        """Raise ``RankError`` if the group has stopped."""
        if self.calls.is_stopped:
            self.raise_failure()

    def raise_failure(self, error: Exception | None = None) -> NoReturn:
        """Raise the error that has stopped the group. error: what rank 0 has noticed of it."""
        known = self.watch.failure()
        if known is None:
            known = error if isinstance(error, RankError) else RankError("the group has stopped")
            self.watch.fail(known)
        raise known

    def close(self) -> None:
        """End the processes. May be repeated."""
        atexit.unregister(self._unwatch)
        self._unwatch()
        self._end()

    def _end(self) -> None:
        for child in self.children:
            if self.calls.is_stopped:
                child.kill()
            child.request_end()
        for child in self.children:
            child.close()
        self.calls.close()
        self.at_end()
