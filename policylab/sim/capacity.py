"""The highest rate at which a policy keeps limits on figures.

By bisection on the logarithm of the rate, to 1 %, for each seed alone: at all rates a seed has the
same requests in the same sequence, with the gaps between them scaled. A rate is kept if the run is
its policy's own and not overloaded, hardly a request is refused, and every limit holds for the
figures of its steady part. It is never above what seats, tokens and KV area allow
(`policylab.sim.demand`). Before `steady.window` calls a run overloaded its queue may grow by 6 % of
the arrivals; here 2 % that rise as steadily are too many, so a policy that nothing else limits is
found 2 % too good.

*Length*: a short run ends before a queue that grows is long. So runs have at least 1,000 requests,
and 5 % less than the answer must be kept for four times as many. If it is not, the search goes on
with that many, and is checked again; if that fails too, there is no answer. A file cannot be made
longer: a quarter of it is searched, and all of it checked.

*Luck*: the requests of a seed are longer or shorter than others. The rate is that of requests of
the mean size, so a seed's own is scaled by what its requests ask of the engine, over the mean.
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
from policylab.sim.workloads.reader import Reader

EXAMPLE = "ttft.p99<1,itl.p99<0.1"
GRANULARITY = 0.01
MAX_GROWTH = 0.02  # requests that stay, for each that comes
MAX_REFUSED = Limit("refused", 0.01)  # unless a limit says otherwise: a capacity is of the served
MOST_TIMES = 64.0  # what fcfs can serve: beyond that nothing limits a policy
MIN_SEEDS = 3
MIN_REQUESTS = 1000  # of a run of a search
MIN_FILE = 250  # likewise, of a file
LONGER = 4  # times the requests of the search, with which its answer is checked
FIRST_STEP = 1.1  # from the first rate to the next; the step after it is its square
TOLERANCE = 0.05  # of the rate, by which it may be less there
NUM_DRAWN = 50_000  # requests whose mean size is that of all
GROWS = "the queue grows"
FULL = "seats, tokens and KV area"


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
                f"figure {limit.figure!r} is not known to --capacity; there are: {', '.join(NAMES)}"
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
    least: int = MIN_REQUESTS
    """Requests with which the search begins, if the workload has fewer."""


@dataclass(frozen=True, kw_only=True)
class Highest:
    """What came of one search."""

    rate: float
    """Requests a second at which all limits were kept; 0 if they were at none, NaN if there is no
    answer."""
    limited_by: str
    """What was not kept 1 % above it."""
    num_runs: int
    num_requests: int = 0
    """Requests in each run of the search; the answer was checked with four times as many."""
    refused: str = ""
    """Why there is no answer, if so."""
    not_own: str = ""
    """Why the policy has no figures, if so."""


@dataclass(frozen=True, kw_only=True)
class Capacities:
    """The highest rates of policies at one setting."""

    setting: str
    """What was swept, as ``option=value``; empty if nothing."""
    names: list[str]
    found: list[list[Highest]]
    """By policy, then by seed."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Policies that have no figures, by name, and why."""

    def rate(self, place: int) -> Estimate:
        """The mean over the seeds, in requests a second; NaN unless all have an answer."""
        rates = [each.rate for each in self.found[place]]
        return NOTHING if any(map(isnan, rates)) else mean_over(rates)

    def num_answers(self, place: int) -> int:
        """Seeds that have an answer."""
        return sum(not isnan(each.rate) for each in self.found[place])

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
    """For each value of the option swept. The loads and the rate of ``what`` are not used.

    ``progress`` is called with a line after each search. Raises ``ConfigError`` for options that
    cannot work, and ``EngineDeadError`` if a process dies.
    """
    if len(what.seeds) < MIN_SEEDS:
        raise ConfigError(
            f"--seeds is {len(what.seeds)}, must be {MIN_SEEDS} or more for --capacity: fewer "
            "give no useful interval"
        )
    settings = variations(what)
    searches = [
        Search(
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
    """Results in the order of settings, policies and seeds; without policies that lack any."""
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


def _line(search: Search, found: Highest) -> str:
    rate = found.not_own or found.refused or f"{found.rate:.4g} requests a second"
    return f"{name_of(search.policy)}, seed {search.seed}: {rate} ({found.num_runs} runs)"


def _start(what: Experiment, workload: Workload, engine: Engine) -> float:
    """What fcfs can serve, once everything was checked."""
    check(what.policies, workload, engine)
    if isinstance(workload, Reader) and workload.size.number < LONGER * MIN_FILE:
        raise ConfigError(
            f"{workload} has {workload.size.number} requests, must have {LONGER * MIN_FILE} or "
            f"more for --capacity: a file cannot be made longer, and the answer is checked with "
            f"{LONGER} times as many requests as the search has"
        )
    return rate_at(1.0, workload, engine)


def highest(search: Search) -> Highest:
    """The highest rate that is kept. Raises ``ConfigError`` for a limit on a figure that the runs
    do not have."""
    return _Searcher(search).found()


class _NotOwnError(Exception):
    """A run of the policy is not its own."""


class _Searcher:
    """A search, and what is known of the runs that it has made."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._num_runs = 0
        self._last: Run | None = None

    def found(self) -> Highest:
        """The answer, or why there is none."""
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
        """Requests of the first runs, and the most there may be in a run."""
        search = self._search
        if isinstance(search.workload, Reader):
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
            f"no answer, as what {size} requests keep {longer} do not ({broken}); give --requests "
            f"{longer}"
        )

    def _bisected(self, size: int, start: float, broken: str = "") -> tuple[float, str]:
        """The highest rate kept by runs of this many requests, and what breaks above it.
        ``broken``: what is known not to hold at the first rate."""
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
        """What does not hold at this rate; empty if all does."""
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
        """What requests of runs of this size ask of the engine, over the mean of all."""
        search, done = self._search, self._last
        assert done is not None
        work = work_of(done.requests, done.head)
        if work is None or isinstance(search.workload, Reader):
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


def _broken(done: Run, search: Search, rate: float) -> str:
    """The first limit that does not hold for a run; empty if all do."""
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
                f"--capacity has {str(limit)!r}, and {done.policy} on {search.workload} has no "
                f"such figure at {rate:.4g} requests a second: nothing was promised, one user came "
                "alone, or too few requests were served; leave it out, or add --slo or --requests"
            )
        if not (value > limit.value if limit.is_least else value < limit.value):
            return str(limit)
    return ""
