"""CoreClient: the interface of a core, whether it runs in this process or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.messages.media import MediaContent
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Welcome

if TYPE_CHECKING:  # clients in other processes import little
    from engine.config.decide import Decided


class NumCores(NamedTuple):
    """The number of living cores of a client, the number of cores that it was created with, and
    how often a core has died. ``num_prefill``: number of cores, the first ones,
    that compute only prompts; ``prefill_alive``: how many of these live."""

    alive: int
    total: int
    deaths: int = 0
    num_prefill: int = 0
    prefill_alive: int = 0

    @property
    def by_role(self) -> dict[str, tuple[int, int]]:
        """How many cores live, and how many there are, by what they do; {} if all do the same."""
        if not self.num_prefill:
            return {}
        decode = self.alive - self.prefill_alive, self.total - self.num_prefill
        return {"prefill": (self.prefill_alive, self.num_prefill), "decode": decode}

    def role_of(self, core: int) -> str:
        """What a core does: "prefill" or "decode"; "" for both."""
        return ("prefill" if core < self.num_prefill else "decode") if self.num_prefill else ""


class CoreClient(Protocol):
    """The interface of a core. Only one thread at a time may use a client.

    Once the core has died, and after ``shutdown``, every call raises ``EngineDeadError``, except
    ``num_unfinished``, ``num_cores`` and ``shutdown``."""

    decided: Decided | Welcome
    """The settings that the core has decided (number of blocks, longest request, ...)."""
    id_prefix: str
    """Request ids with this prefix are unique among all clients of the core."""

    reads_shared_memory: bool = False
    """True if a core takes the content of media as handles of shared memory."""

    max_call_bytes: int | None = None
    """Largest size of a utility call; ``None``: no limit."""

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` if its id is in use or it could never run,
        ``RefusedError`` if it cannot be queued now."""
        for error in self.add_all([request]).values():
            raise error

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        """Queue several requests in order. Returns the errors that ``add`` would raise, by index.

        If an exception such as ``KeyboardInterrupt`` interrupts this call, some requests may
        already be queued: abort all of them.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; unknown ids are ignored. Does not wait: ``step`` returns their last
        outputs. Raises ``RequestTypeError`` for ids that are not strings."""

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        """Bring the content of a media item to the cores of these requests, all of which have it:
        its pixels, with a handle of them for a core that can read it. Does not wait. Unknown ids
        are ignored."""

    def step(self) -> list[CoreOutputs]:
        """Return the outputs of the core's steps, [] without any.

        Runs one step if the core is in this process; else waits a short time for outputs.
        """

    def wake(self) -> None:
        """Make a waiting ``step`` return soon. Other threads may call this."""

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` if the core has died."""

    def has_unfinished(self) -> bool:
        """True while ``num_unfinished`` is not zero."""
        return self.num_unfinished() > 0

    def num_unfinished(self) -> int:
        """Number of queued requests whose last output ``step`` has not returned yet."""

    def num_cores(self) -> NumCores:
        """Numbers of live cores, of all cores and of deaths. Any thread may call this."""
        return NumCores(1, 1)

    def end_restarts(self) -> None:
        """Stop restarting cores that die. Any thread may call this."""
        return None

    def stats(self) -> SchedulerStats | None:
        """Current gauges and counters of the scheduler, ``None`` if it has none."""
        stats: SchedulerStats | None = self.call("stats")
        return stats

    def latest_stats(self) -> SchedulerStats | None:
        """The newest statistics that have arrived, without waiting; requests an update for later
        calls."""

    def call(self, name: str, *args: Any) -> Any:
        """Call a utility of the core by name. Raises ``ConfigError`` for an unknown name."""

    def begin_each(self, name: str, *args: Any) -> Callable[[], dict[int, Any] | None]:
        """Call a utility on all living cores. The function that is returned has their answers by
        the core's number, and ``None`` while one of several cores has not answered: none of them
        waits for the step of another. Call it until it has the answers."""
        answers = {0: self.call(name, *args)}
        return lambda: answers

    def shutdown(self) -> None:
        """Disconnect from the core, and end it if this client started it. May be repeated."""
