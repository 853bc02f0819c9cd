"""A client of a core in the same process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.config.decide import Decided
from engine.core.control import Utilities
from engine.core.engine_core import EngineCore
from engine.core.polling import Work
from engine.errors import EngineDeadError
from engine.messages.check import check_request
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.sched.interface import StepOutputs

IDLE_SECONDS = 0.001  # between two looks while all that is left waits for something


class InprocClient:
    """Calls the core directly; ``step`` runs one engine step in the caller's thread.

    Once a step has raised, or after ``shutdown``, every call raises ``EngineDeadError``.
    """

    id_prefix = ""
    """What request ids should begin with so that no other client has the same: there is none."""

    def __init__(self, core: EngineCore, decided: Decided) -> None:
        self.decided = decided
        self._core: EngineCore | None = core
        self._cause: BaseException | None = None
        self._utilities = Utilities(core.scheduler, core.executor)

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` for a live id or one that can never fit, and
        ``RefusedError`` for one that is not taken now."""
        core = self._live()
        check_request(request, self.decided.vocab_size, self.decided.capabilities)
        core.scheduler.add_request(request)

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        """Queue these, in order. Returns what ``add`` raised, by place; {} if all were taken."""
        errors: dict[int, Exception] = {}
        for index, request in enumerate(requests):
            try:
                self.add(request)
            except EngineDeadError:
                raise
            except Exception as error:  # a request its policy chokes on fails alone
                errors[index] = error
        return errors

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
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
        outputs = list(self.turn().values())
        if not outputs and self.is_idle:
            time.sleep(IDLE_SECONDS)
        return outputs

    def turn(self) -> StepOutputs:
        """One engine step; what it brought by client index. Never sleeps."""
        core = self._live()
        try:
            return core.step()
        except BaseException as error:  # whatever it was, the step is half done
            self._cause = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(
                f"the engine core died: {type(error).__name__}: {error}"
            ) from error

    def wake(self) -> None:
        """Let ``step`` return soon, if it waits in another thread: here it never waits long."""

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` if the core has died."""
        self._live()

    @property
    def is_idle(self) -> bool:
        """Did the last step find nothing to compute and nothing to settle?"""
        return self._live().is_idle

    def next_work(self, num_moved: int) -> Work:
        """What the next step would do, after one in which so many requests got tokens."""
        counts = self._live().scheduler.get_request_counts()
        return "prefill" if counts.waiting or counts.running > num_moved else "decode"

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
        return self._utilities.call(name, args)

    def shutdown(self) -> None:
        """Let go of model and memory; harmless when repeated."""
        if self._core is not None:
            self._core.executor.shutdown()
            self._core.scheduler.shutdown()
            self._core = None

    def _live(self) -> EngineCore:
        if self._cause is not None:
            cause = f"{type(self._cause).__name__}: {self._cause}"
            raise EngineDeadError(f"the engine core died: {cause}") from self._cause
        if self._core is None:
            raise EngineDeadError("the engine was shut down")
        return self._core
