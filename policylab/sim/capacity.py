"""The highest request rate at which a policy keeps given limits on its figures.

Each seed is searched separately, by bisection on the logarithm of the rate, to within 1 %. At all
rates, a seed has the same requests in the same order, with scaled gaps between them. A rate passes
if the run is valid and not overloaded, at most 1 % of the requests are refused, and every limit
holds for the figures of the steady part. Rates cannot exceed what seats, tokens and KV area allow
(`policylab.sim.demand`). Here a run is overloaded if its queue grows by 2 % of the arrivals
(elsewhere: 6 %, `steady.window`), so a policy without another limit is rated up to 2 % too high.

*Length*: a short run ends before a growing queue becomes long. So runs have at least 1,000
requests, and 95 % of the rate must pass with four times as many. If it does not, the search goes on
with runs of that length; if these fail the same check, there is no result. A file cannot be
extended, so a quarter of it is used in the search, and all of it in the check.

*Luck*: the requests of a seed are longer or shorter than the average. So a seed's rate is
multiplied by the ratio of its requests' demand to the mean demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan, sqrt
from typing import Any

from engine.errors import ConfigError
from policylab.sim.bounds import work_of
from policylab.sim.compare import NO_MEANS, Experiment, variations, verdict
from policylab.sim.demand import mean_demand, most_per_second, share_found
from policylab.sim.estimate import NOTHING, Estimate, mean_over
from policylab.sim.experiment import NoFigures, distinct, in_processes, own_run
from policylab.sim.figures import KINDS, NAMES, figures, period_of
from policylab.sim.promises import Limit, limits
from policylab.sim.run import CAPACITY_SEED, Engine, Run, check, name_of, rate_at, sizes_of
from policylab.sim.steady import in_engine, is_growing
from policylab.sim.workloads import Workload
from policylab.sim.workloads.reader import FileWorkload

EXAMPLE = "ttft.p99<1,itl.p99<0.1"
GRANULARITY = 0.01
MAX_GROWTH = 0.02  # share of arrivals by which the queue may grow
MAX_REFUSED = Limit("refused", 0.01)  # the default limit on refused requests
MOST_TIMES = 64.0  # times the rate of fcfs: above it nothing limits a policy
MIN_SEEDS = 3
MIN_REQUESTS = 1000  # in a run of a search
MIN_FILE = 250  # likewise, for a file
LONGER = 4  # the result is checked with this many times the requests of the search
FIRST_STEP = (
    1.1  # ratio of the second rate to the first; each further ratio is the square of the last
)
TOLERANCE = 0.05  # share by which the rate may be lower in the check
NUM_DRAWN = 50_000  # drawn requests from which the mean size is estimated
GROWS = "the queue grows"
FULL = "seats, tokens and KV area"


def limits_of(text: str) -> list[Limit]:
    """Parse limits such as ``ttft.p99<1,itl.p99<0.1``. Raises ``ConfigError``."""
    found = limits(text, "--capacity", EXAMPLE)
    for limit in found:
        if limit.figure in KINDS:
            raise ConfigError(
                f"--capacity has {str(limit)!r}, must name a statistic: {limit.figure}.mean, "
                f"{limit.figure}.p50, {limit.figure}.p90 or {limit.figure}.p99"
            )
        if limit.figure not in NAMES:
            raise ConfigError(
                f"--capacity has the unknown figure {limit.figure!r}; known: {', '.join(NAMES)}"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class RateSearch:
    """The search for a policy's highest request rate, with the requests of one seed."""

    policy: Any
    workload: Workload
    engine: Engine
    seed: int
    start: float
    """The first rate to try, in requests per second."""
    limits: tuple[Limit, ...]
    slo: tuple[Limit, ...] = ()
    least: int = MIN_REQUESTS
    """The first runs have at least this many requests, even if the workload has fewer."""


@dataclass(frozen=True, kw_only=True)
class Highest:
    """The result of one search."""

    rate: float
    """Requests per second at which all limits hold; 0 if they hold at no rate, NaN if there is no
    result."""
    limited_by: str
    """The limit that fails at a rate 1 % higher."""
    num_runs: int
    num_requests: int = 0
    """Requests in each run of the search; the result was checked with four times as many."""
    refused: str = ""
    """Why there is no result; empty if there is one."""
    not_own: str = ""
    """Why the policy's runs are not valid (some of its answers were replaced by defaults); empty if
    they are."""


@dataclass(frozen=True, kw_only=True)
class Capacities:
    """The highest rates of all policies at one setting, for all seeds."""

    setting: str
    """The swept option as ``option=value``; empty without a sweep."""
    names: list[str]
    found: list[list[Highest]]
    """The results of the searches, by policy, then by seed."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The policies without figures, and the reason for each."""

    def rate(self, place: int) -> Estimate:
        """The mean rate of the policy at index ``place`` over all seeds, in requests per second;
        NaN unless all seeds have a result."""
        rates = [each.rate for each in self.found[place]]
        return NOTHING if any(map(isnan, rates)) else mean_over(rates)

    def num_answers(self, place: int) -> int:
        """The number of seeds for which a rate was found, for the policy at index ``place``."""
        return sum(not isnan(each.rate) for each in self.found[place])

    def ends(self, place: int) -> tuple[float, float]:
        """The lowest and the highest rate over the seeds, for the policy at index ``place``."""
        rates = [each.rate for each in self.found[place]]
        return min(rates), max(rates)

    def limited_by(self, place: int) -> str:
        """The limit that ends the search for most seeds, for the policy at index ``place``."""
        causes = [each.limited_by for each in self.found[place]]
        return max(causes, key=causes.count)

    def difference(self, place: int) -> tuple[Estimate, str]:
        """Returns (relative difference, verdict) of the rate of the policy at index ``place``,
        compared with the rate of the first policy."""
        ours, theirs = ([each.rate for each in self.found[p]] for p in (place, 0))
        scale = sum(theirs) / len(theirs)
        if not scale or isnan(scale + sum(ours)):
            return NOTHING, NO_MEANS
        by = mean_over([(o - t) / scale for o, t in zip(ours, theirs, strict=True)])
        return by, verdict(by, is_equal=ours == theirs, is_better_small=False)


def capacities(
    what: Experiment,
    limits: Sequence[Limit],
    *,
    jobs: int = 1,
    progress: Callable[[str], None] | None = None,
) -> list[Capacities]:
    """Search for the highest rate of each policy, for each value of the swept option.
    ``what.loads`` and ``what.rate`` are ignored.

    ``progress`` is called with a line after each search. Raises ``ConfigError`` for options that
    cannot work, and ``EngineDeadError`` if a process dies.
    """
    if len(what.seeds) < MIN_SEEDS:
        raise ConfigError(
            f"--seeds is {len(what.seeds)}, must be {MIN_SEEDS} or more with --capacity: fewer "
            "give no useful interval"
        )
    settings = variations(what)
    searches = [
        RateSearch(
            policy=policy,
            workload=workload,
            engine=engine,
            seed=seed,
            start=start,
            limits=tuple(limits),
            slo=tuple(what.slo),
        )
        for _, workload, engine in settings
        for start in [_start(what, workload, engine)]
        for policy in what.policies
        for seed in what.seeds
    ]
    results = []
    for search, found in zip(searches, in_processes(highest, searches, jobs), strict=True):
        results.append(found)
        if progress is not None:
            progress(f"{len(results)} of {len(searches)} searches: {_line(search, found)}")
    return _by_setting(what, [setting for setting, _, _ in settings], results)


def _by_setting(
    what: Experiment, settings: Sequence[str], results: Sequence[Highest]
) -> list[Capacities]:
    """Group results by setting, without policies that have no figures. ``results``: ordered by
    setting, policy and seed."""
    names = distinct(name_of(policy) for policy in what.policies)
    rest = iter(results)
    table = [[[next(rest) for _ in what.seeds] for _ in names] for _ in settings]
    left_out: dict[str, str] = {}
    for rows in table:
        for name, row in zip(names, rows, strict=True):
            for each in row:
                if each.not_own:
                    left_out.setdefault(name, each.not_own)
    return [
        Capacities(
            setting=setting,
            names=[name for name in names if name not in left_out],
            found=[row for name, row in zip(names, rows, strict=True) if name not in left_out],
            left_out=left_out,
        )
        for setting, rows in zip(settings, table, strict=True)
    ]


def _line(search: RateSearch, found: Highest) -> str:
    rate = found.not_own or found.refused or f"{found.rate:.4g} requests per second"
    return f"{name_of(search.policy)}, seed {search.seed}: {rate} ({found.num_runs} runs)"


def _start(what: Experiment, workload: Workload, engine: Engine) -> float:
    """Returns the rate that the policy fcfs can serve; all searches start at it. Raises
    ``ConfigError`` for options that cannot work."""
    check(what.policies, workload, engine)
    if isinstance(workload, FileWorkload) and workload.size.number < LONGER * MIN_FILE:
        raise ConfigError(
            f"{workload} has {workload.size.number} requests, must have {LONGER * MIN_FILE} or "
            f"more for --capacity: a file cannot be extended, and the result is checked with "
            f"{LONGER} times as many requests as the search has"
        )
    return rate_at(1.0, workload, engine)


def highest(search: RateSearch) -> Highest:
    """Find the highest rate at which all limits hold. Raises ``ConfigError`` for a limit on a
    figure that the runs do not have."""
    return _Searcher(search).found()


class _NotOwnError(Exception):
    """Raised if a run does not count, since defaults replaced some of the policy's answers."""


class _Searcher:
    """Carries out one search; counts its runs and keeps the last of them."""

    def __init__(self, search: RateSearch) -> None:
        self._search = search
        self._num_runs = 0
        self._last: Run | None = None

    def found(self) -> Highest:
        """The result of the search."""
        size, longest = self._sizes()
        start, broken = self._search.start, ""
        try:
            while True:
                rate, cause = self._bisected(size, start, broken)
                if not rate:
                    return self._answer(0.0, cause, size)
                longer = LONGER * size
                slower = rate * (1.0 - TOLERANCE) * self._relative(size) / self._relative(longer)
                broken = self._not_kept(longer, slower)
                if not broken:
                    return self._answer(rate * self._relative(size), cause, size)
                if longer * LONGER > longest:
                    return self._answer(nan, cause, size, self._refused(size, longer, broken))
                size, start = longer, slower
        except _NotOwnError as error:
            return self._answer(nan, "", size, not_own=str(error))

    def _sizes(self) -> tuple[int, int]:
        """Returns the number of requests in the first runs, and the maximum for any run."""
        search = self._search
        if isinstance(search.workload, FileWorkload):
            number = search.workload.size.number
            return number // LONGER, number
        size = max(search.least, search.workload.num_requests)
        return size, max(LONGER * LONGER * search.least, LONGER * size)

    def _answer(
        self, rate: float, cause: str, size: int, refused: str = "", not_own: str = ""
    ) -> Highest:
        return Highest(
            rate=rate,
            limited_by=cause,
            num_runs=self._num_runs,
            num_requests=size,
            refused=refused,
            not_own=not_own,
        )

    def _refused(self, size: int, longer: int, broken: str) -> str:
        return (
            f"no result: limits hold for {size} requests, not {longer} ({broken}); use --requests "
            f"{longer}"
        )

    def _bisected(self, size: int, start: float, broken: str = "") -> tuple[float, str]:
        """Search for the highest rate by bisection from ``start``, with runs of ``size`` requests.
        Returns the highest rate that passes (0: none) and the limit that fails above it.
        ``broken``: the limit that fails at ``start``; "" if unknown."""
        low, high, rate, step, cause = 0.0, inf, start, FIRST_STEP, broken
        if broken:
            high, rate = start, start / step
        while high > low * (1.0 + GRANULARITY):
            broken = self._not_kept(size, rate)
            if broken:
                high, cause = rate, broken
            else:
                low = rate
            rate = sqrt(low * high) if low and high < inf else low * step or high / step
            step *= step
            if not self._search.start / MOST_TIMES <= rate <= self._search.start * MOST_TIMES:
                break
        return low, cause

    def _not_kept(self, size: int, rate: float) -> str:
        """Run ``size`` requests at this rate, and return the limit that fails; "" if all hold."""
        search = self._search
        workload = replace(search.workload, num_requests=size)
        self._num_runs += 1
        done = own_run(search.policy, workload, search.engine, search.seed, rate)
        if isinstance(done, NoFigures):
            raise _NotOwnError(done.why)
        self._last = done
        if rate > most_per_second(done.requests, done.head):
            return FULL
        return _broken(done, search, rate)

    def _relative(self, size: int) -> float:
        """Returns how much work a request of this seed takes on average in a run of ``size``
        requests, divided by the workload's average."""
        search, done = self._search, self._last
        assert done is not None
        work = work_of(done.requests, done.head)
        if work is None or isinstance(search.workload, FileWorkload):
            return 1.0
        own, ran = (
            sizes_of(replace(search.workload, num_requests=n), search.engine, search.seed)
            for n in (size, len(done.requests))
        )
        every = sizes_of(
            replace(search.workload, num_requests=NUM_DRAWN), search.engine, CAPACITY_SEED
        )
        found = share_found(work, ran)
        return mean_demand(own, work, found) / mean_demand(every, work, found)


def _broken(done: Run, search: RateSearch, rate: float) -> str:
    """Returns the first limit that a run does not keep; "" if it keeps all."""
    period = period_of(done)
    if period.is_whole:
        return GROWS
    found = figures(done, slo=search.slo, period=period)
    if found.is_overloaded:
        return f"{period.growing} grows"
    if is_growing(in_engine(done.requests), MAX_GROWTH):
        return GROWS
    own = any(limit.figure == MAX_REFUSED.figure for limit in search.limits)
    for limit in search.limits if own else (MAX_REFUSED, *search.limits):
        value = found.value(limit.figure)
        if isnan(value):
            raise ConfigError(
                f"--capacity has {str(limit)!r}, but {done.policy} on {search.workload} has no "
                f"such figure at {rate:.4g} requests per second: nothing was promised, there was "
                "one user, or too few were served; leave the limit out, or add --slo or --requests"
            )
        if not (value > limit.value if limit.is_least else value < limit.value):
            return str(limit)
    return ""
