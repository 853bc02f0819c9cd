"""A client of a core in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.config.decide import Decided
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, EngineDeadError
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.sched.interface import PauseState

IDLE_SECONDS = 0.001  # between two looks while all that is left waits for something
PAUSES = {"new": PauseState.PAUSED_NEW, "all": PauseState.PAUSED_ALL}


class InprocClient:
    """Calls the core directly; ``step`` runs one engine step in the caller's thread.

    Once a step has raised, or after ``shutdown``, every call raises ``EngineDeadError``.
    """

    def __init__(self, core: EngineCore, decided: Decided) -> None:
        self.decided = decided
        self._core: EngineCore | None = core
        self._cause: BaseException | None = None
        self._utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._reset_prefix_cache,
            "pause": self._pause,
            "resume": self._resume,
        }

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` for a live id or one that can never fit, and
        ``RefusedError`` for one that is not taken now."""
        self._live().scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> list[Finished]:
        """Finish these; unknown ids do nothing. No output follows.

        Returns what became of those that were alive; ``index`` is their place in ``request_ids``.
        """
        places = {name: index for index, name in enumerate(request_ids)}
        return [
            Finished(
                places[req.request_id],
                "abort",
                num_preemptions=req.story.num_preempted,
                waits=req.story.waits,
                events=req.story.events,
                kv_transfer_params=req.story.kv_transfer_params,
            )
            for req in self._live().scheduler.finish_requests(request_ids, "abort")
        ]

    def step(self) -> list[CoreOutputs]:
        """One engine step; [] when it brought nothing.

        Sleeps for a moment if there was nothing to do: requests are paused, or wait to be woken.
        """
        core = self._live()
        try:
            outputs = list(core.step().values())
        except BaseException as error:  # whatever it was, the step is half done
            self._cause = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(
                f"the engine core died: {type(error).__name__}: {error}"
            ) from error
        if core.is_idle and not outputs:
            time.sleep(IDLE_SECONDS)
        return outputs

    def has_unfinished(self) -> bool:
        return self._core is not None and self._core.scheduler.has_unfinished_requests()

    def num_unfinished(self) -> int:
        return 0 if self._core is None else self._core.scheduler.get_num_unfinished_requests()

    def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler, ``None`` if it keeps none."""
        return self._live().scheduler.make_stats()

    def call(self, name: str, *args: Any) -> Any:
        """A utility by name. Raises ``ConfigError`` for one that does not exist."""
        self._live()
        if name not in self._utilities:
            raise ConfigError(
                f"utility {name!r} is not available; there are: {', '.join(self._utilities)}"
            )
        return self._utilities[name](*args)

    def shutdown(self) -> None:
        """Let go of model and memory; harmless when repeated."""
        if self._core is not None:
            self._core.scheduler.shutdown()
            self._core = None

    # -- utilities

    def _reset_prefix_cache(self, reset_running: bool = False) -> bool:
        return self._live().scheduler.reset_prefix_cache(reset_running)

    def _pause(self, what: str = "all") -> None:
        if what not in PAUSES:
            raise ConfigError(f"pause of {what!r} is not known; there are: {', '.join(PAUSES)}")
        self._set_pause_state(PAUSES[what])

    def _resume(self) -> None:
        self._set_pause_state(PauseState.UNPAUSED)

    def _set_pause_state(self, state: PauseState) -> None:
        try:
            self._live().scheduler.set_pause_state(state)
        except NotImplementedError as error:
            raise ConfigError(f"the scheduler of this engine knows no pause: {error}") from error

    # -- helpers

    def _live(self) -> EngineCore:
        if self._cause is not None:
            cause = f"{type(self._cause).__name__}: {self._cause}"
            raise EngineDeadError(f"the engine core died: {cause}") from self._cause
        if self._core is None:
            raise EngineDeadError("the engine was shut down")
        return self._core
