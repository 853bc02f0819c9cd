"""Replays a step log: feeds its inputs to a new scheduler and compares the plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.cache import CacheConfig
from engine.config.kv_groups import FULL, Group
from engine.config.sched import SchedulerConfig
from engine.core.build import (
    choose_all,
    make_hasher,
    with_recorded_features,
)
from engine.core.recording import OBJECT
from engine.errors import ConfigError, RequestError
from engine.kv.manager import KVManager
from engine.messages.step import StepPlan
from engine.observe import steplog
from engine.observe.steplog import Header, PlanCoder, PlanColumns, StepLog
from engine.sched.interface import PauseState, SchedulerInterface, StepOutputs
from engine.sched.plugins.find import make_scheduler
from engine.sched.predict.headroom import Judgement
from engine.sched.predict.loads import LoadChoice
from engine.sched.request import Request

NOTHING = "nothing"
SHOWN = 24  # characters of a request's id


class PlanDifference(NamedTuple):
    """The first difference between a recorded plan (``then``) and the new plan (``now``).
    ``request_id`` is empty if the difference concerns several requests."""

    step: int
    request_id: str
    then: str
    now: str

    def __str__(self) -> str:
        shown = self.request_id[:SHOWN] + ("..." if len(self.request_id) > SHOWN else "")
        about = f", request {shown}" if shown else ""
        return f"step {self.step}{about}: recorded {self.then}, now {self.now}"


class Replayed(NamedTuple):
    """The number of replayed steps, and the first difference of plans, if any."""

    num_steps: int  # number of equal plans
    num_requests: int
    difference: PlanDifference | None
    ranks: Sequence[tuple[float, float, float]] = ()
    """For each rank the seconds of its steps, and those in which it waited for other ranks and for
    other stages; (): one worker computed the model, or the log is an older one."""

    def __str__(self) -> str:
        if self.difference is None:
            return f"identical: {self.num_steps} steps, {self.num_requests} requests"
        return (
            f"first difference after {self.num_steps} identical steps, empty ones not counted: "
            f"{self.difference}"
        )


class ReplayClock:
    """A clock that returns the recorded readings of the call that is being replayed."""

    def __init__(self) -> None:
        self._last = 0.0
        self._coming: deque[float] = deque()

    def set(self, times: list[float]) -> None:
        self._coming = deque(times)

    def __call__(self) -> float:
        if self._coming:
            self._last = self._coming.popleft()
        return self._last  # the replayed scheduler reads the clock more often


def replay(
    log: str | Path,
    *,
    policy: Any = None,
    resources: tuple[Any, ...] | None = None,
    allow_truncated: bool = False,
    **changes: Any,
) -> Replayed:
    """Replay a step log and compare the plans, up to the first difference.

    ``policy``, ``resources`` and ``changes`` (fields of ``SchedulerConfig``) replace the recorded
    options. Raises ``ConfigError`` for invalid options and a log that cannot be read."""
    recorded = StepLog(log, allow_truncated=allow_truncated)
    if policy is not None:
        changes = {"policy_options": {}, **changes, "scheduling_policy": policy}
    if resources is not None:
        changes["resources"] = resources
    return Replay(recorded.header, changes).run(recorded)


def groups_of(header: Header) -> tuple[Group, ...]:
    """The KV groups of the engine that wrote a step log."""
    return tuple(_group(*values) for values in header.kv_groups) or (FULL,)


def _group(window: int, max_blocks: int, is_chunked: int = 0) -> Group:
    """The KV group of an entry of ``Header.kv_groups``; former logs have no third number."""
    return Group(window=window, max_blocks=max_blocks, is_chunked=bool(is_chunked))


def _scheduler_config(header: Header, changes: dict[str, Any]) -> SchedulerConfig:
    options = {**header.scheduler, **changes}
    _check_names(SchedulerConfig, options, "a scheduler")
    policy = options.get("scheduling_policy")
    if isinstance(policy, str) and policy.startswith(OBJECT):
        raise ConfigError(
            f"scheduling_policy was given as an {policy}, whose arguments are not in the log; give "
            f"`metronome replay` --policy {policy.removeprefix(OBJECT)} and --policy-options, or "
            "record with the dotted path and policy_options"
        )
    _check_objects(options, "record with its class or dotted path")
    resources = options["resources"]
    if isinstance(resources, list):  # JSON has no tuples
        options["resources"] = tuple(resources)
    return SchedulerConfig(**options)


def _check_objects(options: dict[str, Any], way_out: str) -> None:
    """Raise ``ConfigError`` for an option that was given as an object."""
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item.startswith(OBJECT):
                raise ConfigError(
                    f"{name} was given as an {item}, which cannot be created from the log; "
                    f"{way_out}"
                )


def _check_names(cls: type, options: dict[str, Any], owner: str) -> None:
    known = [option.name for option in fields(cls)]
    if unknown := options.keys() - set(known):
        raise ConfigError(
            f"{min(unknown)!r} is not an option of {owner}; there are: {', '.join(known)}"
        )


class Replay:
    """Replays records with a new scheduler. ``outputs`` is called with the outputs of each step."""

    def __init__(
        self,
        header: Header,
        changes: dict[str, Any],
        outputs: Callable[[StepOutputs], object] = lambda _: None,
    ) -> None:
        config = _scheduler_config(header, changes)
        self.config = config
        _check_names(CacheConfig, header.cache, "the KV cache")
        _check_objects(header.cache, "give its class when you record")
        cache = CacheConfig(**header.cache)
        chosen = choose_all(config)
        self.kv = KVManager(
            chosen.pool(header.num_blocks),
            header.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            hasher=make_hasher(cache, header.seed),
            groups=groups_of(header),
        )
        if header.snapshot_blocks:
            self.kv.keep_states(header.snapshot_blocks, cache.state_snapshot_interval or 0)
        self._outputs = outputs
        self._clock = ReplayClock()
        chosen = with_recorded_features(chosen, header, cache)
        self.scheduler: SchedulerInterface = make_scheduler(
            config, self.kv, clock=self._clock, seed=header.seed, chosen=chosen
        )
        self._plans = PlanCoder()
        self._flight: deque[StepPlan] = deque()
        self._ids: dict[int, str] = {}  # by row
        self._num_steps = 0
        self._num_requests = 0
        self._step = 0  # number of the last plan
        self.ranks: Sequence[tuple[float, float, float]] = ()
        self.last_plan: StepPlan

    def run(self, records: StepLog) -> Replayed:
        """Replay all records, or those up to the first difference."""
        difference = None
        coming = iter(records)
        for record in coming:
            if isinstance(record, steplog.AddCall):
                outcome = next(coming, None)
                if outcome is None:  # the engine ended during the call
                    break
                assert isinstance(outcome, steplog.AddResult)
                difference = self._add(record, outcome)
            else:
                difference = self._repeat(record)
            if difference is not None:
                break
        return Replayed(self._num_steps, self._num_requests, difference, self.ranks)

    def _repeat(self, record: steplog.Record) -> PlanDifference | None:
        """Repeat one recorded call. Returns how the new plan differs from the recorded one;
        ``None`` if the plans are equal or the call made no plan."""
        scheduler = self.scheduler
        assert not isinstance(record, steplog.AddCall)
        self._clock.set(record.times)
        match record:
            case steplog.PlanRecord():
                return self._plan(record)
            case steplog.TimedDecision() | steplog.LoadDecision():
                scheduler.expect_judgement(recorded_decision(record))
            case steplog.ResultRecord():
                plan = self._flight.popleft()
                self._outputs(scheduler.update_from_output(plan, steplog.result_of(record, plan)))
            case steplog.OutputsCall():
                self._outputs(scheduler.take_outputs())
            case steplog.FinishCall():
                scheduler.finish_requests(record.request_ids, record.reason)
            case steplog.WakeCall():
                scheduler.wake(record.request_id)
            case steplog.ArrivalCall() | steplog.LoadedCall():
                self._come(record)
            case steplog.RanksRecord():
                self.ranks = record.ranks
            case steplog.PauseCall() | steplog.ResetCall() | steplog.EncoderResetCall():
                self._control(record)
        return None

    def _come(self, record: steplog.ArrivalCall | steplog.LoadedCall) -> None:
        if isinstance(record, steplog.ArrivalCall):
            self.scheduler.arrived(record.arrival)
        else:
            self.scheduler.transferred(record.report)

    def _control(
        self, record: steplog.PauseCall | steplog.ResetCall | steplog.EncoderResetCall
    ) -> None:
        if isinstance(record, steplog.PauseCall):
            self.scheduler.set_pause_state(PauseState(record.state))
        elif isinstance(record, steplog.ResetCall):
            self.scheduler.reset_prefix_cache(record.reset_running)
        else:
            self.scheduler.reset_encoder_cache()

    def _add(self, adding: steplog.AddCall, added: steplog.AddResult) -> PlanDifference | None:
        self._clock.set(added.times)
        self._num_requests += 1
        request_id, error = adding.request.request_id, ""
        try:
            req = self.scheduler.add_request(adding.request)
            if isinstance(req, Request):  # else messages show the row number
                self._ids[req.row] = request_id
        except RequestError as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
        if bool(error) == bool(added.error):
            return None
        return PlanDifference(self._step, request_id, added.error or "taken", error or "taken")

    def _plan(self, planned: steplog.PlanRecord) -> PlanDifference | None:
        plan = self.last_plan = self.scheduler.schedule()
        then = self._plans.decode(planned)
        self._step = planned.step
        difference = self._compare(planned, then, plan)
        if difference is None and not plan.is_empty:
            self._num_steps += 1
            self._flight.append(plan)
        return difference

    def _compare(
        self, planned: steplog.PlanRecord, then: PlanColumns, plan: StepPlan
    ) -> PlanDifference | None:
        """Return the first difference between the recorded plan ``then`` and the new ``plan``, in a
        request's tokens or else in another field; ``None`` if they are equal."""
        shares_then = _shares(then)
        shares_now = _shares(PlanColumns.of(plan))
        for row in shares_then | shares_now:
            before, after = shares_then.get(row, NOTHING), shares_now.get(row, NOTHING)
            if before != after:
                return self._difference(self._name(row), before, after)
        if list(shares_then) != list(shares_now):
            orders = [", ".join(map(self._name, shares)) for shares in (shares_then, shares_now)]
            return self._difference("", f"the order {orders[0]}", orders[1])
        new = [seq.request_id for seq in plan.new]
        if new != planned.new:
            return self._difference("", f"new to the worker {planned.new}", str(new))
        digest = steplog.digest_of(plan)
        if digest != planned.digest:
            what = "slots, blocks or messages with digest"
            return self._difference("", f"{what} {planned.digest.hex()}", digest.hex())
        return None

    def _name(self, row: int) -> str:
        return self._ids.get(row, f"in row {row}")

    def _difference(self, request_id: str, then: str, now: str) -> PlanDifference:
        return PlanDifference(self._step, request_id, then, now)


def recorded_decision(record: steplog.Decision) -> Judgement | LoadChoice:
    """Restore a decision from its record."""
    if isinstance(record, steplog.LoadDecision):
        return LoadChoice(record.step, record.request_id, record.stores)
    return Judgement(record.step, record.is_kept)


def _shares(columns: PlanColumns) -> dict[int, str]:
    """Describe, for each batch row of a plan, which tokens of the row's request are computed."""
    return {
        row: f"{count} tokens from position {start}"
        for row, count, start in zip(*(column.tolist() for column in columns), strict=True)
    }
