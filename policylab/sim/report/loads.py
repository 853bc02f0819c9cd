"""Charts of a comparison with the load as x axis and a line for each policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, nan

from policylab.sim.estimate import Estimate
from policylab.sim.figures import LATENCIES, is_better_small
from policylab.sim.report.charts import BOTH, DOTS, Chart, Level, Lines, Series
from policylab.sim.report.subjects import Point

CURVES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2e": "time to last token",
}


STATISTICS = ("mean", "p50", "p99")
SHOWN = (
    *(f"{kind}.{statistic}" for kind in CURVES for statistic in STATISTICS),
    *("tokens_per_second", "attainment", "goodput", "recomputed"),
)
"""Figures that always have a chart."""


def over_load(points: Sequence[Point], figures: Sequence[str] = ()) -> Iterator[Chart]:
    """Charts of latencies, throughput, attainment and goodput, and of the other ``figures``, with
    the load as x axis."""
    label = x_label(points)
    is_apart = _mark(points) == DOTS
    for kind, words in CURVES.items():
        for statistic in STATISTICS:
            yield Lines(
                key=f"load-{kind}-{statistic}",
                title=f"{words.capitalize()}, {statistic}, over load",
                caption="Lower is better. Where a policy has no dot, it is overloaded: the queue "
                "grew without end, and a mean would only depend on the length of the run.",
                x_label=label,
                y_label=f"{kind.upper()} {statistic}, seconds",
                series=_series(points, f"{kind}.{statistic}"),
                log_y=True,
                moments=_capacities(points),
                is_apart=is_apart,
            )
    for name, title, caption, y_label in (
        (
            "tokens_per_second",
            "Throughput over load",
            "Output tokens per second. If a line falls while the load rises, the policy collapses: "
            "it computes tokens twice, or leaves seats empty.",
            "output tokens per second",
        ),
        (
            "attainment",
            "Kept promises over load",
            "The share of requests for which every promise was kept; higher is better.",
            "share of requests",
        ),
        (
            "goodput",
            "Goodput over load",
            "Requests per second for which every promise was kept; higher is better.",
            "requests per second",
        ),
        (
            "recomputed",
            "Recomputed tokens over load",
            "The share of all computed tokens that had been computed before: the cost of "
            "preemption.",
            "share of tokens",
        ),
    ):
        is_share = y_label.startswith("share")
        yield Lines(
            key=f"load-{'throughput' if name == 'tokens_per_second' else name}",
            title=title,
            caption=caption,
            x_label=label,
            y_label=y_label,
            series=_series(points, name, is_share=is_share),
            is_share=is_share,
            is_apart=is_apart,
        )
    for name in figures:
        if name not in SHOWN:
            yield Lines(
                key=f"load-{name.replace('.', '-')}",
                title=f"{name} over load",
                caption=f"{'Lower' if is_better_small(name) else 'Higher'} is better.",
                x_label=label,
                y_label=name,
                series=_series(points, name),
                is_apart=is_apart,
            )


def x_label(points: Sequence[Point]) -> str:
    """The label of the x axis: the load if all points have one, else the rate."""
    return "load, over what fcfs can serve" if _has_loads(points) else "requests per second"


def _has_loads(points: Sequence[Point]) -> bool:
    return bool(points) and all(isfinite(point.load) for point in points)


def by_policy(points: Sequence[Point]) -> dict[str, list[tuple[float, Point]]]:
    """For each policy, its points in ascending order of the x axis, each with its x value: the load
    if all points have a load, else the rate."""
    has_loads = _has_loads(points)
    found: dict[str, list[tuple[float, Point]]] = {}
    for point in points:
        found.setdefault(point.name, []).append((point.load if has_loads else point.rate, point))
    return {name: sorted(each, key=lambda pair: pair[0]) for name, each in found.items()}


def by_load(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Points grouped by load in ascending order, each group with a label such as "load 0.9". If not
    all points have a load, they are grouped by arrival rate."""
    found: dict[float, list[Point]] = {}
    has_loads = _has_loads(points)
    for point in points:
        x = point.load if has_loads else point.rate
        if isfinite(x):
            found.setdefault(x, []).append(point)
    label = "load {:.4g}" if has_loads else "{:.4g} requests per second"
    return [(label.format(x), found[x]) for x in sorted(found)]


def _has(point: Point, name: str) -> bool:
    """True if the point has a value of the figure ``name`` to show. Latencies of an overloaded
    point are not shown: they depend on the length of the run."""
    return isfinite(point.value(name)) and not (name in LATENCIES and point.is_overloaded)


def _mark(points: Sequence[Point]) -> str:
    """The style of the series: lines and dots for three or more loads, else dots only."""
    return BOTH if len(by_load(points)) > 2 else DOTS


def _within(value: Estimate) -> Estimate:
    """The estimate of a share, with its confidence interval cut to 0..1."""
    return Estimate(
        value.value,
        max(0.0, value.low) if isfinite(value.low) else value.low,
        min(1.0, value.high) if isfinite(value.high) else value.high,
    )


def _series(points: Sequence[Point], name: str, *, is_share: bool = False) -> list[Series]:
    found, mark = [], _mark(points)
    for policy, pairs in by_policy(points).items():
        known = [(x, point.values[name]) for x, point in pairs if _has(point, name)]
        if is_share:
            known = [(x, _within(value)) for x, value in known]
        if known:
            found.append(
                Series(
                    name=policy,
                    x=[x for x, _ in known],
                    y=[each.value for _, each in known],
                    low=[each.low for _, each in known],
                    high=[each.high for _, each in known],
                    mark=mark,
                )
            )
    return found


def _capacities(points: Sequence[Point]) -> list[Level]:
    """A vertical line for each policy, at the lowest load at which it is overloaded."""
    found = []
    for name, pairs in by_policy(points).items():
        over = [x for x, point in pairs if point.is_overloaded]
        if over and not all(point.is_overloaded for _, point in pairs):
            found.append(Level(over[0], f"{name} overloaded from here on"))
    return found


def pareto(points: Sequence[Point]) -> Iterator[Chart]:
    """Charts of throughput against tail latency."""
    for kind in ("ttft", "itl"):
        series = []
        for name, pairs in by_policy(points).items():
            both = [
                (point.value("tokens_per_second"), point.value(f"{kind}.p99"))
                for _, point in pairs
                if _has(point, f"{kind}.p99")
            ]
            both = [pair for pair in both if isfinite(sum(pair))]
            if both:
                x, y = zip(*both, strict=True)
                series.append(Series(name=name, x=x, y=y, mark=_mark(points)))
        yield Lines(
            key=f"pareto-{kind}",
            title=f"Throughput against the p99 of {CURVES[kind]}",
            caption="Each dot is a policy at one load; low and far right is best. A policy whose "
            "dots are below and right of another's is better in both.",
            x_label="output tokens per second",
            y_label=f"{kind.upper()} p99, seconds",
            series=series,
            log_y=True,
        )


def pressure(points: Sequence[Point]) -> Iterator[Chart]:
    """A chart of the share of recomputed tokens over the peak usage of the KV pool."""
    series = []
    for name, pairs in by_policy(points).items():
        x = [point.value("kv_peak") for _, point in pairs]
        y = [point.value("recomputed") for _, point in pairs]
        if any(map(isfinite, x)):
            series.append(Series(name=name, x=x, y=y, mark=DOTS))
    yield Lines(
        key="pressure",
        title="Recomputed tokens against KV pressure",
        caption="Each dot is a policy at one load: the largest share of the KV pool in use, and "
        "the share of tokens that were recomputed.",
        x_label="largest share of the KV pool in use",
        y_label="share of tokens recomputed",
        series=series,
        is_share=True,
    )


def errors(points: Sequence[Point]) -> Iterator[Chart]:
    """A chart of the errors (percent) of simulated figures, for points that were also measured."""
    real = {(p.policy, p.rate): p for p in points if p.kind == "real"}
    has_loads = _has_loads(points)
    series = []
    for name in ("ttft.mean", "tpot.mean", "e2e.mean", "ttft.p99", "e2e.p99"):
        for policy in dict.fromkeys(point.policy for point in points):
            pairs = []
            for point in points:
                other = real.get((policy, point.rate))
                if point.policy == policy and point.kind == "simulated" and other is not None:
                    was = other.value(name)
                    error = 100.0 * (point.value(name) - was) / was if was else nan
                    pairs.append((point.load if has_loads else point.rate, error))
            pairs = sorted(pair for pair in pairs if isfinite(sum(pair)))
            if pairs:
                x, y = zip(*pairs, strict=True)
                series.append(Series(name=f"{policy}, {name}", x=x, y=y, mark=BOTH))
    yield Lines(
        key="error",
        title="Error of the simulation over load",
        caption="How much larger the simulated figure is than the real one, in percent. Queues "
        "amplify errors of step times as the load comes near 1.",
        x_label=x_label(points),
        y_label="simulated minus real, percent of real",
        series=series,
        levels=[Level(0.0, "")],
    )
