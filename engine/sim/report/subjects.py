"""What a report is about: runs with their figures, and points of a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from engine.sim.compare import Cell
from engine.sim.estimate import Estimate
from engine.sim.figures import NAMES, Figures, figures
from engine.sim.promises import Limit
from engine.sim.run import Run


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run that is shown."""

    label: str
    run: Run
    figures: Figures

    @property
    def counted(self) -> NDArray[np.bool_]:
        """The requests that its figures count [requests]."""
        came = np.zeros(len(self.run.requests), dtype=np.bool_)
        came[self.figures.window.num_warmup :] = True
        counted: NDArray[np.bool_] = came & self.run.requests.done
        return counted

    @property
    def rate(self) -> float:
        """Requests that came a second; NaN where that is not known."""
        rate = self.run.head.get("rate")
        return float(rate) if rate is not None and rate < 1e299 else nan


@dataclass(frozen=True, kw_only=True)
class Point:
    """What came of a policy at one load, over all seeds."""

    policy: str
    rate: float
    """Requests a second."""
    values: Mapping[str, Estimate]
    """Figures by name, as ``Figures.values`` has them."""
    load: float = nan
    """The rate over what fcfs can serve, where that is known."""
    kind: str = "simulated"
    is_overloaded: bool = False

    def value(self, name: str) -> float:
        """A figure; NaN where there is none."""
        found = self.values.get(name)
        return nan if found is None else found.value

    @property
    def name(self) -> str:
        """How it is called in legends."""
        return self.policy if self.kind == "simulated" else f"{self.policy} ({self.kind})"


def subjects(runs: Sequence[Run], slo: Sequence[Limit]) -> list[Subject]:
    """The runs with their figures, under names that tell them apart."""
    found = [figures(run, slo=slo) for run in runs]
    return [
        Subject(label=label, run=run, figures=each)
        for label, run, each in zip(_labels(runs), runs, found, strict=True)
    ]


def _labels(runs: Sequence[Run]) -> list[str]:
    labels = [run.policy for run in runs]
    for more in (_kind, _rate, _seed, _workload):
        labels = _apart(labels, [more(run) for run in runs])
    return _apart(labels, [f"#{place + 1}" for place in range(len(runs))])


def _apart(labels: list[str], more: list[str]) -> list[str]:
    """Labels that occur twice, with more, if that differs."""
    found = list(labels)
    for label, count in Counter(labels).items():
        places = [place for place, each in enumerate(labels) if each == label]
        if count > 1 and len({more[place] for place in places}) > 1:
            for place in places:
                found[place] = f"{label}, {more[place]}"
    return found


def _kind(run: Run) -> str:
    return str(run.head.get("kind", "simulated"))


def _rate(run: Run) -> str:
    rate = run.head.get("rate")
    return "all at once" if rate is None or rate > 1e299 else f"{rate:.3g}/s"


def _seed(run: Run) -> str:
    return f"seed {run.head.get('seed')}"


def _workload(run: Run) -> str:
    return str(run.head.get("workload", ""))


def points_of(found: Sequence[Subject]) -> list[Point]:
    """A point for each run that had a rate."""
    return [
        Point(
            policy=each.run.policy,
            rate=each.rate,
            values={
                name: each.figures.latency.get(name, Estimate(value, nan, nan))
                for name, value in each.figures.values().items()
            },
            kind=_kind(each.run),
            is_overloaded=each.figures.is_overloaded,
        )
        for each in found
        if isfinite(each.rate)
    ]


def points_from(cells: Sequence[Cell]) -> list[Point]:
    """The points of a comparison: a policy at each load and setting, over all seeds."""
    found = []
    for cell in cells:
        for place, name in enumerate(cell.names):
            several = cell.figures[place]
            latency = several[0].latency if len(several) == 1 else {}
            values = {n: latency.get(n) or cell.over_seeds(place, n) for n in NAMES}
            found.append(
                Point(
                    policy=f"{name}, {cell.setting}" if cell.setting else name,
                    rate=nan if cell.rate is None else cell.rate,
                    load=nan if cell.load is None else cell.load,
                    values=values,
                    is_overloaded=2 * cell.num_overloaded(place) > len(several),
                )
            )
    return found
