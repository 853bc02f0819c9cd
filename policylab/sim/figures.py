"""The figures of a run. Times are seconds on the run's clock.

Latencies are those of the requests that arrived in the counted period (`steady.window`) and
finished normally:

``ttft``  from arrival to first token, including the time in the queue
``tpot``  (last token - first token) / (output tokens - 1); 0 for one token
``itl``  every gap between two tokens, of all requests together
``e2e``  from arrival to last token
``normalised``  ``e2e`` / output tokens
``delay``  from arrival to the first step that computed a token of the request
``slowdown``  ``e2e`` / ``e2e`` of the request alone on an idle engine with an empty cache
``program``  from the first arrival of a program (a conversation, an agent) to its last token

Each has a mean, p50, p90 and p99, with confidence intervals. An overloaded run has no latencies,
since a mean would depend on the length of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, PolicyError
from policylab.sim.bounds import Bounds, WorkBound, bounds, work_of
from policylab.sim.demand import demand
from policylab.sim.estimate import (
    NOTHING,
    Estimate,
    Floats,
    mean_of,
    quantile_of,
    weighted_quantile,
)
from policylab.sim.promises import OF_REQUEST, KeptPromises, Limit, kept
from policylab.sim.records import DONE, Requests
from policylab.sim.run import Run
from policylab.sim.service import Service, service
from policylab.sim.steady import OVERLOADED, Window, window

KINDS = ("ttft", "tpot", "itl", "e2e", "normalised", "delay", "slowdown", "program")
STATISTICS = {"mean": nan, "p50": 0.5, "p90": 0.9, "p99": 0.99}
EDGES = (0, 64, 256, 1024, 4096, 16384)
"""Bounds of the size classes of prompts and outputs, in tokens."""
OF_STATES = ("prompt_tokens", "snapshot_peak")
OF_ADAPTERS = ("adapter_loads", "adapter_reads")
SMALLER_IS_BETTER = (
    *(*KINDS, "recomputed", "preempted", "refused", "gap", "makespan"),
    *(*OF_STATES, *OF_ADAPTERS),
)
MAX_RECOMPUTED = 0.25
BACKLOG_LOAD = 3.0  # demand (seconds of a full engine) that arrives per second
MIN_THROUGHPUT = 0.8


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The slowdown of the requests whose prompt and output lengths are in these ranges."""

    prompt: tuple[int, int | None]
    """Prompt tokens: the first value and the end (exclusive); ``None``: no end."""
    output: tuple[int, int | None]
    num_requests: int
    mean: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a run."""

    policy: str
    window: Window
    num_requests: int
    """All requests of the run."""
    num_counted: int
    """Requests that arrived in the period and finished normally."""
    outcomes: dict[str, int]
    """The number of requests with each outcome."""
    latency: dict[str, Estimate]
    """Latencies by name, such as ``ttft.mean``; empty if the run is overloaded."""
    slowdown: list[Slowdown]
    requests_per_second: float
    """Requests that ended in the period, per second."""
    tokens_per_second: float
    """Output tokens in the period, per second."""
    makespan: float
    """Seconds from the start to the last token."""
    kept: KeptPromises
    service: Service | None
    recomputed: float
    """The share of all computed tokens that had been computed before."""
    num_preemptions: int
    kv_peak: float
    """The largest share of the KV pool in use."""
    prefix_hits: int
    """The number of tokens found in the prefix cache."""
    num_steps: int
    bounds: Bounds | None
    mean_e2e: float
    """Mean seconds from arrival to last token over the whole run, for comparison with the lower
    bound for any scheduler."""
    counters: dict[str, Any]
    """Counters that the policy and the resources report."""
    kv_groups: list[dict[str, int]]
    """The window of each group of layers, and the most KV blocks in use; empty if unknown."""
    prompt_tokens: int
    """Prompt tokens that were computed, some of them several times."""
    prompt_tokens_dense: float
    """These, relative to those of a model without recurrent states with the same KV pool; NaN for
    such a model."""
    snapshot_peak: float
    """The largest share of the KV pool that held snapshots of recurrent states; NaN without
    them."""
    adapter_loads: float
    """How often a LoRA adapter was loaded into a slot, per request with an adapter; NaN without
    adapters."""
    adapter_reads: float
    """How often an adapter was read from a disk, per request with an adapter."""
    prefix_missed: dict[str, int]
    """Prompt tokens that were not found in the prefix cache, by reason."""
    hook_seconds: float
    """Real time in the policy's hooks, the only figure that differs from run to run."""

    @property
    def is_overloaded(self) -> bool:
        return self.window.state == OVERLOADED

    @property
    def num_refused(self) -> int:
        """The number of requests that were refused, or ended with an error or at a deadline."""
        return self.num_requests - self.outcomes.get(DONE, 0)

    def value(self, name: str) -> float:
        """Returns the figure of this name, one of ``NAMES``; NaN if the run does not have it.
        Raises ``ConfigError`` for an unknown name."""
        if name not in NAMES:
            raise ConfigError(f"figure {name!r} is not known; figures are: {', '.join(NAMES)}")
        return self.values()[name]

    def values(self) -> dict[str, float]:
        """Returns all figures that are one number, by name, except the real time in hooks."""
        found = {name: self.latency.get(name, NOTHING).value for name in LATENCIES}
        return found | {
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "makespan": self.makespan,
            "attainment": self.kept.attainment,
            "goodput": self.kept.goodput,
            "jain": self.service.jain if self.service else nan,
            "gap": self.service.gap if self.service else nan,
            "recomputed": self.recomputed,
            "preempted": self.num_preemptions / max(1, self.num_requests),
            "refused": self.num_refused / max(1, self.num_requests),
            "kv_peak": self.kv_peak,
            "prefix_hits": float(self.prefix_hits),
            "prompt_tokens": float(self.prompt_tokens),
            "prompt_tokens.dense": self.prompt_tokens_dense,
            "snapshot_peak": self.snapshot_peak,
            "adapter_loads": self.adapter_loads,
            "adapter_reads": self.adapter_reads,
            "num_steps": float(self.num_steps),
            "makespan.bound": self.makespan / self.bounds.makespan if self.bounds else nan,
            "e2e.bound": self.mean_e2e / self.bounds.mean_e2e if self.bounds else nan,
        }


LATENCIES = tuple(f"{kind}.{name}" for kind in KINDS for name in STATISTICS)
NAMES = (
    *LATENCIES,
    *("requests_per_second", "tokens_per_second", "makespan", "attainment"),
    *("goodput", "jain", "gap", "recomputed", "preempted", "refused", "kv_peak", "prefix_hits"),
    *("prompt_tokens", "prompt_tokens.dense", "snapshot_peak", *OF_ADAPTERS),
    *("num_steps", "makespan.bound", "e2e.bound"),
)
"""The keys of ``Figures.values``. ``X.bound`` is ``X`` divided by its lower bound, ``X.dense`` is
``X`` divided by that of a model without recurrent states."""


def is_better_small(name: str) -> bool:
    """True if smaller values of this figure are better."""
    return name.partition(".")[0] in SMALLER_IS_BETTER


def figures(run: Run, *, slo: Sequence[Limit] = (), period: Window | None = None) -> Figures:
    """Compute the figures of a run.

    ``slo``: latency limits for every request, in place of the requests' own ones. ``period``: the
    period whose requests count; default: ``period_of(run)``. Raises ``PolicyError`` if defaults
    replaced some of the policy's answers.
    """
    if why := run.not_own:
        raise PolicyError(f"policy {run.policy} has no figures: {why}")
    requests, totals = run.requests, run.totals
    period = period or period_of(run)
    engine = run.head.get("engine") or {}
    arrival, last = requests.times("arrival"), requests.times("last")
    came = np.zeros(len(requests), dtype=np.bool_)
    came[period.num_warmup :] = True
    counted = came & requests.done
    is_steady = period.state != OVERLOADED
    work = work_of(requests, run.head)
    slower = _slower(requests, work) if work else None
    return Figures(
        policy=run.policy,
        window=period,
        num_requests=len(requests),
        num_counted=int(counted.sum()),
        outcomes=_outcomes(requests),
        latency=_latency(run, counted, period, slower) if is_steady else {},
        slowdown=_by_size(requests, counted, slower) if is_steady and slower is not None else [],
        requests_per_second=_per_second(last[requests.done], period),
        tokens_per_second=_tokens_per_second(run, period),
        makespan=float(np.nanmax(last, initial=0.0)),
        kept=kept(requests, came, period.seconds, list(slo)),
        service=service(requests, counted, period, engine),
        recomputed=recomputed(run),
        num_preemptions=totals["num_preemptions"],
        kv_peak=totals["kv_peak"],
        prefix_hits=totals["prefix_hits"],
        num_steps=totals["num_steps"],
        bounds=bounds(work) if work and "data_parallel_size" not in engine else None,
        mean_e2e=float((last - arrival)[requests.done].mean()) if requests.done.any() else nan,
        counters=totals["counters"],
        kv_groups=totals.get("kv_groups", []),
        prompt_tokens=run.num_prompt_tokens,
        prompt_tokens_dense=run.num_prompt_tokens / totals.get("dense_prompt_tokens", nan),
        snapshot_peak=totals.get("snapshot_peak", nan),
        adapter_loads=_per_user(requests, totals, "adapter.num_slot_loads"),
        adapter_reads=_per_user(requests, totals, "adapter.num_read"),
        prefix_missed=totals.get("prefix_missed", {}),
        hook_seconds=run.hook_seconds,
    )


def _per_user(requests: Requests, totals: Mapping[str, Any], counter: str) -> float:
    """A counter of adapters divided by the number of requests with an adapter; NaN for none."""
    number = sum(map(bool, requests.names["adapter"]))
    return totals["counters"].get(counter, nan) / number if number else nan


def period_of(run: Run) -> Window:
    """Returns the period of a run whose requests its figures count."""
    return window(run.requests, is_backlog=_is_backlog(run))


def _is_backlog(run: Run) -> bool:
    """True if requests arrived much faster than any scheduler could serve them. If the step cost is
    unknown: True if most requests were unfinished when the last one arrived."""
    requests = run.requests
    arrival, last = requests.times("arrival"), requests.times("last")
    if not len(arrival):
        return False
    if (work := work_of(requests, run.head)) is not None:
        return demand(work) > BACKLOG_LOAD * float(arrival[-1] - arrival[0])
    return float((last <= arrival[-1]).mean()) < 1.0 / BACKLOG_LOAD


def recomputed(run: Run) -> float:
    """The share of all computed tokens that had been computed before."""
    requests, totals = run.requests, run.totals
    done = requests.done
    needed = int((requests.counts("num_prompt") + requests.counts("num_output") - 1)[done].sum())
    computed = int(totals["num_scheduled_tokens"])
    return max(0, computed - (needed - int(totals["prefix_hits"]))) / max(1, computed)


def collapse(name: str, share: float, throughput: float, of_fcfs: float) -> str | None:
    """Returns a warning if policy ``name`` recomputes a large share of its tokens (``share``), or
    if its ``throughput`` is far below that of fcfs (both in tokens per second); else ``None``."""
    faults = []
    if share > MAX_RECOMPUTED:
        faults.append(f"recomputes {100.0 * share:.0f} % of its tokens")
    if throughput < MIN_THROUGHPUT * of_fcfs:
        faults.append(f"serves {throughput / of_fcfs:.2f} of fcfs's tokens per second")
    return f"{name} collapses: it {' and '.join(faults)}" if faults else None


def _outcomes(requests: Requests) -> dict[str, int]:
    names, counts = np.unique(
        np.array([name or "unfinished" for name in requests.names["outcome"]]), return_counts=True
    )
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _latency(
    run: Run, counted: NDArray[np.bool_], period: Window, slower: Floats | None
) -> dict[str, Estimate]:
    columns = {kind: of(run.requests) for kind, of in OF_REQUEST.items() if kind != "itl"}
    if slower is not None:
        columns["slowdown"] = slower
    columns = {kind: values[counted] for kind, values in columns.items()}
    if any(run.requests.names["program"]):
        columns["program"] = program_seconds(run.requests, counted)
    found = _gaps(run.gaps, period)
    for kind, mine in columns.items():
        for name, share in STATISTICS.items():
            found[f"{kind}.{name}"] = mean_of(mine) if isnan(share) else quantile_of(mine, share)
    return found


def program_seconds(requests: Requests, counted: NDArray[np.bool_]) -> Floats:
    """Returns the seconds from the first arrival to the last token of each program whose requests
    all count, in order of the first arrivals."""
    arrival, last = requests.times("arrival").tolist(), requests.times("last").tolist()
    first: dict[str, float] = {}
    end: dict[str, float] = {}
    for name, came, ended, counts in zip(
        requests.names["program"], arrival, last, counted.tolist(), strict=True
    ):
        if name:
            first.setdefault(name, came)
            end[name] = max(end.get(name, ended), ended) if counts else nan
    return np.array([end[name] - first[name] for name in first if end[name] == end[name]])


def _gaps(gaps: Floats, period: Window) -> dict[str, Estimate]:
    """Returns statistics of the gaps between tokens in the period. Gaps that end with the same step
    count as one observation."""
    inside = gaps[(gaps[:, 0] >= period.start) & (gaps[:, 0] <= period.end)]
    seconds, counts = inside[:, 1], inside[:, 2]
    found = {
        f"itl.{name}": weighted_quantile(seconds, counts, share)
        for name, share in STATISTICS.items()
        if not isnan(share)
    }
    if not len(inside):
        return found | {"itl.mean": NOTHING}
    spread = mean_of(seconds * counts * len(counts) / counts.sum())  # each step's part of the mean
    return found | {"itl.mean": spread}


def _slower(requests: Requests, work: WorkBound) -> Floats:
    """Returns the slowdown of each request; NaN for requests that did not finish normally."""
    idle = WorkBound(**{**vars(work), "cached": np.zeros_like(work.cached)})
    slower = np.full(len(requests), np.nan)
    slower[requests.done] = OF_REQUEST["e2e"](requests)[requests.done] / idle.alone()
    return slower


def _by_size(requests: Requests, counted: NDArray[np.bool_], slower: Floats) -> list[Slowdown]:
    sizes = (requests.counts("num_prompt"), requests.counts("num_output"))
    places = [np.digitize(each[counted], EDGES) - 1 for each in sizes]
    found = []
    for pair in np.unique(np.stack(places), axis=1).T.tolist():
        values = slower[counted][(places[0] == pair[0]) & (places[1] == pair[1])]
        prompt, output = ((EDGES[p], EDGES[p + 1] if p + 1 < len(EDGES) else None) for p in pair)
        found.append(
            Slowdown(
                prompt=prompt,
                output=output,
                num_requests=len(values),
                mean=float(values.mean()),
                p99=quantile_of(values, 0.99).value,
            )
        )
    return found


def _per_second(times: Floats, period: Window, counts: Floats | None = None) -> float:
    inside = (times > period.start) & (times <= period.end)
    if period.is_whole:
        inside = times <= period.end
    total = float(inside.sum() if counts is None else counts[inside].sum())
    return total / period.seconds if period.seconds else 0.0


def _tokens_per_second(run: Run, period: Window) -> float:
    """Returns the output tokens per second in the period."""
    firsts = run.requests.times("first")
    others = _per_second(run.gaps[:, 0], period, run.gaps[:, 2])
    return _per_second(firsts[~np.isnan(firsts)], period) + others
