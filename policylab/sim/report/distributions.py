"""Distributions of latencies, for one run or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan

import numpy as np

from policylab.sim.estimate import Floats
from policylab.sim.figures import EDGES
from policylab.sim.promises import OF_REQUEST, Limit
from policylab.sim.report.charts import Bars, Chart, Grid, Level, Lines, Series
from policylab.sim.report.subjects import Subject

WORDS = {
    "ttft": "time to first token (TTFT)",
    "tpot": "mean time per output token of a request (TPOT)",
    "itl": "time between two tokens (ITL)",
    "e2e": "time from arrival to last token (E2E)",
}
MAX_POINTS = 500
SHARES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)  # always included
SCALES = tuple(2.0 ** (k / 8) for k in range(-24, 25))


def spread(found: Sequence[Subject], slo: Sequence[Limit]) -> Iterator[Chart]:
    """Charts of the cumulative distributions of latencies."""
    for kind, words in WORDS.items():
        series = [_cdf(each, kind) for each in found]
        yield Lines(
            key=f"cdf-{kind}",
            title=f"How long: {words}",
            caption="The height of a line is the share that took at most this long; further "
            "left is better. It crosses 0.99 at the p99. The warm-up is left out.",
            x_label=f"seconds, {kind.upper()}",
            y_label="share of gaps" if kind == "itl" else "share of requests",
            series=[each for each in series if len(each.x)],
            log_x=True,
            is_share=True,
            levels=[Level(0.5, "p50"), Level(0.99, "p99")],
            moments=[Level(limit.value, str(limit)) for limit in slo if limit.figure == kind],
        )


def _cdf(subject: Subject, kind: str) -> Series:
    if kind == "itl":
        gaps, period = subject.run.gaps, subject.figures.window
        gaps = gaps[(gaps[:, 0] >= period.start) & (gaps[:, 0] <= period.end)]
        values, weights = gaps[:, 1], gaps[:, 2]
    else:
        values = OF_REQUEST[kind](subject.run.requests)[subject.counted]
        values = values[~np.isnan(values)]
        weights = np.ones(len(values))
    x, y = cdf(values, weights)
    return Series(name=subject.label, x=x, y=y, mark="steps")


def cdf(values: Floats, weights: Floats) -> tuple[list[float], list[float]]:
    """The cumulative distribution of ``values`` that occur ``weights`` times: values in ascending
    order, and for each the share (0 to 1) of occurrences up to it. Of many values, a selection with
    the usual percentiles is returned."""
    if not len(values):
        return [], []
    order = np.argsort(values, kind="stable")
    ascending, upto = values[order], np.cumsum(weights[order])
    upto /= upto[-1]
    if len(values) > MAX_POINTS:
        shares = np.unique([*np.linspace(1.0 / MAX_POINTS, 1.0, MAX_POINTS), *SHARES])
        places = np.unique(np.searchsorted(upto, shares * (1.0 - 1e-12)))
        places = places[places < len(values)]
        ascending, upto = ascending[places], upto[places]
    return ascending.tolist(), upto.tolist()


def slowdowns(found: Sequence[Subject]) -> Iterator[Chart]:
    """Heat maps of the slowdown against an idle engine, by prompt and output length."""
    names = [_range(first, last) for first, last in zip(EDGES, (*EDGES[1:], None), strict=True)]
    cells = [cell for each in found for cell in each.figures.slowdown]
    columns = 1 + max((EDGES.index(cell.prompt[0]) for cell in cells), default=-1)
    lines = 1 + max((EDGES.index(cell.output[0]) for cell in cells), default=-1)
    for place, each in enumerate(found):
        for name, unit in (("mean", "mean slowdown"), ("p99", "slowdown, 99th percentile")):
            values = [[nan] * columns for _ in range(lines)]
            for cell in each.figures.slowdown:
                row, column = EDGES.index(cell.output[0]), EDGES.index(cell.prompt[0])
                values[row][column] = getattr(cell, name)
            yield Grid(
                key=f"slowdown-{place + 1}" if name == "mean" else f"slowdown-p99-{place + 1}",
                title=f"Slowdown by size, {name}: {each.label}",
                caption="How many times as long requests took as alone on an idle engine, by the "
                "tokens of their prompts and outputs; 1 is best. Dark cells are the sizes that "
                "are slowed down most.",
                x_label="prompt tokens",
                y_label="output tokens",
                columns=names[:columns],
                lines=names[:lines],
                values=values,
                unit=unit,
            )


def _range(first: int, last: int | None) -> str:
    return f"{first}+" if last is None else f"{first}–{last - 1}"


def bounds(found: Sequence[Subject]) -> Iterator[Chart]:
    """A bar chart of makespan and mean E2E latency, each divided by a lower bound that holds for
    every scheduler."""
    known = [each for each in found if each.figures.bounds]
    yield Bars(
        key="bounds",
        title="Distance to the bounds",
        caption="The run's makespan and mean E2E, over lower bounds for any scheduler on these "
        "requests; a ratio of 1 may be out of reach.",
        y_label="times the bound",
        groups=[each.label for each in known],
        bars={
            "makespan": [each.figures.value("makespan.bound") for each in known],
            "mean E2E": [each.figures.value("e2e.bound") for each in known],
        },
        levels=[Level(1.0, "bound")],
    )


def hooks(found: Sequence[Subject]) -> Iterator[Chart]:
    """A bar chart of the real time per step that the policy's hooks took."""
    known = [each for each in found if each.figures.hook_seconds > 0]
    yield Bars(
        key="hooks",
        title="Time in the policy's hooks",
        caption="Real time per step in the policy's code: it differs from run to run, and is "
        "not part of the simulated times.",
        y_label="microseconds a step",
        groups=[each.label for each in known],
        bars={
            "hooks": [
                1e6 * each.figures.hook_seconds / max(1, each.figures.num_steps) for each in known
            ]
        },
    )


def attainment_by_scale(found: Sequence[Subject], slo: Sequence[Limit]) -> Iterator[Chart]:
    """A chart of the share of requests that would have met their latency limits if all limits were
    multiplied by the factor on the x axis."""
    series = []
    for each in found:
        needed = scale_needed(each, slo)
        if len(needed):
            shares = [float((needed <= scale * (1.0 + 1e-12)).mean()) for scale in SCALES]
            series.append(Series(name=each.label, x=SCALES, y=shares))
    yield Lines(
        key="attainment-scale",
        title="Attainment over the scale of promises",
        caption="The share of requests whose promises would all have been kept if each "
        "promised time were multiplied by this factor. At 1 the promises are unchanged.",
        x_label="factor of promised times",
        y_label="share of requests",
        series=series,
        log_x=True,
        is_share=True,
        moments=[Level(1.0, "as promised")],
    )


def scale_needed(subject: Subject, slo: Sequence[Limit]) -> Floats:
    """For each request with latency limits, the smallest factor by which the limits would have to
    be multiplied so that the request meets them; infinity for failed requests."""
    requests = subject.run.requests
    needed = np.full(len(requests), np.nan)
    if slo:
        pairs = [(np.full(len(requests), limit.value), limit.figure) for limit in slo]
    else:
        deadline = requests.times("deadline") - requests.times("arrival")
        pairs = [
            (requests.times("ttft"), "ttft"),
            (requests.times("tbt"), "itl"),
            (deadline, "e2e"),
        ]
    for promised, figure in pairs:
        had = OF_REQUEST[figure](requests)
        had = np.where(np.isnan(had), np.inf, had)
        has = ~np.isnan(promised)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed[has] = np.fmax(needed[has], had[has] / promised[has])
    came = np.zeros(len(requests), dtype=np.bool_)
    came[subject.figures.window.num_warmup :] = True
    needed[~requests.done & ~np.isnan(needed)] = np.inf
    found: Floats = needed[came & ~np.isnan(needed)]
    return found
