"""Simulate a policy, a workload and an engine on a virtual clock.

Scheduler, KV manager and step loop are those of the real engine; clock, requests and step times are
simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import inf, isnan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.config.kv_groups import FULL
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, EngineError, PolicyError, RequestError
from engine.messages.requests import CoreOutputs
from engine.sched.plugins.find import choose
from engine.sched.plugins.hooks import HOOKS
from engine.sched.policy import Policy
from policylab.sim.apart import ApartRun
from policylab.sim.core import IDLE_SECONDS, SimulatedCore
from policylab.sim.demand import DemandSample, drawn, served_per_second
from policylab.sim.engine import Engine as Engine
from policylab.sim.engine import PolicyVariant as PolicyVariant
from policylab.sim.engine import described_engine
from policylab.sim.engine import name_of as name_of
from policylab.sim.engine import scheduler_config as scheduler_config
from policylab.sim.engine import weights_for as weights_for
from policylab.sim.history import History
from policylab.sim.job import Job
from policylab.sim.records import TOTALS, Floats, Requests, Seen, totals_of
from policylab.sim.tiers import SimulatedTiers
from policylab.sim.workloads import Workload, find_workload
from policylab.sim.workloads.reader import FileWorkload

FORMAT = 1
NUM_AT_ONCE = 2000  # requests in the measurement of a capacity, with few seats
ROUNDS_AT_ONCE = 8  # requests per seat in it, with many seats
MOST_AT_ONCE = 20_000
CAPACITY_SEED = 20261125  # fixed, so that a load is the same rate for all seeds
DRAWN_FOR_EACH = 50  # drawn requests per served one, for their mean size
MOST_DRAWN = 200_000
MOST_KEPT = 64  # cached capacities
MAX_LOAD = 1000.0

STEP_COLUMNS = ("start", "end", "seqs", "tokens", "decodes", "context", "attention", "kv_usage")


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
    if engine.num_cores > 1:
        if steps:
            raise ConfigError(
                f"steps are kept of one core, but the engine has {engine.num_cores}; leave them out"
            )
        made = _with_several_cores(policy, workload, engine, seed, rate)
    else:
        single = _SimulatedRun(policy, workload, engine, seed=seed, rate=rate, keeps_steps=steps)
        made = single.finish()
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
    precision) that arrive at once, with a fixed seed, and cached. Several cores serve as many times
    more. Raises ``ConfigError`` if no
    request can be served."""
    at_once = num_requests or max(NUM_AT_ONCE, ROUNDS_AT_ONCE * engine.max_num_seqs)
    at_once = min(at_once, MOST_AT_ONCE)
    served = _sized(workload, at_once)
    if engine.num_cores > 1:
        one = replace(engine, prefill_cores=0, decode_cores=0)
        return engine.num_cores * capacity_of(workload, one, num_requests=num_requests)
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
        is_plain = not (keeps_steps or engine.snapshot_blocks or engine.kv_tiers)
        self._core = SimulatedCore(
            config,
            engine,
            seed=seed,
            jumps=engine.stretches and is_plain,
            keeps_steps=keeps_steps,
            make_tiers=partial(SimulatedTiers, engine.kv_tiers) if engine.kv_tiers else None,
        )
        self._source = workload.source(seed, rate)
        self._tells_length = engine.length_predictor == "oracle"
        self._seen = Seen(keeps_history=keeps_steps)
        self._max_idle_looks = engine.max_idle_looks
        self._head = _head(policy, workload, engine, seed, rate)

    def finish(self) -> Run:
        """Simulate until all requests have ended. Raises ``PolicyError`` if the run fails."""
        with _explained(self._policy, self._core.policy_class):
            return self._finished()

    def _finished(self) -> Run:
        source, simulated, clock = self._source, self._core, self._core.clock
        core, num_idle = simulated.core, 0
        while source.next_time < inf or core.has_work:
            while source.next_time <= clock.now:
                self._add(source.take())
            outputs = simulated.step(source.next_time)
            if core.stretch is not None:
                self._seen.stretched(core.stretch)
                peaks = core.stretch.growth.peaks
                simulated.worker.kv_peaks.add(peaks.usage, peaks.blocks)
            self._note(outputs.values())
            simulated.end_step()
            if not core.is_idle:
                num_idle = 0
                continue
            num_idle += 1
            if num_idle > self._max_idle_looks:
                raise PolicyError(
                    f"policy {self._policy!r} never lets its requests end: for "
                    f"{num_idle * IDLE_SECONDS:g} s nothing was computed"
                )
            until = min(source.next_time, simulated.next_time)
            if until < inf:
                clock.now = max(clock.now, until)
        return self._result()

    def _add(self, job: Job) -> None:
        if 1 <= (most := self._max_model_len - job.num_prompt) < job.num_output:
            job = replace(job, num_output=most)  # the engine cuts it at its maximum length
        try:
            request = job.request(self._max_tokens, tell_length=self._tells_length)
            self._core.add(request, job.num_output)
        except RequestError:
            self._seen.refused(job)
            self._source.ended(job, self._core.clock.now)
            return
        self._seen.came(job)

    def _note(self, batches: Iterable[CoreOutputs]) -> None:
        for job, ended_at in self._seen.note(batches):
            del self._core.lengths[job.request_id]
            self._source.ended(job, ended_at)

    def _result(self) -> Run:
        stats, worker = self._core.scheduler.make_stats(), self._core.worker
        assert stats is not None
        steps, history, work = worker.steps, self._seen.history, worker.work
        if history is not None and work is not None:
            names = self._seen.requests.names["request_id"]
            history.work = work.spans({name: place for place, name in enumerate(names)})
        totals = {
            **totals_of(stats, worker.kv_peaks),
            "busy_seconds": worker.busy_seconds,
            "decisions": worker.decisions,
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


def _with_several_cores(
    policy: Any, workload: Workload, engine: Engine, seed: int, rate: float | None
) -> Run:
    """Simulate several cores until all requests have ended."""
    made = ApartRun(policy, workload, engine, seed=seed, rate=rate)
    with _explained(policy, made.clock.cores[0].policy_class):
        made.finish()
    return Run(
        head=_head(policy, workload, engine, seed, rate),
        requests=made.seen.requests,
        gaps=made.seen.gaps,
        steps=None,
        totals=made.totals(),
        hook_seconds=made.hook_seconds,
    )


def _head(
    policy: Any, workload: Workload, engine: Engine, seed: int, rate: float | None
) -> dict[str, Any]:
    """The head of a run."""
    return {
        "format": FORMAT,
        "version": version("metronome-engine"),
        "kind": "simulated",
        "policy": name_of(policy),
        "workload": str(workload),
        "seed": seed,
        "rate": workload.natural_rate if rate is None else min(rate, 1e300),
        **described_engine(engine),
    }


@contextmanager
def _explained(policy: Any, cls: type[Policy]) -> Iterator[None]:
    """Context that converts exceptions, other than ``EngineError``, to ``PolicyError``."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise PolicyError(_crash(policy, cls, error)) from error


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
