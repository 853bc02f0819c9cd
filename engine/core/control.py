"""Utilities: the functions of a core that clients may call by name, with plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from engine.core.engine_core import Executor
from engine.errors import ConfigError, EngineError
from engine.messages.media import MediaContent
from engine.messages.requests import AddRequest, Arrival, check_plain
from engine.messages.stats import AdapterUse, RankUse, SchedulerStats, StoreUse
from engine.observe.guard import Failures, with_failures
from engine.sched.interface import PauseState, SchedulerInterface

PAUSES = {"new": PauseState.PAUSED_NEW, "all": PauseState.PAUSED_ALL}


class AdapterDoor(Protocol):
    """What the LoRA feature does with new requests, clients' calls and statistics."""

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that clients may call by name."""
        ...

    def resolved(self, request: AddRequest) -> AddRequest:
        """Replace the name of a new request's adapter by what identifies its content. Raises
        ``RequestError`` for an unknown adapter."""
        ...

    def use(self) -> AdapterUse:
        """Which adapters are in use."""
        ...


class MediaDoor(Protocol):
    """What the feature for media does with content that comes."""

    @property
    def device(self) -> str:
        """Name of the device to whose memory content may be copied; "" for none."""
        ...

    def take(self, request_ids: Sequence[str], content: MediaContent) -> Arrival:
        """Keep the content of a media item of these requests. Returns the arrival for the
        scheduler."""
        ...


class Utilities:
    """The functions of a core that clients may call by name.

    They belong to the scheduler, to the LoRA feature or, if listed in its ``methods``, to the
    worker.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor[Any],
        failures: Failures,
        adapters: AdapterDoor | None = None,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        stores: Callable[[], dict[str, StoreUse]] = dict,
        ranks: Callable[[], list[RankUse]] = list,
    ) -> None:
        """methods: further functions of features, by name. stores: returns what the stores of KV
        blocks have, by name; ranks: what the ranks of the core do."""
        self._scheduler = scheduler
        self._adapters = adapters
        self._stores = stores
        self._ranks = ranks
        self._failures = failures
        self._by_name: dict[str, Callable[..., Any]] = {
            "echo": self._echo,
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_encoder_cache": scheduler.reset_encoder_cache,
            "pause": self._pause,
            "resume": self._resume,
            "stats": self.stats,
            **(methods or {}),
        }
        if adapters is not None:
            self._by_name |= adapters.methods
        for name in executor.methods:
            if name in self._by_name:
                raise ConfigError(
                    f"the worker's method {name!r:.80} has the name of a core utility: rename it"
                )
            self._by_name[name] = partial(executor.call, name)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Call a utility. Raises ``ConfigError`` for an unknown name.

        An error of the utility is raised again with the utility's name in its message. Its class
        becomes ``EngineError`` unless it is one of the engine's."""
        utility = self._by_name.get(name)
        if utility is None:
            raise ConfigError(
                f"utility {name!r:.80} is not available; there are: {', '.join(self._by_name)}"
            )
        for value in args:
            check_plain(name, value)
        try:
            return utility(*args)
        except EngineError as error:
            raise _kind_of(error)(f"Call to {name} method failed: {error}") from error
        except Exception as error:  # wrong arguments, or an error of a custom scheduler
            raise EngineError(
                f"Call to {name} method failed: {type(error).__name__}: {error}"
            ) from error

    def _echo(self, value: Any) -> Any:
        return value

    def _reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if not isinstance(reset_running, bool):
            raise ConfigError(f"reset_running is {reset_running!r:.80}, must be True or False")
        return self._scheduler.reset_prefix_cache(reset_running)

    def _pause(self, what: str = "all") -> None:
        if not isinstance(what, str) or what not in PAUSES:
            raise ConfigError(f"pause {what!r:.80} is not known; there are: {', '.join(PAUSES)}")
        self._set_pause_state(PAUSES[what])

    def _resume(self) -> None:
        self._set_pause_state(PauseState.UNPAUSED)

    def _set_pause_state(self, state: PauseState) -> None:
        try:
            self._scheduler.set_pause_state(state)
        except NotImplementedError as error:
            raise ConfigError(f"this engine's scheduler cannot pause: {error}") from error

    def stats(self) -> SchedulerStats | None:
        """The scheduler's statistics, with the failures of observers in this process added."""
        stats = with_failures(self._scheduler.make_stats(), self._failures)
        if stats is not None:
            stats.adapters = None if self._adapters is None else self._adapters.use()
            stats.stores = self._stores()
            stats.ranks = self._ranks()
        return stats


def _kind_of(error: EngineError) -> type[EngineError]:
    """Return the engine's own class of an error. A plug-in's subclass cannot be sent, because other
    processes may be unable to import it."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == EngineError.__module__)
