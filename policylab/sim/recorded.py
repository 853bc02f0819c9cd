"""Step logs of real engines, as runs with figures and as input of a simulation.

A step log holds all inputs of a scheduler and all times that it read. ``read_log`` turns a log into
a run. ``resimulate`` feeds the log's inputs to a simulated engine, at the recorded times and with
the recorded output lengths, and compares every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.replay import (
    NOTHING,
    PlanDifference,
    Replay,
    Replayed,
    groups_of,
    recorded_decision,
)
from engine.errors import ConfigError
from engine.messages.requests import AddRequest
from engine.messages.step import Column, StepPlan, StepResult
from engine.observe import steplog
from engine.observe.steplog import Header, StepLog
from engine.sched.interface import SchedulerInterface, StepOutputs
from engine.sched.predict.profile import Profile
from policylab.sim.job import FILLER, Job, Span
from policylab.sim.kv_groups import KVPeaks, size_of
from policylab.sim.pooled import PooledSlots
from policylab.sim.records import Seen, totals_of
from policylab.sim.run import FORMAT, Engine, Run
from policylab.sim.worker import StepCost
from policylab.verify.fake import FakeExecutor

INSIDE = (
    steplog.PlanRecord,
    *steplog.DECISIONS,
    steplog.ResultRecord,
    steplog.OutputsCall,
)  # calls of a step


class RecordedEnd(NamedTuple):
    """How a request in a step log ended: its number of output tokens, and the stop token, if one
    ended it."""

    num_output: int
    token: int | None


@dataclass(frozen=True, kw_only=True)
class Log:
    """A step log: header, requests (as a run), and how each request ended, by id."""

    path: Path
    header: Header
    run: Run
    ends: dict[str, RecordedEnd]


def read_log(path: str | Path, *, allow_truncated: bool = False) -> Log:
    """Read a step log. A replay finds how each request ended. Raises ``ConfigError``."""
    log = StepLog(path, allow_truncated=allow_truncated)
    reader = LogReader(log.header)
    outcome = reader.run(log)
    if outcome.difference is not None:
        raise ConfigError(
            f"{path} cannot be replayed with its own policy: {outcome}; did the policy change?"
        )
    return Log(
        path=Path(path), header=log.header, run=reader.result(outcome, path), ends=reader.ends
    )


def resimulate(
    path: str | Path, log: Log | None = None, *, allow_truncated: bool = False, **changes: Any
) -> tuple[Replayed, Run]:
    """Feed the inputs of a step log to an engine core with a simulated worker.

    Returns the comparison of its plans with the log, up to the first difference, and the requests
    as a run. ``changes``: fields of ``SchedulerConfig``, or ``num_blocks``, that get other values
    than in the log; plans then usually differ. Raises ``ConfigError``."""
    log = log or read_log(path, allow_truncated=allow_truncated)
    header = log.header
    if (num_blocks := changes.pop("num_blocks", None)) is not None:
        header = Header(**{n: getattr(header, n) for n in header.__struct_fields__})
        header.num_blocks = num_blocks
    again = _Again(header, changes, log.ends)
    outcome = again.run(StepLog(path, allow_truncated=allow_truncated))
    return outcome, again.result(outcome, path)


class LogReader(Replay):
    """A replay of a step log that also records the outputs of each request."""

    def __init__(self, header: Header, changes: dict[str, Any] | None = None) -> None:
        super().__init__(header, changes or {}, self._note)
        self.ends: dict[str, RecordedEnd] = {}
        self._seen: Seen | None = None
        self._counts: dict[str, int] = {}  # output tokens of unfinished requests
        self._places: dict[str, int] = {}  # index in the run's columns
        self._kv_peaks = KVPeaks(self.kv.groups)

    def _add(self, adding: steplog.AddCall, added: steplog.AddResult) -> PlanDifference | None:
        if self._seen is None:
            self._seen = Seen(adding.request.arrival_time)
            self._start = adding.request.arrival_time
        job = self._job(adding.request)
        if added.error:
            self._seen.refused(job)
        else:
            self._places[job.request_id] = len(self._seen.requests)
            self._seen.came(job)
            self._counts[job.request_id] = 0
        return super()._add(adding, added)

    def _plan(self, planned: steplog.PlanRecord) -> PlanDifference | None:
        difference = super()._plan(planned)
        self._kv_peaks.note(self.kv)
        return difference

    @property
    def num_living(self) -> int:
        """The number of unfinished requests."""
        return len(self._counts)

    def _job(self, add: AddRequest) -> Job:
        return Job(
            request_id=add.request_id,
            arrival=add.arrival_time - self._start,
            prompt=(Span(add.request_id, len(add.prompt_token_ids)),),
            num_output=0,
            user=add.user,
            priority=add.priority,
            deadline=None if add.deadline is None else add.deadline - add.arrival_time,
        )

    def _note(self, outputs: StepOutputs) -> None:
        assert self._seen is not None
        for batch in outputs.values():
            counts = batch.counts or [1] * len(batch.request_ids)
            last: dict[str, int] = {}
            begin = 0
            for name, count in zip(batch.request_ids, counts, strict=True):
                if count:
                    self._counts[name] += count
                    last[name] = batch.token_ids[begin + count - 1]
                begin += count
            for end in batch.finished:
                name = batch.request_ids[end.index]
                token = last.get(name) if end.reason == "stop" else None
                self.ends[name] = RecordedEnd(self._counts.pop(name), token)
        for job, _ in self._seen.note(outputs.values()):
            place = self._places.pop(job.request_id)
            self._seen.requests.counts("num_output")[place] = self.ends[job.request_id].num_output

    def result(self, outcome: Replayed, path: str | Path) -> Run:
        """The replayed requests as a run; ``outcome`` is the replay's result."""
        seen = self._seen or Seen()
        config, stats = self.config, self.scheduler.make_stats()
        assert stats is not None
        return Run(
            head={
                "format": FORMAT,
                "kind": "recorded",
                "policy": str(config.scheduling_policy),
                "workload": f"steps-log(path={str(path)!r})",
                "engine": {
                    "max_num_seqs": config.max_num_seqs,
                    "max_num_batched_tokens": config.max_num_batched_tokens,
                    "depth": config.num_steps_in_flight,
                    "kv_groups": list(map(size_of, self.kv.groups)),
                },
            },
            requests=seen.requests,
            gaps=seen.gaps,
            steps=None,
            totals={**totals_of(stats, self._kv_peaks), "num_plans": outcome.num_steps},
        )


class _Differs(Exception):
    """Raised to end a replay: with the first plan that differs from the log, or with ``None`` when
    the log ends."""

    def __init__(self, difference: PlanDifference | None) -> None:
        super().__init__(difference)
        self.difference = difference


class _Again(LogReader):
    """Replays a step log through an engine core, which itself decides when to plan a step and when
    to process its result."""

    def __init__(
        self, header: Header, changes: dict[str, Any], ends: dict[str, RecordedEnd]
    ) -> None:
        super().__init__(header, changes)
        self._worker = _EndingWorker(self.config.max_num_seqs, ends)
        scheduler = cast(SchedulerInterface, _AsRecorded(self))
        self._core = EngineCore(scheduler, self._worker, self.config.num_steps_in_flight)
        self._coming: Iterator[steplog.Record] = iter(())
        self._next: steplog.Record | None = None

    def run(self, records: StepLog) -> Replayed:
        self._coming = (each for each in records if not isinstance(each, steplog.RanksRecord))
        self._next = next(self._coming, None)
        difference = None
        try:
            while self._next is not None:
                self._go_on()
        except _Differs as found:
            difference = found.difference
        return Replayed(self._num_steps, self._num_requests, difference)

    def _go_on(self) -> None:
        """Replay the next recorded call; if it is part of a step, let the core take that step."""
        if isinstance(self._next, INSIDE):
            self._note(self._core.step())
            return
        record = self.take()
        if isinstance(record, steplog.AddCall):
            added = self.take()
            assert isinstance(added, steplog.AddResult)
            difference = self._add(record, added)
        else:
            difference = self._repeat(record)
        if difference is not None:
            raise _Differs(difference)

    def take(self) -> steplog.Record:
        """The next record of the log. Raises ``_Differs`` at its end."""
        record, self._next = self._next, next(self._coming, None)
        if record is None:
            raise _Differs(None)
        return record

    def other_call(self, record: steplog.Record, now: str) -> NoReturn:
        """Raise ``_Differs``: the core makes the call ``now``, but the log has ``record`` next."""
        then = type(record).__name__.lower()
        raise _Differs(PlanDifference(self._step, "", then, now))

    # -- the calls of a step

    def schedule(self) -> StepPlan:
        record = self.take()
        while isinstance(record, steplog.DECISIONS):
            self.scheduler.expect_judgement(recorded_decision(record))
            record = self.take()
        if not isinstance(record, steplog.PlanRecord):
            self.other_call(record, "planned")
        self._clock.set(record.times)
        if (difference := self._plan(record)) is not None:
            raise _Differs(difference)
        return self.last_plan

    def settle(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        record = self.take()
        if not isinstance(record, steplog.ResultRecord):
            self.other_call(record, "settled")
        self._flight.popleft()
        self._clock.set(record.times)
        result.seconds = record.seconds
        return self.scheduler.update_from_output(plan, result)

    def take_outputs(self) -> StepOutputs:
        record = self.take()
        if not isinstance(record, steplog.OutputsCall):
            self.other_call(record, "taken")
        self._clock.set(record.times)
        return self.scheduler.take_outputs()


class _AsRecorded:
    """A stand-in for the scheduler that sets the clock to the recorded time before each call."""

    def __init__(self, again: _Again) -> None:
        self.schedule = again.schedule
        self.update_from_output = again.settle
        self.take_outputs = again.take_outputs
        self._scheduler = again.scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _EndingWorker(FakeExecutor):
    """A worker that computes nothing; requests end as in the log, by length and stop token."""

    capabilities = frozenset({"pooling"})

    def __init__(self, num_slots: int, ends: dict[str, RecordedEnd]) -> None:
        self._ends = ends
        self._length = np.full(num_slots, 2**31 - 1, dtype=np.int32)  # by slot: known tokens
        self._last = np.full(num_slots, FILLER, dtype=np.int32)
        self._filler = np.full(num_slots, FILLER, dtype=np.int32)
        self._pooled = PooledSlots()

    def launch(self, plan: StepPlan) -> tuple[StepPlan, Column]:
        self._pooled.follow(plan)
        for new in plan.new:
            end = self._ends.get(new.request_id)
            self._length[new.slot] = 2**31 - 1
            stops = set(new.stop_token_ids)
            filler = next(token for token in range(FILLER, len(stops) + 2) if token not in stops)
            self._last[new.slot] = self._filler[new.slot] = filler
            if end is not None and end.token is not None:
                self._length[new.slot] = new.num_prompt + end.num_output
                self._last[new.slot] = end.token
        slots = plan.slots
        known = plan.starts + plan.counts + 1
        tokens = np.where(known >= self._length[slots], self._last[slots], self._filler[slots])
        return plan, tokens.astype(np.int32)[plan.samples == 1]

    def collect(self, ticket: tuple[StepPlan, Column]) -> StepResult:
        plan, tokens = ticket
        result = StepResult(plan.step, tokens, plan.samples.copy())
        self._pooled.end(plan, result)
        return result

    def sample(self, ticket: Any, masks: Any) -> None:
        raise ConfigError(f"a log with grammars has no masks ({NOTHING}) and cannot be simulated")


def engine_of(header: Header, cost: StepCost | Profile | None = None) -> Engine:
    """Make a simulated engine with the options in a step log's header and this step cost."""
    names = {
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "num_steps_in_flight": "depth",
        "length_predictor": "length_predictor",
    }
    others = (*names, "scheduling_policy", "policy_options")
    known = [option.name for option in fields(SchedulerConfig)]
    scheduler = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in header.scheduler.items()
        if name in known and name not in others
    }
    return Engine(
        **{own: header.scheduler[name] for name, own in names.items()},
        num_blocks=header.num_blocks,
        block_size=header.block_size,
        enable_prefix_caching=bool(header.cache.get("enable_prefix_caching", True)),
        kv_groups=groups_of(header),
        max_loras=header.max_loras or Engine.max_loras,
        snapshot_blocks=header.snapshot_blocks,
        snapshot_policy=header.cache.get("state_snapshot_policy", "cost"),
        scheduler=scheduler,
        cost=cost or StepCost(),
    )
