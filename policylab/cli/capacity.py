"""``metronome compare --capacity``: the highest request rate at which each policy keeps limits on
its figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from engine.errors import ConfigError
from policylab.cli import lab
from policylab.sim.capacity import (
    LONGER,
    MIN_REQUESTS,
    Capacities,
    Highest,
    capacities,
    limits_of,
)
from policylab.sim.compare import Experiment
from policylab.sim.estimate import Estimate
from policylab.sim.promises import Limit

CONFLICTS = {
    "loads": "it searches for the rate itself",
    "rate": "it searches for the rate itself",
    "figures": "it prints rates only",
    "unpaired": "all policies get the same requests",
    "whole": "it measures the steady part of a run",
    "report": "it prints rates only",
    "plots": "it prints rates only",
}


def run(parsed: argparse.Namespace, what: Experiment) -> int:
    for name, why in CONFLICTS.items():
        if getattr(parsed, name):
            raise ConfigError(f"--capacity and --{name} cannot be combined: {why}; leave one out")
    limits = limits_of(parsed.capacity)
    found = capacities(what, limits, jobs=parsed.jobs, progress=_show)
    status = 1 if any(each.left_out or _unanswered(each) for each in found) else 0
    if parsed.json or parsed.csv:
        rows = [row for each in found for row in rows_of(each, what.seeds)]
        print(lab.as_json(rows) if parsed.json else lab.as_csv(rows))
        return status
    print(*_head(what, limits), sep="\n")
    for each in found:
        print("", *described(each), sep="\n")
    if left_out := found[0].left_out:
        print("", *lab.left_out_lines(left_out), sep="\n")
    return status


def _show(line: str) -> None:
    """Print a line of progress to stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)


def _unanswered(found: Capacities) -> list[tuple[str, Highest]]:
    """Returns (name of the policy, search) for each search that found no rate."""
    columns = zip(found.names, found.found, strict=True)
    return [(name, each) for name, column in columns for each in column if each.refused]


def _head(what: Experiment, limits: Iterable[Limit]) -> Iterable[str]:
    yield (
        f"{what.workload}: the highest rate with {' and '.join(map(str, limits))}, to 1 %, with "
        f"{len(what.seeds)} seeds from {what.seeds[0]} on"
    )
    yield (
        f"runs of {MIN_REQUESTS} requests or more, each answer checked with {LONGER} times as many"
    )
    yield lab.engine_line(what.engine, what.workload)
    yield lab.cost_line(what.engine)


def rows_of(found: Capacities, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """Returns one table row for each policy and seed. Each row also lists the policies left out for
    lack of figures; if no policy has figures, the only row has just this list."""
    more = {"setting": found.setting, "left_out": lab.left_out_text(found.left_out)}
    rows = []
    for place, (name, column) in enumerate(zip(found.names, found.found, strict=True)):
        counts = {"num_seeds": len(column), "num_answers": found.num_answers(place)}
        for seed, each in zip(seeds, column, strict=True):
            own = {key: value for key, value in vars(each).items() if key != "not_own"}
            rows.append({"policy": name, "seed": seed, **more, **counts, **own})
    return rows or [{"policy": "", **more}]


def described(found: Capacities) -> Iterable[str]:
    """Yields the lines for one setting: each policy's highest rate, and its difference from the
    first policy's rate."""
    if found.setting:
        yield found.setting
    if not found.names:
        return
    heads = ("policy", "requests/s", "of the seeds", "limited by")
    others = len(found.names) > 1
    rows: list[tuple[str, ...]] = [(*heads, *(("difference", "") if others else ()))]
    for place, name in enumerate(found.names):
        shown = (name, *_rates(found, place))
        cause = found.limited_by(place) or "nothing that was tried"
        row: tuple[str, ...] = (*shown, cause)
        if others and place:
            by, verdict = found.difference(place)
            row += (_percent(by), verdict)
        elif others:
            row += ("", "")
        rows.append(row)
    yield from lab.aligned(rows)
    for name, each in _unanswered(found):
        yield f"{name}: {each.refused}"


def _rates(found: Capacities, place: int) -> tuple[str, str]:
    """Returns two table cells for the policy at index ``place``: its mean rate with confidence
    interval, and the range of its rates. If only N of M seeds have a rate: "N of M" and "-"."""
    count, seeds = found.num_answers(place), len(found.found[place])
    if count < seeds:
        return (f"{count} of {seeds}" if count else "-", "-")
    low, high = found.ends(place)
    return lab.interval(found.rate(place), 2), f"{low:.2f} to {high:.2f}"


def _percent(by: Estimate) -> str:
    """Returns a relative difference in percent ± half the width of its confidence interval."""
    if by.value != by.value:
        return "-"
    return f"{100 * by.value:+.1f} % ±{50 * (by.high - by.low):.1f}"
