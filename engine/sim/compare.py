"""Policies side by side on the same requests.

The scheduler, the KV manager and the step loop are those that serve; only the clock, the requests
and how long a step takes are made up. Time that a policy itself takes is measured, not simulated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Any, NamedTuple

from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, RefusedError
from engine.kv.manager import KVManager
from engine.messages.requests import CoreOutputs
from engine.sched.plugins.find import choose, make_scheduler
from engine.sim.worker import StepCost, TimedWorker, VirtualClock
from engine.sim.workload import Job, Workload, draw

IDLE_SECONDS = 0.005  # between two looks while all that is left waits for its time
MAX_IDLE_LOOKS = 200_000  # so, a quarter of an hour
MAX_LOAD = 1000.0


class Variant(NamedTuple):
    """A policy with arguments of its constructor, to stand beside itself with others."""

    policy: Any
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{_name(self.policy)}({options})"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine that is simulated."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_blocks: int = 700
    block_size: int = 16
    depth: int = 1
    length_predictor: Any = "none"
    cost: StepCost = field(default_factory=StepCost)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of one policy. Times in seconds of the virtual clock, of finished requests."""

    policy: str
    ttft: list[float]
    """From arrival to first token, ascending."""
    e2e: list[float]
    """From arrival to last token, ascending."""
    seconds: float
    """Until everything was done."""
    output_tokens: int
    num_preemptions: int
    recompute_share: float
    """Of all computed tokens, those that had been computed before."""
    kv_peak: float
    """Largest share of the KV pool in use."""
    num_refused: int
    """Requests that were not taken, or ended with an error or at a deadline."""
    num_steps: int
    hook_seconds: float
    """Real time in hooks of the policy: the one figure that differs from run to run."""
    num_faults: int
    """Wrong answers of the policy; the log names them."""
    num_rescued: int
    """Steps that the default planned since the policy ran nothing."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Policies at the same load."""

    capacity: float
    """Requests a second that fcfs can serve."""
    rate: float
    """Requests a second that came."""
    figures: list[Figures]


def compare(policies: Sequence[Any], workload: Workload, engine: Engine, load: float) -> Comparison:
    """Each policy on the same requests, which come at ``load`` times the engine's capacity.

    A policy is given as to the engine, or as a ``Variant`` of one. Raises ``ConfigError`` for
    options that cannot work, before anything is simulated.
    """
    if not policies:
        raise ConfigError("there is no policy to compare; name one, such as 'fcfs'")
    if not 0 < load <= MAX_LOAD:
        raise ConfigError(f"load is {load}, must be above 0, and at most {MAX_LOAD:g}")
    CacheConfig(block_size=engine.block_size, num_kv_blocks=engine.num_blocks)
    for policy in policies:
        choose(_config(policy, workload, engine))
    jobs = draw(workload)
    capacity = _capacity(simulate("fcfs", jobs, workload, engine, rate=None))
    rate = load * capacity
    figures = [simulate(policy, jobs, workload, engine, rate) for policy in policies]
    return Comparison(capacity=capacity, rate=rate, figures=figures)


def simulate(
    policy: Any,
    jobs: Sequence[Job],
    workload: Workload,
    engine: Engine,
    rate: float | None,
    *,
    max_idle_looks: int = MAX_IDLE_LOOKS,
) -> Figures:
    """One policy on these requests, ``rate`` of them a second (``None``: all at once).

    Raises ``ConfigError`` for one that computes nothing in ``max_idle_looks`` looks in a row.
    """
    return _Run(policy, jobs, workload, engine).finish(rate, max_idle_looks)


def _capacity(at_once: Figures) -> float:
    """Requests a second in the middle of a run in which all had come at once: at its ends seats
    and blocks are not all in use."""
    first, last = percentile(at_once.e2e, 0.2), percentile(at_once.e2e, 0.8)
    return 0.6 * len(at_once.e2e) / (last - first) if last > first else 1.0 / at_once.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the ascending values that at least this share does not exceed."""
    return values[max(0, ceil(share * len(values)) - 1)] if values else 0.0


def mean(values: Sequence[float]) -> float:
    """Their mean, 0 if there are none."""
    return fmean(values) if values else 0.0


def _config(policy: Any, workload: Workload, engine: Engine) -> SchedulerConfig:
    policy, options = policy if isinstance(policy, Variant) else (policy, {})
    return SchedulerConfig(
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=workload.max_model_len,
        scheduling_policy=policy,
        policy_options=options,
        length_predictor=engine.length_predictor,
    )


class _Run:
    """A core, a virtual clock and the times that were seen."""

    def __init__(
        self, policy: Any, jobs: Sequence[Job], workload: Workload, engine: Engine
    ) -> None:
        self._policy = policy
        self._jobs = {job.request_id: job for job in jobs}
        self._max_tokens = workload.output_tokens[1]
        self._clock = VirtualClock()
        self._kv = KVManager(engine.num_blocks, engine.block_size)
        scheduler = make_scheduler(
            _config(policy, workload, engine), self._kv, clock=self._clock, timer=time.perf_counter
        )
        lengths = {job.request_id: job.num_output for job in jobs}
        worker = TimedWorker(self._clock, engine.cost, engine.max_num_seqs, lengths)
        self._core = EngineCore(scheduler, worker, engine.depth)
        self._tells_length = engine.length_predictor == "oracle"
        self._arrived: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num_refused = 0
        self._kv_peak = 0.0

    def finish(self, rate: float | None, max_idle_looks: int = MAX_IDLE_LOOKS) -> Figures:
        """All requests to their ends."""
        coming = deque((job.gaps / rate if rate else 0.0, job) for job in self._jobs.values())
        num_idle = 0
        while coming or self._core.has_work:
            while coming and coming[0][0] <= self._clock.now:
                self._add(*coming.popleft())
            self._note(self._core.step().values())
            self._kv_peak = max(self._kv_peak, self._kv.usage)
            if not self._core.is_idle:
                num_idle = 0
                continue
            num_idle += 1
            if num_idle > max_idle_looks:
                raise ConfigError(
                    f"policy {self._policy!r} never lets its requests end: for "
                    f"{max_idle_looks * IDLE_SECONDS:g} s nothing was computed"
                )
            until = coming[0][0] if coming else self._clock.now + IDLE_SECONDS
            if self._core.scheduler.has_unfinished_requests():
                until = min(until, self._clock.now + IDLE_SECONDS)
            self._clock.now = until
        return self._figures()

    def _add(self, arrival: float, job: Job) -> None:
        self._arrived[job.request_id] = arrival
        request = job.request(arrival, self._max_tokens, tell_length=self._tells_length)
        try:
            self._core.scheduler.add_request(request)
        except RefusedError:
            self._num_refused += 1

    def _note(self, batches: Iterable[CoreOutputs]) -> None:
        for batch in batches:
            for started in batch.started:
                self._first[batch.request_ids[started.index]] = batch.time
            for end in batch.finished:
                if end.reason in ("stop", "length"):
                    self._last[batch.request_ids[end.index]] = batch.time
                else:
                    self._num_refused += 1

    def _figures(self) -> Figures:
        stats = self._core.scheduler.make_stats()
        assert stats is not None
        done = [self._jobs[name] for name in self._last]
        needed = sum(len(job.prompt) + job.num_output - 1 for job in done) - stats.prefix_hits
        computed = stats.num_scheduled_tokens
        return Figures(
            policy=_name(self._policy),
            ttft=sorted(self._first[name] - self._arrived[name] for name in self._first),
            e2e=sorted(last - self._arrived[name] for name, last in self._last.items()),
            seconds=max(self._last.values(), default=0.0),
            output_tokens=sum(job.num_output for job in done),
            num_preemptions=stats.num_preemptions,
            recompute_share=max(0, computed - needed) / max(1, computed),
            kv_peak=self._kv_peak,
            num_refused=self._num_refused,
            num_steps=stats.num_steps,
            hook_seconds=sum(stats.hook_seconds.values()),
            num_faults=stats.num_policy_faults,
            num_rescued=stats.num_rescued_steps,
        )


def _name(policy: Any) -> str:
    if isinstance(policy, str | Variant):
        return str(policy)
    return policy.__name__ if isinstance(policy, type) else type(policy).__name__
