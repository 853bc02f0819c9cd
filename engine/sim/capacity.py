"""The highest rate at which a policy keeps limits: bisection, on one sequence of requests a seed.

All rates of a seed have the same requests in the same order, whose gaps are scaled; so a higher
rate is the same traffic, faster. A rate passes if the run is not overloaded and each limit is kept.
It is found to 1 %, for each seed by itself; the interval is from the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, sqrt
from typing import Any

from engine.errors import ConfigError
from engine.sim.estimate import Estimate, mean_over
from engine.sim.experiment import in_processes
from engine.sim.figures import NAMES, figures
from engine.sim.promises import Limit, limits
from engine.sim.run import Engine, capacity_of, check, run
from engine.sim.workloads import Workload

GRAIN = 0.01
FIRST_STEP = 1.25  # from what fcfs can serve to the next rate that is tried; then its square, ...
MIN_SHARE = 1e-3  # of that: a policy that keeps no limit at it has no capacity
MAX_SHARE = 1e3
MIN_SEEDS = 3
EXAMPLE = "ttft.p99<1,itl.p99<0.1"


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is looked for. ``limits``: of figures of a run, as in ``ttft.p99<1``."""

    policy: Any
    workload: Workload
    limits: Sequence[Limit]
    engine: Engine = field(default_factory=Engine)
    seed: int = 0
    slo: Sequence[Limit] = ()
    """What each request is promised, where ``attainment`` or ``goodput`` is limited."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What was found, in requests a second."""

    by_seed: list[float]
    """0 where no rate passed."""

    @property
    def mean(self) -> Estimate:
        return mean_over(self.by_seed)


def conditions(text: str) -> list[Limit]:
    """``--capacity``'s limits. Raises ``ConfigError``."""
    found = limits(text, "--capacity", EXAMPLE)
    for limit in found:
        if limit.figure not in NAMES:
            raise ConfigError(
                f"--capacity has {str(limit)!r}: figure {limit.figure!r} is not known; there are: "
                f"{', '.join(NAMES)}"
            )
    return found


def capacities(
    policies: Sequence[Any],
    workload: Workload,
    limits: Sequence[Limit],
    engine: Engine | None = None,
    *,
    seeds: Sequence[int] = range(MIN_SEEDS),
    slo: Sequence[Limit] = (),
    jobs: int = 1,
) -> list[Capacity]:
    """That of each policy. Raises ``ConfigError`` for options that cannot work."""
    engine = engine or Engine()
    if len(seeds) < MIN_SEEDS:
        raise ConfigError(f"--seeds is {len(seeds)}; a capacity needs {MIN_SEEDS} or more")
    if workload.natural_rate is None:
        raise ConfigError(f"{workload} comes as others end, so it has no rate to be searched")
    check(policies, workload, engine)
    searches = [
        Search(policy=p, workload=workload, limits=limits, engine=engine, seed=seed, slo=slo)
        for p in policies
        for seed in seeds
    ]
    found = list(in_processes(highest_rate, searches, jobs))
    count = len(seeds)
    return [Capacity(by_seed=found[n : n + count]) for n in range(0, len(found), count)]


def highest_rate(search: Search) -> float:
    """Requests a second, for one seed."""
    start = capacity_of(search.workload, search.engine, search.seed)
    low = high = start
    step = FIRST_STEP
    if passes(search, start):
        while high < MAX_SHARE * start:
            low, high, step = high, high * step, step * step
            if not passes(search, high):
                break
        else:
            raise ConfigError(
                f"{search.policy!r} keeps {', '.join(map(str, search.limits))} at any rate; limit "
                "what grows with it, such as ttft.p99"
            )
    else:
        while low > MIN_SHARE * start:
            low, high, step = low / step, low, step * step
            if passes(search, low):
                break
        else:
            return 0.0
    while high > low * (1.0 + GRAIN):
        middle = sqrt(low * high)
        low, high = (middle, high) if passes(search, middle) else (low, middle)
    return low


def passes(search: Search, rate: float) -> bool:
    """Whether all limits are kept at this rate."""
    found = figures(
        run(search.policy, search.workload, search.engine, seed=search.seed, rate=rate),
        slo=search.slo,
    )
    if found.is_overloaded:
        return False
    values = found.values()
    for limit in search.limits:
        value = values[limit.figure]
        if isnan(value):
            raise ConfigError(
                f"--capacity limits {limit.figure}, which runs of {search.workload} do not have: "
                "attainment and goodput want promises (--slo), jain and gap users who wait"
            )
        if not (value > limit.value if limit.is_least else value < limit.value):
            return False
    return True
