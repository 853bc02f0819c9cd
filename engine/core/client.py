"""A client of a core in the same process."""

from __future__ import annotations

from typing import Any

from engine.config.decide import Decided
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, EngineDeadError
from engine.messages.outputs import CoreOutputs
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats


class InprocClient:
    """Calls the core directly; ``step`` runs one engine step in the caller's thread.

    Once a step has raised, or after ``shutdown``, every call raises ``EngineDeadError``.
    """

    def __init__(self, core: EngineCore, decided: Decided) -> None:
        self.decided = decided
        self._core: EngineCore | None = core
        self._cause: BaseException | None = None

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` for a live id or one that can never fit."""
        self._live().scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """Finish these; unknown ids do nothing. No output follows."""
        self._live().scheduler.finish_requests(request_ids, "abort")

    def step(self) -> list[CoreOutputs]:
        """One engine step; [] when it brought nothing."""
        core = self._live()
        try:
            return list(core.step().values())
        except Exception as error:
            self._cause = error
            raise EngineDeadError(
                f"the engine core died: {type(error).__name__}: {error}"
            ) from error

    def has_unfinished(self) -> bool:
        return self._core is not None and self._core.scheduler.has_unfinished_requests()

    def num_unfinished(self) -> int:
        return 0 if self._core is None else self._core.scheduler.get_num_unfinished_requests()

    def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler, ``None`` if it keeps none."""
        stats: SchedulerStats | None = self._live().scheduler.make_stats()
        return stats

    def call(self, name: str, *args: Any) -> Any:
        """A utility by name. Raises ``ConfigError`` for one that does not exist."""
        utilities = {"reset_prefix_cache": self._live().scheduler.reset_prefix_cache}
        if name not in utilities:
            raise ConfigError(
                f"utility {name!r} is not available; there are: {', '.join(utilities)}"
            )
        return utilities[name](*args)

    def shutdown(self) -> None:
        """Let go of model and memory; harmless when repeated."""
        if self._core is not None:
            self._core.scheduler.shutdown()
            self._core = None

    def _live(self) -> EngineCore:
        if self._cause is not None:
            raise EngineDeadError(f"the engine core died: {self._cause}") from self._cause
        if self._core is None:
            raise EngineDeadError("the engine was shut down")
        return self._core
