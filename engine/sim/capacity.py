"""The highest rate at which a policy keeps limits on figures.

By bisection on the logarithm of the rate, to 1 %, for each seed alone: at all rates a seed has the
same requests in the same sequence, with the gaps between them scaled. A rate is kept if the run is
not overloaded, hardly a request is refused, and every limit holds for the figures of its steady
part. Before `steady.window` calls a run overloaded its queue may grow by 6 % of the arrivals; here
2 % that rise as steadily are too many, so a policy that nothing else limits is found 2 % too good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt
from typing import Any

from engine.errors import ConfigError
from engine.sim.compare import NO_MEANS, Experiment, variations, verdict
from engine.sim.estimate import Estimate, mean_over
from engine.sim.experiment import distinct, in_processes
from engine.sim.figures import KINDS, NAMES, figures
from engine.sim.promises import Limit, limits
from engine.sim.run import Engine, check, name_of, rate_at, run
from engine.sim.steady import MIN_ARRIVALS, in_engine, is_growing
from engine.sim.workloads import Workload

EXAMPLE = "ttft.p99<1,itl.p99<0.1"
GRANULARITY = 0.01
MAX_GROWTH = 0.02  # requests that stay, for each that comes
MAX_REFUSED = Limit("refused", 0.01)  # unless a limit says otherwise: a capacity is of the served
MOST_TIMES = 64.0  # what fcfs can serve: beyond that nothing limits a policy
MIN_SEEDS = 3
GROWS = "the queue grows"


def limits_of(text: str) -> list[Limit]:
    """``ttft.p99<1,itl.p99<0.1``. Raises ``ConfigError`` for figures that are not known."""
    found = limits(text, "--capacity", EXAMPLE)
    for limit in found:
        if limit.figure in KINDS:
            raise ConfigError(
                f"--capacity has {str(limit)!r}, must say of which statistic: {limit.figure}.mean, "
                f"{limit.figure}.p50, {limit.figure}.p90 or {limit.figure}.p99"
            )
        if limit.figure not in NAMES:
            raise ConfigError(
                f"figure {limit.figure!r} is not known, as --capacity asks for it; there are: "
                f"{', '.join(NAMES)}"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class Search:
    """Whose highest rate is looked for, with the requests of one seed."""

    policy: Any
    workload: Workload
    engine: Engine
    seed: int
    start: float
    """The first rate to try, in requests a second."""
    limits: tuple[Limit, ...]
    slo: tuple[Limit, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Highest:
    """What came of one search."""

    rate: float
    """Requests a second at which all limits were kept; 0 if they were at none."""
    limited_by: str
    """What was not kept 1 % above it; empty if nothing limits it."""
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Capacities:
    """The highest rates of policies at one setting."""

    setting: str
    """What was swept, as ``option=value``; empty if nothing."""
    names: list[str]
    found: list[list[Highest]]
    """By policy, then by seed."""

    def rate(self, place: int) -> Estimate:
        """The mean over the seeds, in requests a second."""
        return mean_over([each.rate for each in self.found[place]])

    def ends(self, place: int) -> tuple[float, float]:
        """The lowest and the highest of the seeds."""
        rates = [each.rate for each in self.found[place]]
        return min(rates), max(rates)

    def limited_by(self, place: int) -> str:
        """What most seeds were limited by."""
        causes = [each.limited_by for each in self.found[place]]
        return max(causes, key=causes.count)

    def difference(self, place: int) -> tuple[Estimate, str]:
        """How much more than the first policy's, as a share of it, and what that says."""
        ours, theirs = ([each.rate for each in self.found[p]] for p in (place, 0))
        scale = sum(theirs) / len(theirs)
        if not scale:
            return mean_over([]), NO_MEANS
        by = mean_over([(o - t) / scale for o, t in zip(ours, theirs, strict=True)])
        return by, verdict(by, is_equal=ours == theirs, is_better_small=False)


def capacities(what: Experiment, asked: Sequence[Limit], *, jobs: int = 1) -> list[Capacities]:
    """For each value of the option swept. The loads and the rate of ``what`` are not used.

    Raises ``ConfigError`` for options that cannot work, and ``EngineDeadError`` if a process dies.
    """
    if len(what.seeds) < MIN_SEEDS:
        raise ConfigError(
            f"--seeds is {len(what.seeds)}, must be {MIN_SEEDS} or more for --capacity: of fewer "
            "there is no interval to speak of"
        )
    settings = variations(what)
    for _, workload, _ in settings:
        if workload.num_requests < MIN_ARRIVALS:
            raise ConfigError(
                f"num_requests is {workload.num_requests}, must be {MIN_ARRIVALS} or more for "
                "--capacity: of fewer nobody can tell whether a queue grows"
            )
    searches = [
        Search(
            policy=policy,
            workload=workload,
            engine=engine,
            seed=seed,
            start=start,
            limits=tuple(asked),
            slo=tuple(what.slo),
        )
        for _, workload, engine in settings
        for start in [_start(what, workload, engine)]
        for policy in what.policies
        for seed in what.seeds
    ]
    results = iter(list(in_processes(highest, searches, jobs)))
    return [
        Capacities(
            setting=said,
            names=distinct(name_of(policy) for policy in what.policies),
            found=[[next(results) for _ in what.seeds] for _ in what.policies],
        )
        for said, _, _ in settings
    ]


def _start(what: Experiment, workload: Workload, engine: Engine) -> float:
    """What fcfs can serve, once everything was checked."""
    check(what.policies, workload, engine)
    return rate_at(1.0, workload, engine)


def highest(search: Search) -> Highest:
    """The highest rate that is kept. Raises ``ConfigError`` for a limit on a figure that the runs
    do not have."""
    low, high, rate = 0.0, inf, search.start
    limited_by, num_runs = "", 0
    while high > low * (1.0 + GRANULARITY):
        broken = not_kept(search, rate)
        num_runs += 1
        if broken:
            high, limited_by = rate, broken
        else:
            low = rate
        rate = _between(low, high)
        if not search.start / MOST_TIMES <= rate <= search.start * MOST_TIMES:
            break
    return Highest(rate=low, limited_by=limited_by, num_runs=num_runs)


def _between(low: float, high: float) -> float:
    """The rate to try next: the middle, or twice or half as much while one end is open."""
    if high == inf:
        return 2.0 * low
    return sqrt(low * high) if low else high / 2.0


def not_kept(search: Search, rate: float) -> str:
    """What does not hold at this rate; empty if all does."""
    done = run(search.policy, search.workload, search.engine, seed=search.seed, rate=rate)
    found = figures(done, slo=search.slo)
    if found.is_overloaded or is_growing(in_engine(done.requests), MAX_GROWTH):
        return GROWS
    own = any(limit.figure == MAX_REFUSED.figure for limit in search.limits)
    for limit in search.limits if own else (MAX_REFUSED, *search.limits):
        value = found.value(limit.figure)
        if isnan(value):
            raise ConfigError(
                f"--capacity has {str(limit)!r}, and {done.policy} on {search.workload} has no "
                f"such figure at {rate:.4g} requests a second: nothing was promised, one user came "
                "alone, or too few requests were served; leave it out, or add --slo or --requests"
            )
        if not (value > limit.value if limit.is_least else value < limit.value):
            return str(limit)
    return ""
