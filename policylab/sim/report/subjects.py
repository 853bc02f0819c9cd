"""What a report shows: single runs with their figures, and points of a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from policylab.sim.compare import Cell, Difference, verdict
from policylab.sim.estimate import Estimate, mean_over
from policylab.sim.figures import NAMES, Figures, figures, is_better_small
from policylab.sim.promises import Limit
from policylab.sim.run import Run


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run in a report, with its figures and a unique label."""

    label: str
    run: Run
    figures: Figures
    where: str = ""
    """Which of all simulated runs this one is, as in "seed 0 at load 0.6, of 3 seeds and 2
    loads"."""
    elsewhere: str = ""
    """The overloaded runs of the same policy in the comparison, as in "2 of 3 at load 0.9"."""

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Mask of the finished requests after the warm-up [requests]."""
        came = np.zeros(len(self.run.requests), dtype=np.bool_)
        came[self.figures.window.num_warmup :] = True
        counted: NDArray[np.bool_] = came & self.run.requests.done
        return counted

    @property
    def rate(self) -> float:
        """The arrival rate in requests per second; NaN if unknown."""
        rate = self.run.head.get("rate")
        return float(rate) if rate is not None and rate < 1e299 else nan


@dataclass(frozen=True, kw_only=True)
class Point:
    """The results of one policy at one load (or arrival rate), over all seeds."""

    policy: str
    rate: float
    """The arrival rate in requests per second."""
    values: Mapping[str, Estimate]
    """Figures by name, as ``Figures.values`` has them."""
    load: float = nan
    """The rate over the rate that fcfs can serve; NaN if unknown."""
    kind: str = "simulated"
    is_overloaded: bool = False
    """True if most seeds are overloaded."""
    num_seeds: int = 1
    num_overloaded: int = 0
    """The number of overloaded seeds."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """For each figure that only some seeds have, the number of seeds that have it."""
    setting: str = ""
    """The swept option as ``option=value``."""
    base: str = ""
    """The policy that this one is compared with; empty if it is that policy itself."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """By name of the figure, its difference from that of ``base``, over pairs of runs with the same
    requests."""

    def value(self, name: str) -> float:
        """The mean of the figure of this name; NaN if the point has none."""
        found = self.values.get(name)
        return nan if found is None else found.value

    def seeds_with(self, name: str) -> str:
        """A text such as "2 of 8" if only some of the seeds have the figure; else empty."""
        count = self.counts.get(name, 0)
        return f"{count} of {self.num_seeds}" if count else ""

    @property
    def name(self) -> str:
        """The policy's name as shown in legends."""
        return self.policy if self.kind == "simulated" else f"{self.policy} ({self.kind})"


def subjects(
    runs: Sequence[Run], slo: Sequence[Limit], points: Sequence[Point] = ()
) -> list[Subject]:
    """Compute the figures of each run and give it a unique label. Runs without figures are left
    out. ``points``: the points of the comparison that the runs belong to, if any."""
    runs = [run for run in runs if not run.not_own]
    found = [figures(run, slo=slo) for run in runs]
    return [
        Subject(
            label=label,
            run=run,
            figures=each,
            where=_where(run, points),
            elsewhere=_elsewhere(run, points),
        )
        for label, run, each in zip(_labels(runs), runs, found, strict=True)
    ]


def _where(run: Run, points: Sequence[Point]) -> str:
    """A text that identifies the run within its comparison, such as "seed 0 at load 0.6, of 3 seeds
    and 2 loads"."""
    seed, rate = run.head.get("seed"), run.head.get("rate")
    mine = next((p for p in points if p.rate == rate and p.kind == kind(run)), None)
    text = "" if seed is None else f"seed {seed}"
    if mine is not None and isfinite(mine.load):
        text += f" at load {mine.load:g} ({_rate(run)[:-2]} requests per second)"
    elif rate is not None and rate < 1e299:
        text += f" at {_rate(run)[:-2]} requests per second"
    if mine is None:
        return text.strip()
    if mine.setting:
        text += f" with {mine.setting}"
    numbers = (
        (mine.num_seeds, "seeds"),
        (len({p.rate for p in points if p.setting == mine.setting}), "loads"),
        (len({p.setting for p in points}), "settings"),
    )
    several = [f"{number} {name}" for number, name in numbers if number > 1]
    return f"{text}, of {' and '.join(several)}".strip() if several else text.strip()


def _elsewhere(run: Run, points: Sequence[Point]) -> str:
    """A text such as "2 of 3 at load 0.9": how many runs of the same policy in the comparison were
    overloaded; empty if none was."""
    mine = [p for p in points if p.policy in (run.policy, f"{run.policy}, {p.setting}")]
    return ", ".join(
        f"{p.num_overloaded} of {p.num_seeds} at {place_of(p)}"
        f"{f' with {p.setting}' if p.setting else ''}"
        for p in mine
        if p.num_overloaded
    )


def which_runs(found: Sequence[Subject]) -> str:
    """A sentence with the seed and load of the runs; empty if they have different ones."""
    alike = {each.where for each in found}
    return f"Single runs are shown: {alike.pop()}." if len(alike) == 1 and alike != {""} else ""


def place_of(point: Point) -> str:
    """The point's load as text, or its arrival rate if the load is unknown."""
    if isfinite(point.load):
        return f"load {point.load:.4g}"
    return f"{point.rate:.4g} requests per second"


def _labels(runs: Sequence[Run]) -> list[str]:
    labels = [run.policy for run in runs]
    for more in (kind, _rate, _seed, _workload):
        labels = _apart(labels, [more(run) for run in runs])
    return _apart(labels, [f"#{place + 1}" for place in range(len(runs))])


def _apart(labels: list[str], more: list[str]) -> list[str]:
    """Make labels distinct: append to equal labels their texts in ``more``, if these differ."""
    found = list(labels)
    for label, count in Counter(labels).items():
        places = [place for place, each in enumerate(labels) if each == label]
        if count > 1 and len({more[place] for place in places}) > 1:
            for place in places:
                found[place] = f"{label}, {more[place]}"
    return found


def kind(run: Run) -> str:
    """The kind of the run: simulated or real."""
    return str(run.head.get("kind", "simulated"))


def _rate(run: Run) -> str:
    rate = run.head.get("rate")
    return "all at once" if rate is None or rate > 1e299 else f"{rate:.3g}/s"


def _seed(run: Run) -> str:
    return f"seed {run.head.get('seed')}"


def _workload(run: Run) -> str:
    return str(run.head.get("workload", ""))


def points_of(found: Sequence[Subject]) -> list[Point]:
    """The figures of each run as a point; runs without a known arrival rate are left out."""
    bases: dict[tuple[object, ...], Subject] = {}
    for each in found:
        bases.setdefault(_requests_of(each), each)
    return [
        Point(
            policy=each.run.policy,
            rate=each.rate,
            values={
                name: each.figures.latency.get(name, Estimate(value, nan, nan))
                for name, value in each.figures.values().items()
            },
            kind=kind(each.run),
            is_overloaded=each.figures.is_overloaded,
            num_overloaded=int(each.figures.is_overloaded),
            base="" if base is each else base.run.policy,
            differences={} if base is each else _of_one_pair(each.figures, base.figures),
        )
        for each in found
        for base in (bases[_requests_of(each)],)
        if isfinite(each.rate)
    ]


def _requests_of(subject: Subject) -> tuple[object, ...]:
    """A key that two runs share if they served the same requests."""
    head = subject.run.head
    return (kind(subject.run), *(str(head.get(n)) for n in ("workload", "seed", "rate")))


def _of_one_pair(ours: Figures, theirs: Figures) -> dict[str, Difference]:
    """For each figure, its difference between two single runs. As a single pair gives no confidence
    interval, the verdict can only be "equal" or "undecided"."""
    found = {}
    for name in NAMES:
        one, other = ours.value(name), theirs.value(name)
        if isfinite(one - other):
            by = mean_over([one - other])
            found[name] = Difference(
                figure=name,
                ours=mean_over([one]),
                theirs=mean_over([other]),
                by=by,
                verdict=verdict(by, is_equal=one == other, is_better_small=is_better_small(name)),
                num_seeds=1,
            )
    return found


def points_from(cells: Sequence[Cell]) -> list[Point]:
    """The points of a comparison: one for each policy, load and setting, over all seeds."""
    found = []
    for cell in cells:
        for place, name in enumerate(cell.names):
            several = cell.figures[place]
            latency = several[0].latency if len(several) == 1 else {}
            values = {n: latency.get(n) or cell.over_seeds(place, n) for n in NAMES}
            counts = {n: cell.num_with(place, n) for n in NAMES}
            found.append(
                Point(
                    policy=f"{name}, {cell.setting}" if cell.setting else name,
                    rate=nan if cell.rate is None else cell.rate,
                    load=nan if cell.load is None else cell.load,
                    values=values,
                    is_overloaded=2 * cell.num_overloaded(place) > len(several),
                    counts={n: count for n, count in counts.items() if count < len(several)},
                    num_seeds=len(several),
                    num_overloaded=cell.num_overloaded(place),
                    setting=cell.setting,
                    base=cell.names[0] if place else "",
                    differences={n: cell.difference(place, n) for n in NAMES if place},
                )
            )
    return found
