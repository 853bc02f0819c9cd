"""Records the inputs and plans of a scheduler in a step log, for ``replay``."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.errors import RequestError
from engine.kv.changes import CacheChanges
from engine.kv.manager import KVManager
from engine.messages.kv_orders import Loaded
from engine.messages.requests import AddRequest, Arrival, FinishReason
from engine.messages.stats import RankUse, SchedulerStats
from engine.messages.step import Masks, StepPlan, StepResult
from engine.observe import steplog
from engine.observe.guard import Failures, ObserverGuard
from engine.observe.steplog import FORMAT, Header, PlanCoder, Record, StepLogWriter
from engine.sched.interface import (
    FinishedRequest,
    PauseState,
    RequestCounts,
    SchedulerInterface,
    StepOutputs,
)
from engine.sched.predict.headroom import Judgement
from engine.sched.predict.loads import LoadChoice

Clock = Callable[[], float]
RANK_SECONDS = 1.0  # of steps, between two records of ranks
STEP_LOG = "step_log"  # name in the counters
OBJECT = "object of "  # marks an option given as an object, which a replay cannot create


class RecordedClock:
    """A clock that remembers its readings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readings: list[float] = []

    def __call__(self) -> float:
        now = self._clock()
        self._readings.append(now)
        return now

    def take(self) -> list[float]:
        """Return the readings since the last call of ``take``."""
        readings, self._readings = self._readings, []
        return readings


def record(
    path: str | Path,
    header: Header,
    make: Callable[[Clock], SchedulerInterface],
    clock: Clock,
    failures: Failures | None = None,
) -> RecordingScheduler:
    """Create a scheduler with ``make`` and record it in a file. Raises ``ConfigError``.

    If writing the log fails, the error is counted in ``failures`` and the recording ends."""
    recorded = RecordedClock(clock)
    effect = f"the log {str(path)!r} ends here and can be replayed up to here"
    guard = ObserverGuard(failures or Failures(), STEP_LOG, effect, stops=True)
    return RecordingScheduler(make(recorded), recorded, StepLogWriter(path, header), guard)


def describe(
    config: SchedulerConfig,
    cache: CacheConfig,
    kv: KVManager,
    seed: int,
    max_loras: int = 0,
    encoder_sizes: Sequence[int] = (),
    num_stores: int = 0,
) -> Header:
    """The header of a step log: all that is needed to create an identical scheduler for a
    replay. max_loras: 0 if requests have no adapters; others: see ``Header``."""
    return Header(
        format=FORMAT,
        version=version("metronome-engine"),
        scheduler=_fields(config),
        cache=_fields(cache),
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        seed=seed,
        kv_groups=[(g.window, g.max_blocks, int(g.is_chunked)) for g in kv.groups],
        snapshot_blocks=0 if kv.states is None else kv.states.snapshots.num_blocks,
        max_loras=max_loras,
        encoder_sizes=list(encoder_sizes),
        num_stores=num_stores,
    )


def _decision(made: Judgement | LoadChoice) -> steplog.Decision:
    if isinstance(made, LoadChoice):
        return steplog.LoadDecision([], *made)
    return steplog.TimedDecision([], *made)


def _fields(options: Any) -> dict[str, Any]:
    return {option.name: _plain(getattr(options, option.name)) for option in fields(options)}


def _plain(value: Any) -> Any:
    """Convert an option to plain data: a class, or an object's class, becomes a dotted path."""
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
    """Wraps a scheduler and records each call that changes it.

    Calls that the scheduler makes to its own ``wake`` are not recorded, since a replay repeats
    them. If writing the log fails, the recording ends and the scheduler continues."""

    def __init__(
        self,
        inner: SchedulerInterface,
        clock: RecordedClock,
        log: StepLogWriter,
        guard: ObserverGuard,
    ) -> None:
        self.inner = inner
        self._clock = clock
        self._log = log
        self._guard = guard
        self._plans = PlanCoder()
        self.rank_uses: Callable[[], Sequence[RankUse]] = tuple
        """Returns what the ranks of the core do, which is recorded about once a second."""
        self._unrecorded = 0.0  # seconds of steps since then
        atexit.register(self._close)  # runs before the log's own handler, which may raise

    def add_request(self, add: AddRequest) -> object:
        try:
            self._write(steplog.AddCall(add))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # not plain data
            raise RequestError(
                f"request {add.request_id!r} cannot be recorded in step_log: {error}; give plain "
                "data, or switch step_log off"
            ) from error
        try:
            req = self.inner.add_request(add)
        except Exception as error:
            story = f"{type(error).__name__}: {error}"
            self._record(lambda times: steplog.AddResult(times, story))
            raise
        self._record(steplog.AddResult)
        return req

    def schedule(self) -> StepPlan:
        plan = self.inner.schedule()
        for judgement in self.inner.take_judgements():
            self._guard.run(self._log.write, _decision(judgement))
        self._record(lambda times: self._plans.encode(plan, times))
        return plan

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        outputs = self.inner.update_from_output(plan, result)
        self._record(lambda times: steplog.settled(plan, result, times))
        self._unrecorded += result.seconds
        if self._unrecorded >= RANK_SECONDS:
            self._record_ranks()
        return outputs

    def take_outputs(self) -> StepOutputs:
        outputs = self.inner.take_outputs()
        self._record(steplog.OutputsCall)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, reason: FinishReason = "abort"
    ) -> list[FinishedRequest]:
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        names = None if request_ids is None else list(request_ids)
        finished = self.inner.finish_requests(names, reason)
        self._record(lambda times: steplog.FinishCall(times, names, reason))
        return finished

    def wake(self, request_id: str) -> None:
        self.inner.wake(request_id)
        self._record(lambda times: steplog.WakeCall(times, request_id))

    def arrived(self, arrival: Arrival) -> None:
        self.inner.arrived(arrival)
        self._record(lambda times: steplog.ArrivalCall(times, arrival))

    def transferred(self, report: Loaded) -> None:
        self.inner.transferred(report)
        self._record(lambda times: steplog.LoadedCall(times, report))

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        answer = self.inner.reset_prefix_cache(reset_running)
        self._record(lambda times: steplog.ResetCall(times, reset_running))
        return answer

    def reset_encoder_cache(self) -> None:
        self.inner.reset_encoder_cache()
        self._record(lambda times: steplog.EncoderResetCall(times))

    def follow_cache(self) -> CacheChanges | None:
        return self.inner.follow_cache()

    def set_pause_state(self, state: PauseState) -> None:
        self.inner.set_pause_state(state)
        self._record(lambda times: steplog.PauseCall(times, state.value))

    def shutdown(self) -> None:
        self._record_ranks()
        self._close()
        self.inner.shutdown()

    def _record(self, make: Callable[[list[float]], Record]) -> None:
        """Write a record, which ``make`` creates from all clock readings since the last record."""
        times = self._clock.take()
        self._guard.run(lambda: self._log.write(make(times)))

    def _write(self, record: Record) -> None:
        """Write a record. Raises the encoder's error if a value cannot be encoded as plain data."""
        if not self._guard.is_stopped:
            try:
                self._log.write(record)
            except OSError as error:
                self._guard.fail(error)

    def _record_ranks(self) -> None:
        self._unrecorded = 0.0
        if uses := self.rank_uses():
            ranks = [(use.step_seconds, use.wait_seconds, use.stage_wait_seconds) for use in uses]
            self._guard.run(self._log.write, steplog.RanksRecord([], ranks))

    def _close(self) -> None:
        atexit.unregister(self._close)
        self._guard.run(self._log.close)

    # -- queries

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

    def make_stats(self) -> SchedulerStats | None:
        return self.inner.make_stats()
