"""Compare policies on the same requests, and test whether a difference is more than chance.

Both policies of a pair get the same requests at the same times ("common random numbers"), so luck
with the requests cancels out of the difference. The interval of a difference is a 95 % Student
interval over seeds. If it contains 0, the verdict is "undecided". By chance, one in twenty figures
without a real difference gets another verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any

from engine.errors import ConfigError
from policylab.sim.estimate import NOTHING, Estimate, difference, mean_over
from policylab.sim.experiment import (
    NoFigures,
    Setting,
    check_jobs,
    check_rate,
    distinct,
    in_processes,
    measure,
    with_option,
)
from policylab.sim.figures import Figures, collapse, is_better_small
from policylab.sim.promises import Limit
from policylab.sim.run import Engine, check, check_load, name_of, rate_at
from policylab.sim.workloads import Workload

EQUAL, UNDECIDED, BETTER, WORSE, NO_MEANS = "equal", "undecided", "better", "worse", "no means"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of one policy (``ours``) compared with that of another one (``theirs``)."""

    figure: str
    ours: Estimate
    """The mean of the figure over seeds, as is ``theirs``."""
    theirs: Estimate
    by: Estimate
    """The difference ``ours`` minus ``theirs``."""
    verdict: str
    """One of: equal (to the last digit), undecided, better, worse, no means (a seed was overloaded
    and has nothing to compare)."""
    num_seeds: int
    """The number of seeds for which both policies have the figure."""

    @property
    def relative(self) -> float:
        """The difference divided by the magnitude of the other policy's mean; 0 if that is 0."""
        return self.by.value / abs(self.theirs.value) if self.theirs.value else 0.0


def verdict(by: Estimate, *, is_equal: bool, is_better_small: bool) -> str:
    """Returns "equal", "undecided", "better" or "worse" for the difference ``by`` between two
    policies. ``is_equal``: all their values are the same to the last digit; ``is_better_small``:
    smaller values are better."""
    if is_equal:
        return EQUAL
    if by.holds_zero:
        return UNDECIDED
    return BETTER if (by.value < 0) == is_better_small else WORSE


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The figures of all policies over all seeds, at one load and one setting."""

    load: float | None
    rate: float | None
    """Requests per second; ``None``: the workload's own rate."""
    capacity: float | None
    """Requests per second that fcfs can serve, if measured."""
    setting: str
    """The swept option as ``option=value``; empty without a sweep."""
    names: list[str]
    figures: list[list[Figures]]
    """The figures of every run, by policy, then by seed."""
    is_paired: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The policies without figures, and the reason for each: in this or another cell they were
    switched off, or some of their answers were replaced by defaults."""

    def over_seeds(self, place: int, figure: str) -> Estimate:
        """The mean of this figure over all seeds for the policy at index ``place``; NaN unless
        every seed has the figure."""
        values = [each.value(figure) for each in self.figures[place]]
        return NOTHING if any(map(isnan, values)) else mean_over(values)

    def num_with(self, place: int, figure: str) -> int:
        """The number of seeds for which the policy at index ``place`` has this figure."""
        return sum(not isnan(each.value(figure)) for each in self.figures[place])

    def num_overloaded(self, place: int) -> int:
        return sum(each.is_overloaded for each in self.figures[place])

    def difference(self, place: int, figure: str, base: int = 0) -> Difference:
        """Compares this figure of the policy at index ``place`` with that of the policy at
        ``base``."""
        ours, theirs = ([each.value(figure) for each in self.figures[p]] for p in (place, base))
        num_pairs = sum(not isnan(o - t) for o, t in zip(ours, theirs, strict=True))
        by, words = NOTHING, NO_MEANS
        if num_pairs == len(ours):
            pairs = zip(ours, theirs, strict=True)
            by = mean_over([o - t for o, t in pairs])
            by = by if self.is_paired else difference(ours, theirs)
            is_small = is_better_small(figure)
            words = verdict(by, is_equal=ours == theirs, is_better_small=is_small)
        return Difference(
            figure=figure,
            ours=self.over_seeds(place, figure),
            theirs=self.over_seeds(base, figure),
            by=by,
            verdict=words,
            num_seeds=num_pairs,
        )

    def collapses(self) -> list[str]:
        """Returns a warning for each policy that recomputes a large share of its tokens, or serves
        far fewer tokens per second than fcfs."""
        if "fcfs" not in self.names:
            base = float("nan")
        else:
            base = self.over_seeds(self.names.index("fcfs"), "tokens_per_second").value
        lines = [
            collapse(
                name,
                self.over_seeds(place, "recomputed").value,
                self.over_seeds(place, "tokens_per_second").value,
                base,
            )
            for place, name in enumerate(self.names)
        ]
        return [line for line in lines if line]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to simulate: policies, the requests that they serve, loads and seeds."""

    policies: Sequence[Any]
    """Policies as given to an engine, or as ``PolicyVariant``; for several processes by name, path
    or class."""
    workload: Workload
    engine: Engine = field(default_factory=Engine)
    loads: Sequence[float] | None = None
    """Shares of the rate that fcfs can serve, the same for all seeds; ``None``: use ``rate``."""
    rate: float | None = None
    """Requests per second; ``None``: the workload's own rate."""
    seeds: Sequence[int] = (0,)
    slo: Sequence[Limit] = ()
    sweep: tuple[str, Sequence[Any]] | None = None
    """An option of engine, workload or scheduler, and the values to try for it."""
    is_paired: bool = True
    """Whether all policies get the same requests; if not, each policy has its own seeds."""
    is_whole: bool = False
    """Whether all requests count, including those of the warm-up and of overloaded runs."""


def compare(
    what: Experiment, *, jobs: int = 1, progress: Callable[[int, int], object] = lambda *_: None
) -> list[Cell]:
    """Simulate one cell for each value of the swept option and each load, in ``jobs`` processes.
    ``progress`` is called after each seed of a cell, with the number of those done and of all.

    Raises ``ConfigError`` for options that cannot work, before anything is simulated, and
    ``EngineDeadError`` if a process dies.
    """
    if not what.policies:
        raise ConfigError("there is no policy to compare; name one, such as 'fcfs'")
    check_rate(what.rate)
    check_jobs(jobs)
    blanks = [cell for setting in variations(what) for cell in _cells(what, *setting)]
    settings = [replace(setting, seed=seed) for _, setting in blanks for seed in what.seeds]
    results = []
    for result in in_processes(measure, settings, jobs):
        results.append(result)
        progress(len(results), len(settings))
    parts = [results[n : n + len(what.seeds)] for n in range(0, len(results), len(what.seeds))]
    left_out = without_figures(blanks[0][0].names, results)
    return [
        _filled(cell, left_out, list(zip(*part, strict=True)))
        for (cell, _), part in zip(blanks, parts, strict=True)
    ]


def without_figures(names: Sequence[str], rows: Iterable[Sequence[object]]) -> dict[str, str]:
    """Returns the policies without figures in at least one row, each with its first reason.
    ``rows``: each with one result per policy, in the order of ``names``."""
    found: dict[str, str] = {}
    for row in rows:
        for name, each in zip(names, row, strict=True):
            if isinstance(each, NoFigures):
                found.setdefault(name, each.why)
    return found


def _filled(
    cell: Cell, left_out: Mapping[str, str], columns: Sequence[Sequence[Figures | NoFigures]]
) -> Cell:
    """Returns the cell with the figures of all policies except those in ``left_out``. ``columns``:
    the results of each policy, one per seed."""
    kept = {
        name: [each for each in column if isinstance(each, Figures)]
        for name, column in zip(cell.names, columns, strict=True)
        if name not in left_out
    }
    return replace(cell, names=list(kept), figures=list(kept.values()), left_out=left_out)


def _cells(
    what: Experiment, setting: str, workload: Workload, engine: Engine
) -> Iterator[tuple[Cell, Setting]]:
    """Yields for each load a cell without figures, and the setting whose runs fill it."""
    check(what.policies, workload, engine)
    loads: list[float | None] = [*what.loads] if what.loads else [None]
    for each in what.loads or ():
        check_load(each, workload)
    capacity = None
    for load in loads:
        rate = what.rate
        if load is not None:
            capacity = capacity or rate_at(1.0, workload, engine)
            rate = rate_at(load, workload, engine, capacity=capacity)
        yield (
            Cell(
                load=load,
                rate=rate,
                capacity=capacity,
                setting=setting,
                names=distinct(name_of(policy) for policy in what.policies),
                figures=[],
                is_paired=what.is_paired,
            ),
            Setting(
                policies=tuple(what.policies),
                workload=workload,
                engine=engine,
                rate=rate,
                slo=tuple(what.slo),
                is_paired=what.is_paired,
                is_whole=what.is_whole,
            ),
        )


def variations(what: Experiment) -> list[tuple[str, Workload, Engine]]:
    """Returns (``option=value``, workload, engine) for each value of the swept option; without a
    sweep, one entry with an empty text. Raises ``ConfigError``."""
    if what.sweep is None:
        return [("", what.workload, what.engine)]
    name, values = what.sweep
    return [(f"{name}={v!r}", *with_option(name, v, what.workload, what.engine)) for v in values]
