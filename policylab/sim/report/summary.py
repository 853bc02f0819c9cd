"""Sentences that summarise runs and comparisons: waits, preemptions, overload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan

import numpy as np

from policylab.sim.figures import MIN_THROUGHPUT, collapse
from policylab.sim.report.loads import by_load, by_policy, x_label
from policylab.sim.report.states import because, preempted_by, stays_in_queue
from policylab.sim.report.subjects import Point, Subject
from policylab.sim.report.timelines import bins, promises, throughput, waiting
from policylab.sim.service import OUTPUT_PRICE, PROMPT_PRICE, curves, widest_gap
from policylab.sim.steady import AT_ONCE, BACKLOG

NUM_VALLEYS = 60  # parts of a run, of which the one with the least output is named
MOST_TIMES = 6


def of_run(subject: Subject) -> Iterator[str]:
    """Sentences that summarise a run."""
    found = subject.figures
    yield from _which(subject)
    yield from _period(subject)
    if found.is_overloaded:
        yield f"Overloaded: {found.window.growing} grew to the end, so latencies have no mean."
    if text := collapse(subject.label, found.recomputed, 1.0, 1.0):
        yield f"{text}."
    yield from _waits(subject)
    yield from _preemptions(subject)
    yield from _valley(subject)
    yield from _least(subject)


def _which(subject: Subject) -> Iterator[str]:
    """A sentence that names the shown run of a comparison, and its policy's overloaded runs."""
    if not subject.where:
        return
    text = f"This is one run: {subject.where}; its state is {subject.figures.window.state!r}."
    if subject.elsewhere:
        text += f" Overloaded runs of this policy: {subject.elsewhere}."
    yield text


def _period(subject: Subject) -> Iterator[str]:
    """A sentence on which requests of a run count for the figures, and why."""
    found, window = subject.figures, subject.figures.window
    if found.is_overloaded:
        return
    if window.state == AT_ONCE:
        yield f"All requests arrived at once; {found.num_counted} of {found.num_requests} count."
        return
    if window.is_whole:
        why = (
            "because they arrived much faster than they could be served"
            if window.state == BACKLOG
            else ""
        )
        yield f"All requests count{why}: {found.num_counted} of {found.num_requests} finished."
        return
    text = (
        f"Steady: the queue does not grow. {found.num_counted} of {found.num_requests} requests "
        f"count, those that arrived from {window.start:.2f} to {window.end:.2f} s; "
        f"{window.num_warmup} arrived before, while the engine filled."
    )
    if window.is_short:
        text += " The warm-up takes half of the run, so the means of a longer run may differ."
    yield text


def _waits(subject: Subject) -> Iterator[str]:
    requests = subject.run.requests
    columns = requests.waits
    total = sum(columns.values(), np.zeros(len(requests)))
    if not len(total) or not total.any():
        yield "No request waited longer than to the end of the step in which it arrived."
        return
    sums: dict[str, float] = {}
    for cause, column in columns.items():
        kind = "having been preempted" if cause.startswith("preempted") else cause
        sums[kind] = sums.get(kind, 0.0) + float(column.sum())
    whole = sum(sums.values())
    shares = sorted(sums.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{cause} {100 * each / whole:.0f} %" for cause, each in shares[:MOST_TIMES])
    yield f"All requests together waited {whole:,.1f} s. Why: {parts}."
    worst = int(np.argmax(total))
    causes = {cause: float(column[worst]) for cause, column in columns.items()}
    name = requests.names["request_id"][worst]
    yield f"{name} waited longest: {total[worst]:.3f} s. Why: {because(causes, MOST_TIMES)}."


def _preemptions(subject: Subject) -> Iterator[str]:
    requests = subject.run.requests
    counts = requests.counts("num_preempted")
    if not len(counts) or not counts.any():
        yield "No request was preempted."
        return
    worst = int(np.argmax(counts))
    name = requests.names["request_id"][worst]
    text = f"{name} was preempted most often: {counts[worst]} times"
    if subject.run.history is not None:
        stays = [stay for stay in stays_in_queue(subject.run, worst) if stay.is_again]
        each = [f"at {s.start:.3f} s for {preempted_by(s.causes) or 'another'}" for s in stays]
        text += f" ({', '.join(each[:MOST_TIMES])}{', …' if len(each) > MOST_TIMES else ''})"
    yield f"{text}; all requests together {int(counts.sum())} times."


def _valley(subject: Subject) -> Iterator[str]:
    """A sentence on the period with the lowest throughput while requests waited."""
    edges = bins(subject, NUM_VALLEYS)
    if not len(edges):
        return
    rates = throughput(subject, edges)
    window = subject.figures.window
    inside = (edges[:-1] >= window.start) & (edges[1:] <= max(window.end, edges[1]))
    number = waiting(subject, edges)
    where = np.flatnonzero(inside & (number >= 1.0))
    if not len(where) or not rates[inside].mean():
        return
    place = int(where[np.argmin(rates[where])])
    mean = float(rates[inside].mean())
    if rates[place] >= mean:
        yield f"Output never fell below its mean of {mean:,.0f} tokens/s while requests waited."
        return
    yield (
        f"Output while requests waited was lowest from {edges[place]:.2f} to "
        f"{edges[place + 1]:.2f} s: {rates[place]:,.0f} tokens/s, {rates[place] / mean:.2f} "
        f"of the mean, with {number[place]:.1f} requests in the queue."
    )


def _least(subject: Subject) -> Iterator[str]:
    """Sentences on the user with the least service, and the widest gap in service of two users."""
    service = subject.figures.service
    if service is None:
        return
    engine = subject.run.head.get("engine") or {}
    weights = (engine.get("scheduler") or {}).get("user_weights") or {}

    def served(place: int) -> float:
        user = service.users[place]
        tokens = PROMPT_PRICE * user.prompt_tokens + OUTPUT_PRICE * user.output_tokens
        return tokens / float(weights.get(user.name, 1.0))

    places = range(len(service.users))
    least, most = min(places, key=served), max(places, key=served)
    slow = max(places, key=lambda place: service.users[place].ttft)
    users = service.users
    yield (
        f"User {users[least].name!r} got the least service: {served(least):,.0f} (prompt tokens 1, "
        f"generated tokens 2, over the weight), {served(least) / max(1e-9, served(most)):.2f} of "
        f"what {users[most].name!r} got. User {users[slow].name!r} waited longest for first "
        f"tokens: {users[slow].ttft:.3f} s on average. (A user who requests less gets less.)"
    )
    curve = curves(subject.run.requests, subject.counted, subject.figures.window, engine)
    gap = None if curve is None else widest_gap(curve)
    if gap is not None and gap.value == gap.value:
        bound = f" vtc guarantees {service.bound:,.0f} or less." if promises(subject) else ""
        yield (
            f"While both waited, {gap.later!r} got less than {gap.ahead!r}, by at most "
            f"{gap.value:,.0f} between {gap.begin:.2f} and {gap.end:.2f} s.{bound}"
        )


def of_points(points: Sequence[Point]) -> Iterator[str]:
    """Sentences on the loads at which policies are overloaded or collapse."""
    label = x_label(points)
    for where, here in by_load(points):
        over = [
            f"{each.name} (with {each.num_overloaded} of {each.num_seeds} seeds)"
            if each.num_seeds > 1
            else each.name
            for each in here
            if each.num_overloaded
        ]
        if over:
            yield f"Overloaded at {where}: {', '.join(over)}."
        fcfs = next((point for point in here if point.policy == "fcfs"), None)
        of_fcfs = fcfs.value("tokens_per_second") if fcfs else nan
        for point in here:
            again, rate = point.value("recomputed"), point.value("tokens_per_second")
            if text := collapse(point.name, again, rate, of_fcfs):
                yield f"At {where} {text}."
    for name, pairs in by_policy(points).items():
        yield from _falls(name, pairs, label)


def _falls(name: str, pairs: Sequence[tuple[float, Point]], label: str) -> Iterator[str]:
    best, at = 0.0, 0.0
    for x, point in pairs:
        rate = point.value("tokens_per_second")
        if rate < MIN_THROUGHPUT * best:
            yield (
                f"{name}'s throughput collapses at {x:.3g} ({label}): {rate:,.0f} tokens/s, "
                f"after {best:,.0f} at {at:.3g}."
            )
        if rate > best:
            best, at = rate, x
