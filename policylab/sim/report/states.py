"""The states of each request over time: waiting and why, computed, preempted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from typing import NamedTuple

import numpy as np

from policylab.sim.history import PREEMPTED as AGAIN
from policylab.sim.history import Cells, Stay, stays_of
from policylab.sim.run import Run

WAITING, PREFILL, DECODE, PAUSED, PREEMPTED = "waits", "prefill", "decode", "paused", "preempted"
STATES = (WAITING, PREFILL, DECODE, PAUSED, PREEMPTED)


class State(NamedTuple):
    """A period in which a request was in one state; ``why``: the causes of waiting, as text."""

    name: str
    start: float
    end: float
    why: str = ""


def because(causes: Mapping[str, float], most: int | None = None) -> str:
    """The causes of a wait as text with seconds, the longest first. ``most``: the largest number of
    causes in the text."""
    ordered = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    known = [(cause, seconds) for cause, seconds in ordered if seconds > 5e-4]
    text = [f"{cause} {seconds:.3f} s" for cause, seconds in known[:most]]
    if not known and ordered and ordered[0][1] > 0:
        text.append(f"{ordered[0][0]}, less than 0.001 s")
    if len(known) > len(text):
        text.append(f"and {len(known) - len(text)} more causes")
    return ", ".join(text)


def stays_in_queue(run: Run, place: int) -> list[Stay]:
    """Return the periods in which the request at index ``place`` was queued. Without a history of
    the run, periods after a preemption are missing."""
    if run.history is not None:
        return run.history.stays[place]
    requests = run.requests
    arrival = float(requests.times("arrival")[place])
    scheduled = float(requests.times("scheduled")[place])
    if isnan(scheduled):
        return []
    causes = {
        cause: float(of[place])
        for cause, of in requests.waits.items()
        if of[place] > 0 and not cause.startswith(AGAIN)
    }
    return [
        Stay(*stay[:2], causes)
        for stay in stays_of([("queued", arrival), ("scheduled", scheduled)])
    ]


class States:
    """The states of all requests in one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        history = run.history
        work: Cells = np.empty((0, 4), dtype=np.int64) if history is None else history.work
        for place, first, last, count in work.tolist():
            self._spans.setdefault(place, []).append((first, last, count))

    def of(self, place: int) -> list[State]:
        """The states over time of the request at this index."""
        requests = self._run.requests
        stays = stays_in_queue(self._run, place)
        last = float(requests.times("last")[place])
        found: list[State] = []
        for number, stay in enumerate(stays):
            name = PREEMPTED if stay.is_again else WAITING
            if stay.end > stay.start:
                found.append(State(name, stay.start, stay.end, because(stay.causes)))
            until = stays[number + 1].start if number + 1 < len(stays) else last
            if until > stay.end:
                found += self._seated(place, stay.end, until)
        return found

    def _seated(self, place: int, start: float, end: float) -> Iterator[State]:
        """Yield the states from ``start`` to ``end`` (seconds) of a request that holds a seat all
        the time. ``place``: the request's index."""
        first = float(self._run.requests.times("first")[place])
        steps = self._run.steps
        if steps is None or place not in self._spans:
            cut = min(max(start, first), end) if first == first else end
            yield from (
                s for s in (State(PREFILL, start, cut), State(DECODE, cut, end)) if s[2] > s[1]
            )
            return
        starts, ends = steps[:, 0], steps[:, 1]
        mine = [span for span in self._spans[place] if start <= starts[span[0]] < end]
        prompts = [k for k, span in enumerate(mine) if span[2] > 1 or ends[span[1]] <= first]
        num_prompts = prompts[-1] + 1 if prompts else 0
        before = None
        for number, (begin, until, _) in enumerate(mine):
            if before is not None and begin > before + 1:
                yield State(PAUSED, float(ends[before]), float(starts[begin]))
            name = PREFILL if number < num_prompts else DECODE
            yield State(name, float(starts[begin]), min(end, float(ends[until])))
            before = until


def preempted_by(causes: Mapping[str, float]) -> str:
    """The id of the request in favour of which another was preempted; empty if unknown. ``causes``:
    the causes of the preempted request's wait."""
    for cause in causes:
        if cause.startswith(f"{AGAIN} by "):
            return cause.removeprefix(f"{AGAIN} by ")
    return ""
