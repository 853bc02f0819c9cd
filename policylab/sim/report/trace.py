"""A run as a trace file for Perfetto and Chrome's trace viewer.

Steps are slices; each request is a track with its states; KV usage and the numbers of waiting and
running requests are counters. Times are microseconds since the start of the run."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from policylab.sim.report.states import States, stays_in_queue
from policylab.sim.run import Run

ENGINE, REQUESTS = 1, 2  # process ids
Event = dict[str, Any]


def write_trace(path: str | Path, run: Run) -> None:
    """Write the run as a trace file. Raises ``ConfigError`` if it cannot be written."""
    whole = {"displayTimeUnit": "ms", "otherData": _facts(run), "traceEvents": list(events(run))}
    try:
        Path(path).write_bytes(msgspec.json.encode(whole, enc_hook=str))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def events(run: Run) -> Iterator[Event]:
    """All events of the trace."""
    yield _named("process_name", ENGINE, 0, f"engine, {run.policy}")
    yield _named("process_name", REQUESTS, 0, "requests")
    yield _named("thread_name", ENGINE, 1, "steps")
    yield from _steps(run)
    yield from _waiting(run)
    yield from _requests(run)


def _facts(run: Run) -> dict[str, str]:
    names = ("version", "kind", "policy", "workload", "seed", "rate", "cost")
    return {name: str(run.head[name]) for name in names if run.head.get(name) is not None}


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: Event) -> Event:
    times = {"ts": 1e6 * start, "dur": max(0.0, 1e6 * (end - start))}
    return {"ph": "X", "name": name, "cat": "sim", "pid": pid, "tid": tid, **times, "args": args}


def _counter(name: str, time: float, value: float) -> Event:
    where = {"pid": ENGINE, "tid": 0, "ts": 1e6 * time}
    return {"ph": "C", "name": name, **where, "args": {name: value}}


def _steps(run: Run) -> Iterator[Event]:
    for start, end, *sizes in [] if run.steps is None else run.steps.tolist():
        seqs, tokens, decodes, context, _, usage = sizes
        args = {
            "requests": int(seqs),
            "tokens": int(tokens),
            "decodes": int(decodes),
            "prompt tokens": int(tokens - decodes),
            "context": int(context),
        }
        yield _slice(ENGINE, 1, f"{tokens:.0f} tokens", start, end, args)
        yield _counter("running", start, seqs)
        yield _counter("KV in use, %", start, 100.0 * usage)


def _waiting(run: Run) -> Iterator[Event]:
    changes: list[tuple[float, int]] = []
    for place in range(len(run.requests)):
        for stay in stays_in_queue(run, place):
            changes += [(stay.start, 1), (stay.end, -1)]
    number = 0
    for time, change in sorted(changes):
        number += change
        yield _counter("waiting", time, number)


def _requests(run: Run) -> Iterator[Event]:
    states, requests = States(run), run.requests
    for place, name in enumerate(requests.names["request_id"]):
        tid = place + 1
        yield _named("thread_name", REQUESTS, tid, name)
        place_of = {"ph": "M", "name": "thread_sort_index", "pid": REQUESTS, "tid": tid}
        yield {**place_of, "args": {"sort_index": place}}
        for state in states.of(place):
            args = {"why": state.why} if state.why else {}
            yield _slice(REQUESTS, tid, state.name, state.start, state.end, args)
        first = float(requests.times("first")[place])
        if not isnan(first):
            moment = {"ph": "i", "name": "first token", "cat": "sim", "s": "t"}
            yield {**moment, "pid": REQUESTS, "tid": tid, "ts": 1e6 * first}
