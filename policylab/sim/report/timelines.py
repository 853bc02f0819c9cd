"""Charts of a run over time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from policylab.sim.estimate import Floats
from policylab.sim.report.charts import DOTS, Bar, Bars, Chart, Gantt, Level, Lines, Series
from policylab.sim.report.states import STATES, States, stays_in_queue
from policylab.sim.report.subjects import Subject
from policylab.sim.service import NUM_WINDOWS, curves, jain_by_window, widest_gap

NUM_BINS = 240
NUM_ROWS = 50  # of a Gantt chart
NUM_CURVE = 400  # points per curve
PARTS = tuple(f"{10 * k}–{10 * k + 10} %" for k in range(10))


def timelines(subject: Subject, place: int) -> Iterator[Chart]:
    """Charts of a run over time. ``place``: index of the run, used in file names."""
    edges = bins(subject)
    if not len(edges):
        return
    yield from _engine(subject, place, edges)
    yield from _gantt(subject, place)
    yield from _pressure(subject, place)
    yield from _users(subject, place)


def bins(subject: Subject, number: int = NUM_BINS) -> Floats:
    """The edges, in seconds, of ``number`` equal time intervals that cover the run."""
    last = subject.figures.makespan
    return np.linspace(0.0, last, number + 1) if last > 0 else np.empty(0)


def _engine(subject: Subject, place: int, edges: Floats) -> Iterator[Chart]:
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    steps = subject.run.steps
    moments = [Level(subject.figures.window.start, "warm-up ends")]
    where = "seconds since the start of the run"

    def lines(key: str, title: str, caption: str, y_label: str, of: dict[str, Floats]) -> Lines:
        series = [Series(name=name, x=middles, y=y.tolist()) for name, y in of.items()]
        return Lines(
            key=f"{key}-{place + 1}",
            title=f"{title}: {subject.label}",
            caption=caption,
            x_label=where,
            y_label=y_label,
            series=series,
            moments=moments,
        )

    of = {"waiting": waiting(subject, edges)}
    if steps is not None:
        of = {"running": _mean(steps, 2, edges), **of}
    yield lines(
        "requests",
        "Running and waiting requests",
        "Mean numbers in each small part of the run. If the queue grows to the end, the "
        "engine is overloaded.",
        "requests",
        of,
    )
    yield lines(
        "throughput",
        "Output tokens per second",
        "Output tokens per second. A valley while requests wait is lost throughput.",
        "tokens per second",
        {"output": throughput(subject, edges)},
    )
    if steps is None:
        return
    yield lines(
        "kv",
        "KV pool in use",
        "The mean share of KV blocks in use. At 1 the next token of a running request preempts "
        "another one, which must then recompute all of its tokens.",
        "share of blocks",
        {"KV": _mean(steps, 7, edges)},
    )
    widths = np.diff(edges)
    decodes = _amount(steps, steps[:, 4], edges) / widths
    yield lines(
        "tokens",
        "Tokens computed per second",
        "Prompts (including recomputation after preemptions) and decodes. Tokens spent on "
        "prompts are not available for decodes.",
        "tokens per second",
        {"prompts": _amount(steps, steps[:, 3], edges) / widths - decodes, "decodes": decodes},
    )


def _mean(steps: Floats, column: int, edges: Floats) -> Floats:
    """The time-weighted mean of a column of ``steps`` in each interval between two ``edges``
    (seconds); times without a step count as 0."""
    return _amount(steps, steps[:, column] * (steps[:, 1] - steps[:, 0]), edges) / np.diff(edges)


def _amount(steps: Floats, amounts: Floats, edges: Floats) -> Floats:
    """The sum of ``amounts`` (one per step) in each interval between two ``edges`` (seconds). The
    amount of a step is spread evenly over its duration."""
    times = steps[:, :2].ravel()
    total = np.column_stack([np.cumsum(amounts) - amounts, np.cumsum(amounts)]).ravel()
    parts: Floats = np.diff(np.interp(edges, np.maximum.accumulate(times), total, left=0.0))
    return parts


def waiting(subject: Subject, edges: Floats) -> Floats:
    """The mean number of queued requests in each interval between two ``edges`` (seconds)."""
    run = subject.run
    stays = [stay for p in range(len(run.requests)) for stay in stays_in_queue(run, p)]
    total = np.zeros(len(edges))
    for times, sign in (([s.start for s in stays], 1.0), ([s.end for s in stays], -1.0)):
        ordered = np.sort(np.array(times, dtype=np.float64))
        upto = np.concatenate([[0.0], ordered.cumsum()])
        place = np.searchsorted(ordered, edges, side="right")
        total += sign * (place * edges - upto[place])
    return np.maximum(0.0, np.diff(total)) / np.diff(edges)


def throughput(subject: Subject, edges: Floats) -> Floats:
    """Output tokens per second in each interval between two ``edges`` (seconds)."""
    firsts = subject.run.requests.times("first")
    firsts = firsts[~np.isnan(firsts)]
    gaps = subject.run.gaps
    times = np.concatenate([firsts, gaps[:, 0]])
    weights = np.concatenate([np.ones(len(firsts)), gaps[:, 2]])
    found: Floats = np.histogram(times, edges, weights=weights)[0] / np.diff(edges)
    return found


def _gantt(subject: Subject, place: int) -> Iterator[Chart]:
    run = subject.run
    waits = sum(run.requests.waits.values(), np.zeros(len(run.requests)))
    worst = int(np.argmax(waits)) if len(waits) else 0
    first = max(0, min(worst - NUM_ROWS // 2, len(run.requests) - NUM_ROWS))
    places = range(first, min(len(run.requests), first + NUM_ROWS))
    states = States(run)
    names = run.requests.names["request_id"]
    yield Gantt(
        key=f"gantt-{place + 1}",
        title=f"Requests over time: {subject.label}",
        caption=f"{len(places)} requests that arrived around the one that waited longest, in order "
        "of arrival. Hover over a bar to see why it waited; the timeline above has all of them.",
        names=[names[each] for each in places],
        bars=[
            Bar(row, s.start, s.end, s.name, s.why)
            for row, p in enumerate(places)
            for s in states.of(p)
        ],
        states=STATES,
    )


def _pressure(subject: Subject, place: int) -> Iterator[Chart]:
    """A bar chart of preemptions per hundred steps by KV pool usage. place: index of the run."""
    run = subject.run
    if run.steps is None or run.history is None or not len(run.steps):
        return
    times = np.array([t for each in run.history.events for name, t in each if name == "preempted"])
    usage = run.steps[:, 7]
    at = np.searchsorted(run.steps[:, 0], times, side="right") - 1
    parts = np.minimum(9, (usage * 10).astype(int))
    num_steps = np.bincount(parts, minlength=10)
    hit = np.bincount(parts[np.maximum(0, at)], minlength=10)
    yield Bars(
        key=f"preemptions-{place + 1}",
        title=f"Preemptions by KV pressure: {subject.label}",
        caption="Preemptions per hundred steps, by how full the KV pool was in them.",
        y_label="preemptions per hundred steps",
        groups=PARTS,
        bars={"preemptions": (100.0 * hit / np.maximum(1, num_steps)).tolist()},
    )


def promises(subject: Subject) -> bool:
    """True if the run's policy is VTC, which limits how unequally users are served."""
    return subject.run.policy.partition("(")[0] == "vtc"


def _users(subject: Subject, place: int) -> Iterator[Chart]:
    run, found = subject.run, subject.figures
    curve = curves(run.requests, subject.counted, found.window, run.head.get("engine") or {})
    if curve is None or found.service is None:
        return
    chosen = np.unique(np.linspace(0, len(curve.times) - 1, NUM_CURVE).astype(int))
    gap = widest_gap(curve)
    text = "No two users waited at the same time, so fairness cannot be measured."
    moments: list[Level] = []
    if gap.value == gap.value:
        text = (
            f"While both waited, {gap.ahead!r} got up to {gap.value:,.0f} more than "
            f"{gap.later!r} (between {gap.begin:.2f} and {gap.end:.2f} s)."
        )
        if promises(subject):
            text += f" vtc guarantees at most {found.service.bound:,.0f}."
        if found.service.jain == found.service.jain:
            text += f" Jain's index is {found.service.jain:.3f}; 1 is even."
        else:
            text += (
                " Jain's index is undefined: no two users waited throughout any of the "
                f"{NUM_WINDOWS} parts of the run."
            )
        moments = [Level(gap.begin, "widest gap"), Level(gap.end, "")]
    yield Lines(
        key=f"service-{place + 1}",
        title=f"Service by user: {subject.label}",
        caption="Cumulative service of each user: a prompt token counts 1, a generated "
        f"token 2, over the user's weight. {text}",
        x_label="seconds since the start of the run",
        y_label="service",
        series=[
            Series(
                name=name or "(no user)",
                x=curve.times[chosen].tolist(),
                y=(curve.served[row][chosen] - curve.served[row][0]).tolist(),
            )
            for row, name in enumerate(curve.users)
        ],
        moments=moments,
    )
    parts = jain_by_window(curve, found.window)
    yield Lines(
        key=f"jain-{place + 1}",
        title=f"Fairness of service: {subject.label}",
        caption="Jain's index of the service of the users who waited throughout each small part "
        "of the run, if there were two or more: 1 is even; one over their number means that one "
        "user got everything.",
        x_label="seconds since the start of the run",
        y_label="Jain's index",
        series=[Series(name="index", x=[p[0] for p in parts], y=[p[1] for p in parts], mark=DOTS)],
        levels=[Level(1.0, "even")],
        is_share=True,
    )
