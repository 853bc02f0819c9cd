"""What every client of a core does, wherever the core runs: the contract, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Welcome

if TYPE_CHECKING:  # what a client elsewhere imports is kept small
    from engine.config.decide import Decided


class NumCores(NamedTuple):
    """How many of a client's cores are alive, and how many it was given."""

    alive: int
    total: int


class CoreClient(Protocol):
    """A core, wherever it runs. Belongs to one thread at a time.

    Once the core has died, and after ``shutdown``, every call raises ``EngineDeadError``, but for
    counts and ``shutdown``.
    """

    decided: Decided | Welcome
    """What the core runs with."""
    id_prefix: str
    """Request ids that begin with it are unique among all clients of the core."""

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` for an id that is in use or a request that can
        never be served, ``RefusedError`` for one that is not taken now."""
        for error in self.add_all([request]).values():
            raise error

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        """Queue these, in order. Returns what ``add`` would raise, by index; {} if all were taken.

        Interrupted, it may have queued some: abort them.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Finish these; unknown ids do nothing. Does not wait: ``step`` returns their ends, and
        what came before. Raises ``RequestTypeError`` for ids that are not strings."""

    def step(self) -> list[CoreOutputs]:
        """What the core's steps have brought, [] if nothing.

        Runs one step if the core is here, else waits a moment for outputs if there are none.
        """

    def wake(self) -> None:
        """Let a ``step`` that waits return soon; the only call that other threads may make."""

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` if the core has died."""

    def has_unfinished(self) -> bool:
        """Is there a request whose end ``step`` has not returned yet?"""
        return self.num_unfinished() > 0

    def num_unfinished(self) -> int:
        """Requests that were taken and whose end ``step`` has not returned yet."""

    def num_cores(self) -> NumCores:
        """Any thread may call this."""
        return NumCores(1, 1)

    def end_restarts(self) -> None:
        """Start no core again that dies from now on; any thread may call it."""
        return None

    def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler, ``None`` if it keeps none."""
        stats: SchedulerStats | None = self.call("stats")
        return stats

    def latest_stats(self) -> SchedulerStats | None:
        """The latest known ``stats``, without waiting; requests newer ones of another process."""

    def call(self, name: str, *args: Any) -> Any:
        """A utility by name. Raises ``ConfigError`` for one that does not exist."""

    def shutdown(self) -> None:
        """Disconnect from the core, and end it if it is ours; harmless when repeated."""
