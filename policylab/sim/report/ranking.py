"""Policies ranked by latency at each load, with a verdict on each difference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import inf, isfinite

from policylab.sim.compare import BETTER, EQUAL, NO_MEANS, WORSE, Difference
from policylab.sim.estimate import Estimate
from policylab.sim.report.loads import by_load
from policylab.sim.report.subjects import Point

TAILS = {
    "ttft.p99": "p99 of the time to first token",
    "tpot.p99": "p99 of the time per output token",
    "itl.p99": "p99 of the time between tokens",
    "e2e.p99": "p99 of the time to last token",
    "ttft.mean": "mean time to first token",
    "e2e.mean": "mean time to last token",
}


def rankings(points: Sequence[Point]) -> list[list[str]]:
    """A table of the policies in order of their means, with one row per latency figure and one
    column per load; the first row has the column names. Empty if there is only one policy."""
    loads = [(where, here) for where, here in by_load(points) if len(here) > 1]
    if not loads:
        return []
    head = ["seconds", *(f"at {where}, {_seeds(here)}" for where, here in loads)]
    rows = [
        [words, *("\n".join(_ranked(here, figure)) for _, here in loads)]
        for figure, words in TAILS.items()
        if any(
            isfinite(point.value(figure)) or point.seeds_with(figure)
            for _, here in loads
            for point in here
        )
    ]
    return [head, *rows] if rows else []


def _seeds(here: Sequence[Point]) -> str:
    most = max(point.num_seeds for point in here)
    return f"{most} seed{'' if most == 1 else 's'}"


def _ranked(here: Sequence[Point], figure: str) -> list[str]:
    known = [p for p in here if isfinite(p.value(figure))]
    known.sort(key=lambda point: point.values[figure])
    lines = [_line(list(alike), figure) for _, alike in groupby(known, lambda p: p.values[figure])]
    for point in here:
        if point.num_overloaded and not isfinite(point.value(figure)):
            lines.append(
                f"{point.name}: {point.seeds_with(figure) or '-'}, not ranked: overloaded with "
                f"{point.num_overloaded} of {point.num_seeds} "
                f"seed{'' if point.num_seeds == 1 else 's'}"
            )
    return lines


def _line(alike: Sequence[Point], figure: str) -> str:
    """The text of one place in a ranking: the policies ``alike``, which have equal values, and how
    they differ from the baseline policy."""
    names = " = ".join(point.name for point in alike)
    text = f"{names}: {interval(alike[0].values[figure])}"
    one = next((point for point in alike if not point.base), alike[0])
    difference = one.differences.get(figure)
    if difference is None:
        return text
    return f"{text}; {_verdict(difference, one.base)}"


def interval(value: Estimate) -> str:
    """A value as text, with its confidence interval if it has one."""
    if not isfinite(value.high - value.low):
        return f"{value.value:.4g}" + (f" ({value.low:.4g} or more)" if isfinite(value.low) else "")
    if abs(value.high + value.low - 2 * value.value) < 1e-9 * max(1.0, abs(value.value)):
        return f"{value.value:.4g} ±{(value.high - value.low) / 2:.2g}"
    return f"{value.value:.4g} ({value.low:.4g} to {value.high:.4g})"


def _verdict(found: Difference, base: str) -> str:
    if found.verdict == NO_MEANS:
        return f"no verdict against {base}, which has no mean"
    if found.verdict == EQUAL:
        return f"equal to {base}"
    word = f"{found.verdict} than" if found.verdict in (BETTER, WORSE) else "undecided against"
    half = (found.by.high - found.by.low) / 2
    scale = abs(found.theirs.value)
    if not scale:
        return f"{word} {base}"
    spread = f" ±{100 * half / scale:.1f}" if half < inf else ", of one pair"
    return f"{word} {base}, {100 * found.by.value / scale:+.1f} %{spread}"
