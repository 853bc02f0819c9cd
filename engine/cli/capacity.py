"""``metronome compare --capacity``: the highest rates at which policies keep limits."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from engine.cli import lab
from engine.errors import ConfigError
from engine.sim.capacity import Capacities, capacities, limits_of
from engine.sim.compare import Experiment
from engine.sim.estimate import Estimate
from engine.sim.promises import Limit

CONFLICTS = {
    "loads": "it looks for the rate itself",
    "rate": "it looks for the rate itself",
    "figures": "it shows rates",
    "unpaired": "all policies get the same requests",
    "whole": "it is of the steady part of a run",
    "report": "it shows rates",
    "plots": "it shows rates",
}


def run(parsed: argparse.Namespace, what: Experiment) -> int:
    for name, why in CONFLICTS.items():
        if getattr(parsed, name):
            raise ConfigError(f"--capacity and --{name} do not go together: {why}; leave one out")
    limits = limits_of(parsed.capacity)
    found = capacities(what, limits, jobs=parsed.jobs)
    if parsed.json or parsed.csv:
        rows = [row for each in found for row in rows_of(each, what.seeds)]
        print(lab.as_json(rows) if parsed.json else lab.as_csv(rows))
        return 0
    print(*_head(what, limits), sep="\n")
    for each in found:
        print("", *described(each), sep="\n")
    return 0


def _head(what: Experiment, limits: Iterable[Limit]) -> Iterable[str]:
    yield (
        f"{what.workload}: the highest rate with {' and '.join(map(str, limits))}, to 1 %, with "
        f"{len(what.seeds)} seeds from {what.seeds[0]} on"
    )
    yield lab.engine_line(what.engine)
    yield lab.cost_line(what.engine)


def rows_of(found: Capacities, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """A row for each policy and seed."""
    return [
        {"policy": name, "seed": seed, "setting": found.setting, **vars(each)}
        for name, column in zip(found.names, found.found, strict=True)
        for seed, each in zip(seeds, column, strict=True)
    ]


def described(found: Capacities) -> Iterable[str]:
    """The rate of each policy with its interval, and its difference from the first's."""
    if found.setting:
        yield found.setting
    heads = ("policy", "requests/s", "of the seeds", "limited by")
    others = len(found.names) > 1
    rows: list[tuple[str, ...]] = [(*heads, *(("difference", "") if others else ()))]
    for place, name in enumerate(found.names):
        low, high = found.ends(place)
        shown = (name, lab.interval(found.rate(place), 2), f"{low:.2f} to {high:.2f}")
        cause = found.limited_by(place) or "nothing that was tried"
        row: tuple[str, ...] = (*shown, cause)
        if others and place:
            by, verdict = found.difference(place)
            row += (_percent(by), verdict)
        elif others:
            row += ("", "")
        rows.append(row)
    yield from lab.aligned(rows)


def _percent(by: Estimate) -> str:
    """A share with half its interval."""
    if by.value != by.value:
        return "-"
    return f"{100 * by.value:+.1f} % ±{50 * (by.high - by.low):.1f}"
