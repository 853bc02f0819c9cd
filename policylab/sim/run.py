"""Simulate a policy, a workload and an engine on a virtual clock.

Scheduler, KV manager and step loop are those of the real engine; clock, requests and step times are
simulated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.config.cache import CacheConfig
from engine.config.check import check_kind, check_range
from engine.config.kv_groups import FULL, Group, longest_request, sized
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, EngineError, PolicyError, RequestError
from engine.messages.requests import CoreOutputs
from engine.sched.plugins.find import choose, find_policy, make_scheduler
from engine.sched.plugins.hooks import HOOKS
from engine.sched.policy import Policy
from engine.sched.predict.profile import AdapterCost, Profile
from engine.states.decide import StateSnapshots
from engine.states.policies import find_snapshot_policy
from engine.states.policy import SnapshotPolicy
from policylab.sim.adapters import SimulatedAdapters
from policylab.sim.demand import DemandSample, drawn, served_per_second
from policylab.sim.history import History
from policylab.sim.job import Job
from policylab.sim.jumps.blocks import RepeatingKV
from policylab.sim.jumps.core import JumpingCore
from policylab.sim.kv_groups import size_of
from policylab.sim.named import call
from policylab.sim.records import TOTALS, Floats, Requests, Seen, totals_of
from policylab.sim.tiers import SimulatedTiers, Tier, described
from policylab.sim.timing import timing
from policylab.sim.watched import Watched
from policylab.sim.worker import StepCost, VirtualClock, parameters_of
from policylab.sim.workloads import Workload, find_workload
from policylab.sim.workloads.reader import FileWorkload

FORMAT = 1
IDLE_SECONDS = 0.005  # between two polls while all requests wait for a time
NUM_AT_ONCE = 2000  # requests in the measurement of a capacity, with few seats
ROUNDS_AT_ONCE = 8  # requests per seat in it, with many seats
MOST_AT_ONCE = 20_000
CAPACITY_SEED = 20261125  # fixed, so that a load is the same rate for all seeds
DRAWN_FOR_EACH = 50  # drawn requests per served one, for their mean size
MOST_DRAWN = 200_000
MOST_KEPT = 64  # cached capacities
MAX_LOAD = 1000.0

STEP_COLUMNS = ("start", "end", "seqs", "tokens", "decodes", "context", "attention", "kv_usage")


class PolicyVariant(NamedTuple):
    """A policy with arguments for its constructor."""

    policy: Any
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{name_of(self.policy)}({options})"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The sizes and options of the simulated engine."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_blocks: int = 700
    block_size: int = 16
    depth: int = 1
    length_predictor: Any = "none"
    enable_prefix_caching: bool = True
    kv_groups: tuple[Group, ...] = (FULL,)
    """Groups of the model's layers by sliding window; all take their blocks from one pool."""
    snapshot_blocks: int = 0
    """Blocks of a snapshot of the model's recurrent states; 0: it has no states. With states, steps
    are never jumped over, and each run is repeated without them for comparison."""
    snapshot_policy: Any = "cost"
    """Which of these snapshots are taken and stay: as ``state_snapshot_policy`` of an engine, or a
    name with options, as in "marconi(alpha=0.5)"."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``SchedulerConfig``."""
    cost: StepCost | Profile = field(default_factory=StepCost)
    """The model of step times."""
    max_loras: int = 8
    """Different LoRA adapters among the running requests."""
    max_cpu_loras: int | None = None
    """Adapters in the host's memory; ``None``: all that were ever used."""
    adapter_cost: AdapterCost | None = None
    """How long it takes to load an adapter; ``None``: as the profile says, or the engine's guess. A
    step takes longer by the time to copy the adapters that it loads into slots."""
    kv_tiers: tuple[Tier, ...] = ()
    """Stores of KV blocks outside the pool, the fastest first. With any, steps are never jumped
    over."""
    stretches: bool = True
    """Jump over repeating steps, which gives the same run, bit by bit, in less time."""
    noise_seed: int | None = None
    """Seed of the noise of step times, if ``cost`` has any; default: the seed of the run."""
    max_idle_looks: int = 200_000
    """The run fails if the engine was polled this many times (every 5 ms) without computing
    anything."""

    def __post_init__(self) -> None:
        if not (isinstance(self.depth, int) and self.depth >= 1):
            raise ConfigError(f"depth is {self.depth!r}, must be 1 or more steps in flight")
        check_kind("snapshot_blocks", self.snapshot_blocks, (int,))
        check_range(self, 0, self.num_blocks - 1, "snapshot_blocks")
        for name in ("max_loras", "max_cpu_loras"):
            if (value := getattr(self, name)) is not None:
                check_kind(name, value, (int,))
                check_range(self, 1, None, name)

    @property
    def loads(self) -> AdapterCost:
        """How long it takes to load an adapter."""
        if self.adapter_cost is not None:
            return self.adapter_cost
        return self.cost.adapters if isinstance(self.cost, Profile) else AdapterCost()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups with the most blocks that a request holds in each."""
        return sized(self.kv_groups, self.max_num_batched_tokens, self.block_size)

    @property
    def longest_request(self) -> float:
        """Tokens of the longest request that the KV pool can hold."""
        longest = longest_request(self.num_blocks - 1, self.groups, self.block_size)
        return inf if longest is None else longest


@dataclass(frozen=True, kw_only=True)
class Run:
    """The requests, latencies and totals of one run. Times are seconds since its start."""

    head: dict[str, Any]
    """What was run: versions, seeds and options."""
    requests: Requests
    gaps: Floats
    """[n, 3]: the time at which a gap between two tokens ended, its length (both in seconds), and
    how many requests had it."""
    steps: Floats | None
    """[steps, 8] with the columns ``STEP_COLUMNS``, if requested."""
    totals: dict[str, Any]
    """Counters of the scheduler, and ``decisions``, a hash of all scheduling decisions: which
    requests computed how many tokens in which step."""
    hook_seconds: float = 0.0
    """Real time in the policy's hooks, the only figure that differs from run to run."""
    history: History | None = None
    """What happened to each request, if steps were requested; always for real runs."""

    @property
    def policy(self) -> str:
        return str(self.head["policy"])

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens that were computed, some of them several times."""
        done = self.requests.done
        num_decoded = int((self.requests.counts("num_output") - 1)[done].sum())
        return int(self.totals["num_scheduled_tokens"]) - num_decoded

    @property
    def not_own(self) -> str:
        """Why the run has no figures: some answers or plans of the policy were replaced by
        defaults. Empty if none was."""
        faults, rescued = (self.totals[n] for n in ("num_policy_faults", "num_rescued_steps"))
        reasons = []
        if faults:
            reasons.append(f"{faults} answer{'s were' if faults > 1 else ' was'} given by default")
        if rescued:
            reasons.append(
                f"{rescued} step{'s were' if rescued > 1 else ' was'} planned by default"
            )
        options = (self.head.get("engine") or {}).get("scheduler") or {}
        if faults > options.get("max_policy_faults", SchedulerConfig.max_policy_faults):
            reasons.append("and the policy was then switched off")
        first = self.totals.get("by_default")
        return ", ".join(reasons) + (f" ({first})" if reasons and first else "")

    def lines(self) -> Iterator[bytes]:
        """The run as lines of JSON, in the order: head, requests, gaps, steps, histories,
        totals."""
        yield _line("run", self.head)
        for row in self.requests.rows():
            yield _line("request", row)
        for gap in self.gaps.tolist():
            yield _line("gap", gap)
        for step in [] if self.steps is None else self.steps.tolist():
            yield _line("step", step)
        if self.history is not None:
            for row in self.history.rows():
                yield _line("history", row)
            for span in self.history.work.tolist():
                yield _line("work", span)
        why = {"not_own": self.not_own} if self.not_own else {}
        yield _line("totals", {**self.totals, **why})

    def write(self, path: str | Path) -> None:
        """Write the run to a file. Raises ``ConfigError`` if that fails."""
        try:
            with Path(path).open("wb") as file:
                file.writelines(self.lines())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: str | Path) -> Run:
        """Read a run from a file. Raises ``ConfigError`` if the file is not a complete run."""
        parts: dict[str, list[Any]] = {name: [] for name in PARTS}
        try:
            with Path(path).open("rb") as file:
                for line in file:
                    for name, value in msgspec.json.decode(line, type=dict[str, Any]).items():
                        parts[name].append(value)
            if not (parts["run"] and parts["totals"]):
                raise ConfigError(f"{path} is incomplete: its head or its end is missing")
            return cls._of(path, parts)
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a run file: {error}") from error

    @classmethod
    def _of(cls, path: str | Path, parts: Mapping[str, Sequence[Any]]) -> Run:
        head, totals = parts["run"][0], parts["totals"][0]
        if head.get("format") != FORMAT:
            raise ConfigError(
                f"{path} has format {head.get('format')}; this version reads format {FORMAT}"
            )
        if missing := {"policy"} - head.keys() | {*TOTALS, "kv_peak", "counters"} - totals.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return cls(
            head=head,
            requests=Requests.read(parts["request"]),
            gaps=np.array(parts["gap"], dtype=np.float64).reshape(-1, 3),
            steps=np.array(parts["step"], dtype=np.float64) if parts["step"] else None,
            totals=totals,
            history=History.read(parts["history"], parts["work"]) if parts["history"] else None,
        )


PARTS = ("run", "request", "gap", "step", "history", "work", "totals")


def _line(part: str, value: Any) -> bytes:
    return msgspec.json.encode({part: value}, enc_hook=str) + b"\n"


def run(
    policy: Any = "fcfs",
    workload: Workload | str = "log-uniform",
    engine: Engine | None = None,
    *,
    seed: int = 0,
    rate: float | None = None,
    load: float | None = None,
    steps: bool = False,
) -> Run:
    """Simulate the workload until all requests have ended.

    ``policy``: as for an engine, or a ``PolicyVariant``. ``workload``: an object, or a text as on
    the command line. Requests arrive at ``rate`` per second, or at ``load`` times the rate that
    fcfs can serve, or at the workload's own rate. ``steps``: also record each step and each
    request's history. Raises ``ConfigError`` for invalid options, and ``PolicyError`` if the policy
    lets nothing be computed."""
    engine = engine or Engine()
    workload = find_workload(workload) if isinstance(workload, str) else workload
    if load is not None:
        rate = rate_at(load, workload, engine)
    made = _SimulatedRun(policy, workload, engine, seed=seed, rate=rate, keeps_steps=steps).finish()
    if load is not None:
        made.head["load"] = load
    if "snapshot_peak" in made.totals:
        dense = run(policy, workload, replace(engine, snapshot_blocks=0), seed=seed, rate=rate)
        made.totals["dense_prompt_tokens"] = dense.num_prompt_tokens
    return made


def rate_at(
    load: float, workload: Workload, engine: Engine, *, capacity: float | None = None
) -> float:
    """The arrival rate, in requests per second, at a load relative to the rate that fcfs can serve.
    ``capacity``: that rate of fcfs, if known; otherwise it is measured."""
    check_load(load, workload)
    return load * (capacity or capacity_of(workload, engine))


def check_load(load: float, workload: Workload) -> None:
    """Raise ``ConfigError`` for a load out of range, or for a workload that can have none."""
    if not 0 < load <= MAX_LOAD:
        raise ConfigError(f"--load is {load}, must be above 0 and at most {MAX_LOAD:g}")
    if workload.natural_rate is None:
        raise ConfigError(
            f"{workload} sends a request when another ends, so it has no load; leave "
            "--load and --rate out"
        )


def capacity_of(workload: Workload, engine: Engine, *, num_requests: int | None = None) -> float:
    """The rate at which fcfs can serve requests of this workload, in requests per second.

    It is measured by a simulation of ``num_requests`` requests (default: enough for 1 to 2 %
    precision) that arrive at once, with a fixed seed, and cached. Raises ``ConfigError`` if no
    request can be served."""
    at_once = num_requests or max(NUM_AT_ONCE, ROUNDS_AT_ONCE * engine.max_num_seqs)
    at_once = min(at_once, MOST_AT_ONCE)
    served = _sized(workload, at_once)
    for known, by, found in _capacities:
        if (known, by) == (served, engine):
            return found
    found = _measured(served, _sized(workload, min(MOST_DRAWN, DRAWN_FOR_EACH * at_once)), engine)
    if not isinstance(workload, FileWorkload):  # a file may change
        _capacities.append((served, engine, found))
        del _capacities[:-MOST_KEPT]
    return found


_capacities: list[tuple[Workload, Engine, float]] = []  # the latest ones


def _sized(workload: Workload, number: int) -> Workload:
    """A copy of the workload with ``number`` requests; a file with fewer requests keeps all."""
    least = workload.num_requests if isinstance(workload, FileWorkload) else number
    return replace(workload, num_requests=min(number, least))


def sizes_of(workload: Workload, engine: Engine, seed: int) -> DemandSample:
    """The prompt and output lengths of the workload's requests that this engine accepts."""
    longest = scheduler_config("fcfs", workload, engine).max_model_len
    if engine.kv_groups == (FULL,):
        fit = min(longest, engine.num_blocks * engine.block_size)
    else:
        fit = int(min(longest, engine.longest_request))
    return drawn(workload.source(seed, inf)).at_most(fit)


def _measured(served: Workload, others: Workload, engine: Engine) -> float:
    made = _SimulatedRun("fcfs", served, engine, seed=CAPACITY_SEED, rate=inf, keeps_steps=False)
    run = made.finish()
    own = sizes_of(served, engine, CAPACITY_SEED)
    every = sizes_of(others, engine, CAPACITY_SEED + 1)
    found = served_per_second(run.requests, run.head, own, every)
    if isnan(found):
        raise ConfigError(f"this engine can serve no request of {served}; give more KV blocks")
    return found


def name_of(policy: Any) -> str:
    """The name of a policy as shown in tables."""
    if isinstance(policy, str | PolicyVariant):
        return str(policy)
    return policy.__name__ if isinstance(policy, type) else type(policy).__name__


def scheduler_config(policy: Any, workload: Workload, engine: Engine) -> SchedulerConfig:
    """The scheduler options for a run of the workload with this policy. Raises ``ConfigError`` for
    invalid options."""
    policy, options = policy if isinstance(policy, PolicyVariant) else (policy, {})
    CacheConfig(block_size=engine.block_size, num_kv_blocks=engine.num_blocks)
    return SchedulerConfig(
        **{
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_num_seqs": engine.max_num_seqs,
            "max_model_len": workload.max_model_len,
            "scheduling_policy": policy,
            "policy_options": options,
            "length_predictor": engine.length_predictor,
            "user_weights": weights_for(policy, options, workload),
            **engine.scheduler,
        }
    )


def snapshot_policy_of(engine: Engine) -> SnapshotPolicy:
    """Create the snapshot policy of an engine. Raises ``ConfigError``."""
    policy = engine.snapshot_policy
    if not isinstance(policy, str):
        return find_snapshot_policy(policy)
    name, options = call(policy, "--snapshot-policy", "marconi(alpha=0.5)")
    return find_snapshot_policy(name, options)


def weights_for(policy: Any, options: dict[str, Any], workload: Workload) -> dict[str, float]:
    """The weight of each user of the workload if the policy uses weights; otherwise empty."""
    weights = workload.user_weights
    return weights if weights and find_policy(policy, options).uses_ledger else {}


class _SimulatedRun:
    """A simulation in progress: engine core, virtual clock and records."""

    def __init__(
        self,
        policy: Any,
        workload: Workload,
        engine: Engine,
        *,
        seed: int,
        rate: float | None,
        keeps_steps: bool,
    ) -> None:
        config = scheduler_config(policy, workload, engine)
        self._policy = policy
        self._max_tokens = workload.max_output
        self._max_model_len = config.max_model_len
        self._clock = VirtualClock()
        chosen = choose(config)
        self._kv = RepeatingKV(
            chosen.pool(engine.num_blocks),
            engine.block_size,
            enable_prefix_caching=engine.enable_prefix_caching,
            groups=engine.groups,
        )
        if engine.snapshot_blocks:
            self._kv.keep_states(engine.snapshot_blocks)
        if self._kv.states is not None:
            snapshots = StateSnapshots(snapshot_policy_of(engine))
            chosen = chosen._replace(resources=(*chosen.resources, snapshots))
        self._adapters = SimulatedAdapters(
            engine.max_loras, engine.max_cpu_loras, self._clock, engine.loads.read
        )
        chosen = chosen._replace(resources=(*chosen.resources, self._adapters.slots))
        self._tiers: SimulatedTiers | None = None
        if engine.kv_tiers:
            self._tiers = SimulatedTiers(engine.kv_tiers, self._clock)
            chosen = chosen._replace(resources=(*chosen.resources, self._tiers.resource))
        self._policy_class = type(chosen.policy)
        scheduler = make_scheduler(
            config, self._kv, clock=self._clock, timer=time.perf_counter, seed=seed, chosen=chosen
        )
        self._lengths: dict[str, int] = {}  # output tokens of unfinished requests
        self._timing = timing(engine.cost, seed if engine.noise_seed is None else engine.noise_seed)
        worker = (self._clock, self._timing, engine.max_num_seqs, self._lengths)
        self._worker = Watched(*worker, kv=self._kv, keeps_steps=keeps_steps)
        self._worker.copy_seconds = engine.loads.copy
        self._worker.tiers = self._tiers
        is_plain = not (keeps_steps or engine.snapshot_blocks or engine.kv_tiers)
        jumps = engine.stretches and is_plain
        self._core = JumpingCore(
            scheduler, self._worker, engine.depth, clock=self._clock, jumps=jumps
        )
        self._source = workload.source(seed, rate)
        self._tells_length = engine.length_predictor == "oracle"
        self._seen = Seen(keeps_history=keeps_steps)
        self._max_idle_looks = engine.max_idle_looks
        self._head = {
            "format": FORMAT,
            "version": version("metronome-engine"),
            "kind": "simulated",
            "policy": name_of(policy),
            "workload": str(workload),
            "seed": seed,
            "rate": workload.natural_rate if rate is None else min(rate, 1e300),
            **_described(engine),
        }

    def finish(self) -> Run:
        """Simulate until all requests have ended. Raises ``PolicyError`` if the run fails."""
        try:
            return self._finished()
        except EngineError:
            raise
        except Exception as error:
            raise PolicyError(_crash(self._policy, self._policy_class, error)) from error

    def _finished(self) -> Run:
        source, core, clock = self._source, self._core, self._clock
        num_idle = 0
        while source.next_time < inf or core.has_work:
            while source.next_time <= clock.now:
                self._add(source.take())
            for report in [] if self._tiers is None else self._tiers.take_reports():
                core.scheduler.transferred(report)
            outputs = core.step(source.next_time)
            if core.stretch is not None:
                self._seen.stretched(core.stretch)
                peaks = core.stretch.growth.peaks
                self._worker.kv_peaks.add(peaks.usage, peaks.blocks)
            self._note(outputs.values())
            self._worker.rest()
            if not core.is_idle:
                num_idle = 0
                continue
            num_idle += 1
            if num_idle > self._max_idle_looks:
                raise PolicyError(
                    f"policy {self._policy!r} never lets its requests end: for "
                    f"{num_idle * IDLE_SECONDS:g} s nothing was computed"
                )
            until = min(source.next_time, self._adapters.reader.next_time)
            if self._tiers is not None:
                until = min(until, self._tiers.next_time)
            if core.scheduler.has_unfinished_requests():
                until = min(until, clock.now + IDLE_SECONDS)
            if until < inf:
                clock.now = max(clock.now, until)
        return self._result()

    def _add(self, job: Job) -> None:
        if 1 <= (most := self._max_model_len - job.num_prompt) < job.num_output:
            job = replace(job, num_output=most)  # the engine cuts it at its maximum length
        self._clock.now += self._timing.add_seconds(job.num_prompt)
        try:
            request = job.request(self._max_tokens, tell_length=self._tells_length)
            self._core.scheduler.add_request(self._adapters.named(request))
        except RequestError:
            self._seen.refused(job)
            self._source.ended(job, self._clock.now)
            return
        self._seen.came(job)
        self._lengths[job.request_id] = job.num_output

    def _note(self, batches: Iterable[CoreOutputs]) -> None:
        for job, ended_at in self._seen.note(batches):
            del self._lengths[job.request_id]
            self._source.ended(job, ended_at)

    def _result(self) -> Run:
        stats = self._core.scheduler.make_stats()
        assert stats is not None
        steps, history, work = self._worker.steps, self._seen.history, self._worker.work
        if history is not None and work is not None:
            names = self._seen.requests.names["request_id"]
            history.work = work.spans({name: place for place, name in enumerate(names)})
        totals = {
            **totals_of(stats, self._worker.kv_peaks),
            "busy_seconds": self._worker.busy_seconds,
            "decisions": self._worker.decisions,
        }
        return Run(
            head=self._head,
            requests=self._seen.requests,
            gaps=self._seen.gaps,
            steps=None if steps is None else np.array(steps, dtype=np.float64).reshape(-1, 8),
            totals=totals,
            hook_seconds=sum(stats.hook_seconds.values()),
            history=history,
        )


def _described(engine: Engine) -> dict[str, Any]:
    """The engine's options and step cost in the head of a run."""
    others = ("cost", "stretches", "kv_groups", "kv_tiers")
    options = {
        each.name: getattr(engine, each.name) for each in fields(engine) if each.name not in others
    }
    return {
        "engine": options
        | {"kv_groups": list(map(size_of, engine.kv_groups))}
        | ({"kv_tiers": described(engine.kv_tiers)} if engine.kv_tiers else {}),
        "cost": str(engine.cost),
        "step_cost": parameters_of(engine.cost),
    }


def _crash(policy: Any, cls: type[Policy], error: Exception) -> str:
    """The error message for a run that failed with an exception, probably because a hook of the
    policy changed the engine's state. It lists the hooks that the policy's author wrote."""
    hooks = [name for name in HOOKS if getattr(cls, name) is not getattr(Policy, name)]
    own = [name for name in hooks if not getattr(cls, name).__module__.startswith("engine.")]
    return (
        f"the run of policy {name_of(policy)} failed with {type(error).__name__}: {error}. Likely "
        f"one of its hooks ({', '.join(own or hooks)}) changed state of the engine; "
        f"`metronome verify --policy` searches for a small case that shows it"
    )


def check(policies: Iterable[Any], workload: Workload, engine: Engine) -> None:
    """Raise ``ConfigError`` for an invalid policy or option, without a simulation."""
    for policy in policies:
        choose(scheduler_config(policy, workload, engine))
