"""The data that a report's page contains: runs, points and the numbers of every plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.errors import ConfigError
from policylab.sim.estimate import Floats
from policylab.sim.report.charts import Cell, Chart
from policylab.sim.report.ranking import rankings
from policylab.sim.report.states import stays_in_queue
from policylab.sim.report.subjects import Point, Subject
from policylab.sim.report.summary import of_points, of_run

FORMAT = 1
ELEMENT = "run-data"
MAX_REQUESTS = 20_000
MAX_STEPS = 60_000
DIGITS = 6  # decimals of seconds: microseconds


def data_of(
    found: Sequence[Subject],
    points: Sequence[Point],
    charts: Iterable[Chart],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """The content of a report's page as plain values for JSON; NaN and infinity become ``None``."""
    return {
        "format": FORMAT,
        "left_out": dict(left_out),
        "runs": [_run(each) for each in found],
        "points": [_point(point) for point in points],
        "rankings": rankings(points),
        "comparison": list(of_points(points)),
        "charts": {chart.key: [_cells(row) for row in chart.rows()] for chart in charts},
    }


def encoded(data: dict[str, Any]) -> str:
    """The data as JSON that can be put into an HTML element: ``<``, ``>`` and ``&`` are escaped."""
    text = msgspec.json.encode(data).decode()
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def read_report(path: str | Path) -> dict[str, Any]:
    """Read the data back from a report's page. Raises ``ConfigError`` for any other file."""
    try:
        _, _, after = Path(path).read_text(encoding="utf-8").partition(f'id="{ELEMENT}">')
        found: dict[str, Any] = msgspec.json.decode(after.partition("</script>")[0])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a report: it has no element {ELEMENT!r}") from error
    return found


def _cells(row: Sequence[Cell]) -> list[Cell]:
    return [_plain(cell) if isinstance(cell, float) else cell for cell in row]


def _plain(value: float) -> float | None:
    return round(float(value), 9) if isfinite(value) else None


def _column(values: Floats) -> list[float | None]:
    return [round(v, DIGITS) if isfinite(v) else None for v in values.tolist()]


def _point(point: Point) -> dict[str, Any]:
    return {
        "policy": point.policy,
        "kind": point.kind,
        "rate": _plain(point.rate),
        "load": _plain(point.load),
        "is_overloaded": point.is_overloaded,
        "num_seeds": point.num_seeds,
        "num_overloaded": point.num_overloaded,
        "seeds_with": dict(point.counts),
        "compared_with": point.base,
        "differences": {
            name: [*map(_plain, each.by), each.verdict, each.num_seeds]
            for name, each in point.differences.items()
        },
        "values": {name: list(map(_plain, each)) for name, each in point.values.items()},
    }


def _run(subject: Subject) -> dict[str, Any]:
    run, found = subject.run, subject.figures
    requests, steps, history = run.requests, run.steps, run.history
    size = min(len(requests), MAX_REQUESTS)
    shown = np.empty((0, 8)) if steps is None else steps[:MAX_STEPS]
    work: list[list[int]] = []
    if history is not None:
        spans = history.work[(history.work[:, 1] < len(shown)) & (history.work[:, 0] < size)]
        work = spans.tolist()
    return {
        "label": subject.label,
        "where": subject.where,
        "head": run.head,
        "decisions": run.totals.get("decisions", ""),
        "summary": list(of_run(subject)),
        "figures": {name: _plain(value) for name, value in found.values().items()},
        "window": [_plain(found.window.start), _plain(found.window.end), found.window.state],
        "num_requests": len(requests),
        "num_steps": 0 if steps is None else len(steps),
        "until": _plain(shown[-1, 1]) if len(shown) else _plain(found.makespan),
        "requests": {
            "id": requests.names["request_id"][:size],
            "user": requests.names["user"][:size],
            "outcome": requests.names["outcome"][:size],
            **{n: _column(requests.times(n)[:size]) for n in ("arrival", "first", "last")},
            **{n: requests.counts(f"num_{n}")[:size].tolist() for n in COUNTS},
        },
        "waits": {
            cause: {str(p): round(float(column[p]), DIGITS) for p in np.flatnonzero(column[:size])}
            for cause, column in requests.waits.items()
        },
        "stays": [
            [
                place,
                round(stay.start, DIGITS),
                round(stay.end, DIGITS),
                int(stay.is_again),
                {cause: round(seconds, DIGITS) for cause, seconds in stay.causes.items()},
            ]
            for place in range(size)
            for stay in stays_in_queue(run, place)
        ],
        "steps": [
            [*map(_plain, row[:2]), *map(int, row[2:5]), _plain(row[7])] for row in shown.tolist()
        ],
        "work": work,
    }


COUNTS = ("prompt", "output", "cached", "preempted")
