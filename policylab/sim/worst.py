"""Search for the workload and engine on which one policy is worst relative to another.

A case sets the value of each knob: options of the workload, sizes of the engine, the load. Its
score says how many times worse the first policy's figure is than the second's, on average over the
seeds, for whole runs without a cut of the warm-up. The search is hill climbing: it starts at the
given case, changes one or two knobs at a time, and keeps changes that do not lower the score;
without progress it restarts at a random case, until time is up.

The worst case is then simplified as long as it keeps most of its score: knobs return to their start
values, and requests are removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, inf, isfinite, log
from random import Random
from typing import Any

from engine.errors import ConfigError, PolicyError
from policylab.sim.experiment import NoFigures, Setting, measure, with_option
from policylab.sim.figures import is_better_small
from policylab.sim.promises import Limit
from policylab.sim.run import Engine, capacity_of, name_of, rate_at
from policylab.sim.workloads import Workload

LOAD = "load"
NUM_REQUESTS = "num_requests"
KNOBS: dict[str, tuple[Any, ...]] = {
    LOAD: (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3),
    "max_num_seqs": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "max_num_batched_tokens": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "num_blocks": (64, 96, 128, 192, 256, 384, 512, 700, 1024, 2048, 4096),
    "prompt_tokens": (
        *((1, 16), (1, 64), (16, 256), (16, 1024), (16, 2048), (1, 4096)),
        *((64, 64), (256, 256), (512, 512), (256, 1024), (1024, 1024), (1024, 4096)),
    ),
    "output_tokens": (
        *((1, 1), (1, 16), (1, 64), (8, 128), (8, 512), (8, 1024)),
        *((16, 16), (64, 64), (128, 128), (128, 512), (512, 512)),
    ),
    "scale": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
    "shared_prefix": (0, 64, 256, 1024),
    "arrivals": (
        *("gamma(cv=0.0)", "poisson", "gamma(cv=2.0)", "gamma(cv=4.0)", "onoff(on=5,off=5)"),
        *("onoff(on=5,off=20)", "burst(every=20,seconds=2)", "ramp(first=0.2,last=1.8)"),
    ),
    "num_users": (0, 1, 2, 4, 16, 64),
    "user_skew": (0.0, 1.0, 2.0),
    "num_priorities": (0, 2, 8),
    "deadlines": (None, (0.5, 5.0), (1.0, 60.0)),
}
"""The values of each knob; a case has the knobs that its workload and engine have as options."""
NUM_DRAWS = 100  # draws of a valid case, such as one whose prompts fit into the pool
NUM_IN_VAIN = 20  # changes without progress before a restart
SHARE_TURNED = 0.4  # share of knobs that a random case changes
SHARE_KEPT = 0.8  # share of the score that a simpler case must keep
SHARE_SEARCHED = 0.7  # share of the time; the rest is for simplifying
LEAST_REQUESTS = 10
NUM_AT_ONCE = 100  # requests in the measurement of a case's capacity
TINY = 1e-3  # added to both figures, so that one may be 0
MAX_IDLE_LOOKS = 20_000

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """A workload, an engine and a load on which the two policies are compared."""

    workload: Workload
    engine: Engine
    load: float | None
    """The load as a share of the rate that fcfs can serve; ``None``: the workload's own
    arrivals."""
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How much worse the first policy is than the second in one case."""

    worse: float
    """Logarithm of how many times as bad the first policy is; -inf for a case without figures."""
    ours: float = 0.0
    """The first policy's figure, the mean over the seeds."""
    theirs: float = 0.0
    why: str = ""
    """Why the first policy has no figures: a run never ended or was not valid."""

    @property
    def times(self) -> float:
        """The factor by which the first policy's figure is worse than the second's."""
        return exp(self.worse) if self.worse < inf else inf


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """The input of a search: two policies, the figure to compare, the case to start from, and
    limits."""

    policy: Any
    other: Any
    figure: str
    start: WorstCase
    slo: tuple[Limit, ...] = ()
    pinned: frozenset[str] = frozenset()
    """Names of the knobs that keep their start values."""
    seed: int = 0
    seconds: float = 60.0
    max_tries: float = inf
    clock: Clock = field(default=time.monotonic)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A case with its score, and the number of cases tried so far."""

    case: WorstCase
    score: Score
    num_tries: int


def find_worst(hunt: Hunt) -> Found:
    """Search for the worst case and simplify it. Raises ``ConfigError`` if no case could be run."""
    search = _WorstSearch(hunt)
    worst = search.climb()
    if not worst.score.worse > -inf:
        raise ConfigError(
            f"no case could be run in {hunt.seconds:g} s; give more --seconds or fewer --requests"
        )
    return search.simplest(worst)


class _WorstSearch:
    def __init__(self, hunt: Hunt) -> None:
        self._hunt = hunt
        self._dice = Random(hunt.seed)
        self._begun = hunt.clock()
        self._num_tries = 0
        self._scores: dict[str, Score] = {}
        start = hunt.start
        self._knobs = {
            name: values
            for name, values in KNOBS.items()
            if name not in hunt.pinned and _has(start, name)
        }
        self._defaults = {name: choice(start, name) for name in self._knobs}

    def climb(self) -> Found:
        """Search by hill climbing for a share of the total time. Returns the worst case found."""
        best = here = self._tried(self._hunt.start)
        in_vain = 0
        while self._knobs and self._goes_on(SHARE_SEARCHED):
            restarts = in_vain >= NUM_IN_VAIN or not here.score.worse > -inf
            there = self._tried(self._drawn(here.case, restarts=restarts))
            in_vain = 0 if restarts or there.score.worse > here.score.worse else in_vain + 1
            if restarts or there.score.worse >= here.score.worse:
                here = there
            best = max(best, here, key=lambda found: found.score.worse)
        return replace(best, num_tries=len(self._scores))

    def simplest(self, worst: Found) -> Found:
        """Simplify the case as long as it keeps most of its score and there is time."""
        least = worst.score.worse if worst.score.worse == inf else SHARE_KEPT * worst.score.worse
        best, is_simpler = worst, worst.score.worse > 0
        while is_simpler:
            is_simpler = False
            for name in (*self._knobs, NUM_REQUESTS):
                for case in self._simpler(best.case, name):
                    if not self._goes_on(1.0):
                        break
                    there = self._tried(case)
                    if there.score.worse >= least:
                        best, is_simpler = there, True
                        break
        return replace(best, num_tries=len(self._scores))

    def _simpler(self, case: WorstCase, name: str) -> Iterator[WorstCase]:
        """Yield simpler cases: with the knob ``name`` at its start value or one step nearer to it;
        for "num_requests", with fewer requests."""
        now = choice(case, name)
        if name == NUM_REQUESTS:
            fewer = [n for n in (now // 2, now * 3 // 4) if LEAST_REQUESTS <= n < now]
            yield from (_with(case, name, number) for number in fewer)
            return
        values, then = self._knobs[name], self._defaults[name]
        if now == then:
            return
        yield from self._made(case, {name: then})
        if now in values and then in values:
            place, goal = values.index(now), values.index(then)
            if abs(goal - place) > 1:
                yield from self._made(case, {name: values[place + (1 if goal > place else -1)]})

    def _drawn(self, case: WorstCase, *, restarts: bool) -> WorstCase:
        """Return a random valid case: a neighbour of ``case`` or, with ``restarts``, a variant of
        the hunt's start case. If ``NUM_DRAWS`` draws are invalid, returns the case to be varied."""
        dice, knobs = self._dice, self._knobs
        case = self._hunt.start if restarts else case
        for _ in range(NUM_DRAWS):
            if restarts:
                turned = {
                    n: dice.choice(v) for n, v in knobs.items() if dice.random() < SHARE_TURNED
                }
            else:
                names = dice.sample(list(knobs), min(len(knobs), dice.choice((1, 1, 2))))
                turned = {name: self._neighbour(name, choice(case, name)) for name in names}
            for each in self._made(case, turned):
                return each
        return case

    def _neighbour(self, name: str, value: Any) -> Any:
        """A random value for the knob ``name``: mostly next to ``value`` in its list, sometimes
        any."""
        values = self._knobs[name]
        if value not in values or self._dice.random() < 0.3:
            return self._dice.choice(values)
        place = values.index(value) + self._dice.choice((-1, 1))
        return values[min(max(place, 0), len(values) - 1)]

    def _made(self, case: WorstCase, turned: Mapping[str, Any]) -> Iterator[WorstCase]:
        """Yield the case with the knobs ``turned`` to these values, or nothing if it is invalid."""
        try:
            for name, value in turned.items():
                case = _with(case, name, value)
        except ConfigError:
            return
        if case.workload.max_model_len <= case.engine.longest_request:
            yield case

    def _tried(self, case: WorstCase) -> Found:
        self._num_tries += 1
        key = repr((case.workload, case.engine, case.load))
        if key not in self._scores:
            self._scores[key] = score(self._hunt, case)
        return Found(case=case, score=self._scores[key], num_tries=len(self._scores))

    def _goes_on(self, share: float) -> bool:
        hunt = self._hunt
        is_early = hunt.clock() - self._begun < share * hunt.seconds
        return is_early and self._num_tries < share * hunt.max_tries


def score(hunt: Hunt, case: WorstCase) -> Score:
    """Run both policies of the hunt on the case and compare their figures."""
    ours: list[float] = []
    theirs: list[float] = []
    engine, rate = replace(case.engine, max_idle_looks=MAX_IDLE_LOOKS), None
    for seed in case.seeds:
        try:
            if rate is None:
                rate = rate_of(replace(case, engine=engine))
            setting = Setting(
                policies=(hunt.other,),
                workload=case.workload,
                engine=engine,
                seed=seed,
                rate=rate,
                slo=hunt.slo,
                is_whole=True,
            )
            [other] = measure(setting)
            [own] = measure(replace(setting, policies=(hunt.policy,)))
        except ConfigError:
            return Score(worse=-inf)
        if isinstance(other, NoFigures):
            raise PolicyError(f"{name_of(hunt.other)} has no figures: {other.why}")
        if isinstance(own, NoFigures):
            return Score(worse=inf, why=f"{name_of(hunt.policy)} has no figures: {own.why}")
        ours.append(own.value(hunt.figure))
        theirs.append(other.value(hunt.figure))
    own_mean, other_mean = _mean(ours), _mean(theirs)
    worse = log((max(own_mean, 0.0) + TINY) / (max(other_mean, 0.0) + TINY))
    if not isfinite(worse):
        return Score(worse=-inf)
    sign = 1.0 if is_better_small(hunt.figure) else -1.0
    return Score(worse=sign * worse, ours=own_mean, theirs=other_mean)


def rate_of(case: WorstCase) -> float | None:
    """The arrival rate of the case in requests per second: its load times the rate that fcfs can
    serve, which is measured with few requests. ``None`` if the case has no load."""
    if case.load is None:
        return None
    rough = capacity_of(case.workload, case.engine, num_requests=NUM_AT_ONCE)
    return rate_at(case.load, case.workload, case.engine, capacity=rough)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _has(case: WorstCase, name: str) -> bool:
    if name == LOAD:
        return case.load is not None
    return any(name == each.name for part in (case.workload, case.engine) for each in fields(part))


def choice(case: WorstCase, name: str) -> Any:
    """The value of a knob or other option in this case; ``None`` if the case lacks the option."""
    if name == LOAD:
        return case.load
    parts = (case.workload, case.engine)
    return next((getattr(part, name) for part in parts if hasattr(part, name)), None)


def _with(case: WorstCase, name: str, value: Any) -> WorstCase:
    if name == LOAD:
        return replace(case, load=value)
    workload, engine = with_option(name, value, case.workload, case.engine)
    return replace(case, workload=workload, engine=engine)
