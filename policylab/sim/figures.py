"""The figures of a run. Times are seconds on its clock.

They are of the requests that came in the period of `steady.window`, and ended as they should:

``ttft``  from arrival to first token, the queue included
``tpot``  (last token - first token) / (output tokens - 1); 0 for one token
``itl``  every gap between two tokens, of all requests together
``e2e``  from arrival to last token
``normalised``  ``e2e`` for each output token
``delay``  from arrival to the first step that computed some of the request
``slowdown``  ``e2e`` over that of the request alone on an idle engine with an empty cache

each with mean, p50, p90 and p99, and an interval for each. A run that is overloaded has none: its
means would say how long it was.
"""

from __future__ import annotations

from collections.abc import Sequence
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

KINDS = ("ttft", "tpot", "itl", "e2e", "normalised", "delay", "slowdown")
STATISTICS = {"mean": nan, "p50": 0.5, "p90": 0.9, "p99": 0.99}
EDGES = (0, 64, 256, 1024, 4096, 16384)
"""Bounds of buckets of prompts and outputs, in tokens."""
SMALLER_IS_BETTER = (*KINDS, "recomputed", "preempted", "refused", "gap", "makespan")
MAX_RECOMPUTED = 0.25
BACKLOG_LOAD = 3.0  # seconds of a full engine that come in each second
MIN_THROUGHPUT = 0.8


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Slowdown of the requests of one size."""

    prompt: tuple[int, int | None]
    """Tokens of their prompts, from one to below the other; ``None``: no end."""
    output: tuple[int, int | None]
    num_requests: int
    mean: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of a run."""

    policy: str
    window: Window
    num_requests: int
    """In all."""
    num_counted: int
    """Those that ended as they should and came in the period."""
    outcomes: dict[str, int]
    """How many of all ended in which way."""
    latency: dict[str, Estimate]
    """``ttft.mean`` and so on; empty where the run is overloaded."""
    slowdown: list[Slowdown]
    requests_per_second: float
    """Ends in the period."""
    tokens_per_second: float
    """Output tokens in the period."""
    makespan: float
    """Seconds from the start to the last token."""
    kept: KeptPromises
    service: Service | None
    recomputed: float
    """Share of the whole run's computed tokens that had been computed before."""
    num_preemptions: int
    kv_peak: float
    """Largest share of the KV pool in use."""
    prefix_hits: int
    """Tokens that were found in the cache."""
    num_steps: int
    bounds: Bounds | None
    mean_e2e: float
    """Mean of the whole run, to compare with its bound."""
    counters: dict[str, Any]
    """What policy and resources counted."""
    hook_seconds: float
    """Real time in hooks of the policy: the one figure that differs from run to run."""

    @property
    def is_overloaded(self) -> bool:
        return self.window.state == OVERLOADED

    @property
    def num_refused(self) -> int:
        """Requests that were not taken, or ended with an error or at a deadline."""
        return self.num_requests - self.outcomes.get(DONE, 0)

    def value(self, name: str) -> float:
        """A figure by name, as in ``values``. NaN where the run has none; raises ``ConfigError``
        for a name that no run has."""
        if name not in NAMES:
            raise ConfigError(f"figure {name!r} is not known; there are: {', '.join(NAMES)}")
        return self.values()[name]

    def values(self) -> dict[str, float]:
        """All that is one number, by name; hook time is not among them."""
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
            "num_steps": float(self.num_steps),
            "makespan.bound": self.makespan / self.bounds.makespan if self.bounds else nan,
            "e2e.bound": self.mean_e2e / self.bounds.mean_e2e if self.bounds else nan,
        }


LATENCIES = tuple(f"{kind}.{name}" for kind in KINDS for name in STATISTICS)
NAMES = (
    *LATENCIES,
    *("requests_per_second", "tokens_per_second", "makespan", "attainment"),
    *("goodput", "jain", "gap", "recomputed", "preempted", "refused", "kv_peak", "prefix_hits"),
    *("num_steps", "makespan.bound", "e2e.bound"),
)
"""The figures that ``Figures.values`` has. ``.bound``: over what no scheduler can beat."""


def is_better_small(name: str) -> bool:
    """Whether less of this figure is better."""
    return name.partition(".")[0] in SMALLER_IS_BETTER


def figures(run: Run, *, slo: Sequence[Limit] = (), period: Window | None = None) -> Figures:
    """The figures of a run.

    ``slo``: what was promised to each request, in place of its own promises; ``period``: what
    counts, in place of what the rule says, to take the same requests of several runs. Raises
    ``PolicyError`` for a run that is not the policy's own, but in part the default's.
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
        bounds=bounds(work) if work else None,
        mean_e2e=float((last - arrival)[requests.done].mean()) if requests.done.any() else nan,
        counters=totals["counters"],
        hook_seconds=run.hook_seconds,
    )


def period_of(run: Run) -> Window:
    """What counts of a run."""
    return window(run.requests, is_backlog=_is_backlog(run))


def _is_backlog(run: Run) -> bool:
    """Whether requests came much faster than any scheduler could serve them; where the cost of a
    step is not known: whether most were still there when the last one came."""
    requests = run.requests
    arrival, last = requests.times("arrival"), requests.times("last")
    if not len(arrival):
        return False
    if (work := work_of(requests, run.head)) is not None:
        return demand(work) > BACKLOG_LOAD * float(arrival[-1] - arrival[0])
    return float((last <= arrival[-1]).mean()) < 1.0 / BACKLOG_LOAD


def recomputed(run: Run) -> float:
    """Share of computed tokens that had been computed before."""
    requests, totals = run.requests, run.totals
    done = requests.done
    needed = int((requests.counts("num_prompt") + requests.counts("num_output") - 1)[done].sum())
    computed = int(totals["num_scheduled_tokens"])
    return max(0, computed - (needed - int(totals["prefix_hits"]))) / max(1, computed)


def collapse(name: str, share: float, throughput: float, of_fcfs: float) -> str | None:
    """A line for a policy that computes much again, or serves much less than fcfs, if it does."""
    faults = []
    if share > MAX_RECOMPUTED:
        faults.append(f"computes {100.0 * share:.0f} % of its tokens again")
    if throughput < MIN_THROUGHPUT * of_fcfs:
        faults.append(f"serves {throughput / of_fcfs:.2f} of fcfs's tokens a second")
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
    found = _gaps(run.gaps, period)
    for kind, values in columns.items():
        for name, share in STATISTICS.items():
            mine = values[counted]
            found[f"{kind}.{name}"] = mean_of(mine) if isnan(share) else quantile_of(mine, share)
    return found


def _gaps(gaps: Floats, period: Window) -> dict[str, Estimate]:
    """Gaps of requests that ended in the period. A step's gaps are one observation: its length."""
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
    """How many times as long as alone on an idle engine each took; NaN if it failed [requests]."""
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
    """First tokens, and one after each gap."""
    firsts = run.requests.times("first")
    others = _per_second(run.gaps[:, 0], period, run.gaps[:, 2])
    return _per_second(firsts[~np.isnan(firsts)], period) + others
