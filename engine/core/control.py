"""Utilities that clients may call by name; there are no others, and arguments are plain values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.core.engine_core import Executor
from engine.errors import ConfigError, EngineError
from engine.messages.requests import check_plain
from engine.messages.stats import SchedulerStats
from engine.observe.guard import Failures, with_failures
from engine.sched.interface import PauseState, SchedulerInterface

PAUSES = {"new": PauseState.PAUSED_NEW, "all": PauseState.PAUSED_ALL}


class Utilities:
    """The calls by name: those of the scheduler, and what the worker offers (``methods``).

    An answer is plain values or a message of the protocol.
    """

    def __init__(
        self, scheduler: SchedulerInterface, executor: Executor[Any], failures: Failures
    ) -> None:
        self._scheduler = scheduler
        self._failures = failures
        self._by_name: dict[str, Callable[..., Any]] = {
            "echo": self._echo,
            "reset_prefix_cache": self._reset_prefix_cache,
            "pause": self._pause,
            "resume": self._resume,
            "stats": self.stats,
        }
        for name in executor.methods:
            if name in self._by_name:
                raise ConfigError(
                    f"a method of the worker is called {name!r:.80}, as is a utility of the core: "
                    "give it another name"
                )
            self._by_name[name] = partial(executor.call, name)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Call a utility. Raises ``ConfigError`` for one that does not exist.

        An error of the utility is raised with its name, as the same class if it is one of the
        engine's.
        """
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
        except Exception as error:  # wrong arguments, or a scheduler of the user's own
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
            raise ConfigError(f"pause of {what!r:.80} is not known; there are: {', '.join(PAUSES)}")
        self._set_pause_state(PAUSES[what])

    def _resume(self) -> None:
        self._set_pause_state(PauseState.UNPAUSED)

    def _set_pause_state(self, state: PauseState) -> None:
        try:
            self._scheduler.set_pause_state(state)
        except NotImplementedError as error:
            raise ConfigError(f"the scheduler of this engine cannot pause: {error}") from error

    def stats(self) -> SchedulerStats | None:
        """What the scheduler counts, and how often observers in this process have failed."""
        return with_failures(self._scheduler.make_stats(), self._failures)


def _kind_of(error: EngineError) -> type[EngineError]:
    """The engine's own class of an error: other processes do not know a plug-in's classes."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == EngineError.__module__)
