"""A scheduler that records its inputs and its plans, for ``replay``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.errors import RequestError
from engine.kv.connector import KVSource
from engine.kv.manager import KVManager
from engine.messages.requests import AddRequest, FinishReason
from engine.messages.stats import SchedulerStats
from engine.messages.step import Masks, StepPlan, StepResult
from engine.observe import steplog
from engine.observe.steplog import FORMAT, Header, PlanCoder, StepLogWriter
from engine.sched.interface import (
    FinishedRequest,
    PauseState,
    RequestCounts,
    SchedulerInterface,
    StepOutputs,
)

Clock = Callable[[], float]
OBJECT = "object of "  # marks an option given as an object: a replay cannot make it again


class RecordedClock:
    """Passes on a clock's readings and remembers them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readings: list[float] = []

    def __call__(self) -> float:
        now = self._clock()
        self._readings.append(now)
        return now

    def take(self) -> list[float]:
        """Readings since the last call."""
        readings, self._readings = self._readings, []
        return readings


def record(
    path: str | Path, header: Header, make: Callable[[Clock], SchedulerInterface], clock: Clock
) -> RecordingScheduler:
    """The scheduler that ``make`` makes, recorded in a file. Raises ``ConfigError``."""
    recorded = RecordedClock(clock)
    return RecordingScheduler(make(recorded), recorded, StepLogWriter(path, header))


def describe(config: SchedulerConfig, cache: CacheConfig, kv: KVManager, seed: int) -> Header:
    """The header of the log: what is needed to make the same scheduler again."""
    return Header(
        format=FORMAT,
        version=version("metronome-engine"),
        scheduler=_fields(config),
        cache=_fields(cache),
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        seed=seed,
    )


def _fields(options: Any) -> dict[str, Any]:
    return {option.name: _plain(getattr(options, option.name)) for option in fields(options)}


def _plain(value: Any) -> Any:
    """Options as plain data: classes by their dotted path, other objects by that of their class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return OBJECT + _plain(type(value))


class RecordingScheduler(SchedulerInterface):
    """Stands in for ``inner``. Questions that change nothing are not recorded.

    What a resource wakes within a call it will wake again in the replay; a ``wake`` from outside
    goes through this object.
    """

    def __init__(self, inner: SchedulerInterface, clock: RecordedClock, log: StepLogWriter) -> None:
        self.inner = inner
        self._clock = clock
        self._log = log
        self._plans = PlanCoder()

    def add_request(self, add: AddRequest) -> object:
        try:
            self._log.write(steplog.Adding(add))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # no plain data
            raise RequestError(
                f"request {add.request_id!r} cannot be recorded: {error}; give plain data, or "
                "switch step_log off"
            ) from error
        try:
            req = self.inner.add_request(add)
        except Exception as error:
            self._log.write(steplog.Added(self._clock.take(), f"{type(error).__name__}: {error}"))
            raise
        self._log.write(steplog.Added(self._clock.take()))
        return req

    def schedule(self) -> StepPlan:
        plan = self.inner.schedule()
        for judgement in self.inner.take_judgements():
            self._log.write(steplog.Judged([], *judgement))
        self._log.write(self._plans.encode(plan, self._clock.take()))
        return plan

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        outputs = self.inner.update_from_output(plan, result)
        self._log.write(steplog.settled(plan, result, self._clock.take()))
        return outputs

    def take_outputs(self) -> StepOutputs:
        outputs = self.inner.take_outputs()
        self._log.write(steplog.Taken(self._clock.take()))
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[FinishedRequest]:
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        names = None if request_ids is None else list(request_ids)
        finished = self.inner.finish_requests(names, reason)
        self._log.write(steplog.Ended(self._clock.take(), names, reason))
        return finished

    def wake(self, request_id: str) -> None:
        self.inner.wake(request_id)
        self._log.write(steplog.Woken(self._clock.take(), request_id))

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        answer = self.inner.reset_prefix_cache(reset_running)
        self._log.write(steplog.Reset(self._clock.take(), reset_running))
        return answer

    def set_pause_state(self, state: PauseState) -> None:
        self.inner.set_pause_state(state)
        self._log.write(steplog.Paused(self._clock.take(), state.value))

    def shutdown(self) -> None:
        self._log.close()
        self.inner.shutdown()

    # -- questions

    def get_request_counts(self) -> RequestCounts:
        return self.inner.get_request_counts()

    def has_finished_requests(self) -> bool:
        return self.inner.has_finished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.inner.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        return self.inner.has_unfinished_requests()

    def has_requests(self) -> bool:
        return self.inner.has_requests()

    def masks(self, plan: StepPlan) -> Masks | None:
        return self.inner.masks(plan)

    def get_kv_connector(self) -> KVSource | None:
        return self.inner.get_kv_connector()

    def make_stats(self) -> SchedulerStats | None:
        return self.inner.make_stats()
