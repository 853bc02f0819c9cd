"""Loads of random prompts on a server, and figures that can be compared with those of other days.

Used by `server.py` and `tools/server_campaign.py`. The client is that of `metronome bench serve`.
"""

import bisect
import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import quantile

from policylab.bench.client import Load, Row
from policylab.bench.datasets import Random, Requests, arrive
from policylab.bench.loops import LOWEST_TOKEN, Form, play

SPREAD = 0.5  # lengths vary by a half to either side


@dataclass(frozen=True)
class Shape:
    """Shape of the requests."""

    model: str
    num_prompt: int = 32
    num_tokens: int = 64
    vocab: int = 1000

    @property
    def form(self) -> Form:
        """Greedy answers of exactly the given lengths."""
        return Form(model=self.model, vocabulary=self.vocab, extra={"temperature": 0.0})

    def requests(self, seed: int, rate: float = float("inf")) -> Requests:
        """Endless requests; at a rate they arrive as a Poisson process."""
        dataset = Random(input_len=self.num_prompt, output_len=self.num_tokens, range_ratio=SPREAD)
        return arrive(dataset, number=None, rate=rate, seed=seed)

    def body(self, rng: random.Random) -> bytes:
        """The body of one request."""
        num_prompt, num_tokens = (
            rng.randint(max(1, mean // 2), mean + mean // 2)
            for mean in (self.num_prompt, self.num_tokens)
        )
        prompt = [rng.randrange(LOWEST_TOKEN, self.vocab) for _ in range(num_prompt)]
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body, separators=(",", ":")).encode()


def poisson(load: Load, shape: Shape, rate: float, seconds: float, seed: int) -> list[Row]:
    """Adds arrivals at this rate for this many seconds from now on."""
    source, made = shape.requests(seed, rate).source, []
    while source.next_time < seconds:
        job = source.take()
        made.append((job.arrival, shape.form.body(job)))
    start = time.perf_counter()  # making tens of thousands of them takes seconds
    rows = [Row(start + at, body) for at, body in made]
    for row in rows:
        load.add(row)
    return rows


def open_loop(
    address: tuple[str, int], shape: Shape, rate: float, seconds: float, seed: int = 0
) -> list[Row]:
    """All requests of a run, ended."""
    with Load(*address) as load:
        return play(load, shape.requests(seed, rate), shape.form, seconds=seconds).rows


def closed_loop(
    address: tuple[str, int],
    shape: Shape,
    streams: int,
    seconds: float,
    *,
    seed: int = 0,
    **options: Any,
) -> list[Row]:
    """Keeps this many streams running: as one ends, the next is sent. Those that the end cuts off
    are among the rows, as left. options: of ``Load``."""
    with Load(*address, most_connections=streams, **options) as load:
        requests = shape.requests(seed)
        return play(load, requests, shape.form, seconds=seconds, drains=False).rows


@dataclass(frozen=True)
class Promise:
    """Promised latencies: seconds to the first token, and between two events (99th percentile)."""

    ttft: float = 1.0
    itl: float = 0.25

    def is_kept(self, row: Row) -> bool:
        return row.is_whole and row.ttft <= self.ttft and quantile(row.gaps, 0.99, 0.0) <= self.itl


def summary(rows: Sequence[Row], promise: Promise, seconds: float) -> dict[str, Any]:
    """Figures of a run of this many seconds."""
    whole = [row for row in rows if row.is_whole]
    begun = [row for row in rows if row.times]
    ttfts, gaps = [row.ttft for row in begun], [gap for row in begun for gap in row.gaps]
    refusals = [row.ended - row.sent for row in rows if row.how == "refused"]
    kept = sum(map(promise.is_kept, rows))
    return {
        "requests": len(rows),
        "whole": len(whole),
        "refused": len(refusals),
        "other": len(rows) - len(whole) - len(refusals),
        "kept": kept,
        "kept_share": round(kept / len(rows), 4) if rows else 0.0,
        "goodput_per_s": round(kept / seconds, 3),
        "tokens_per_s": round(sum(row.num_tokens for row in begun) / seconds, 1),
        "events_per_s": round(sum(row.num_events for row in begun) / seconds, 1),
        **_percentiles("ttft", ttfts),
        **_percentiles("itl", gaps),
        **_percentiles("refusal", refusals),
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        f"{name}_ms_{at}": round(1e3 * quantile(values, share, 0.0), 2)
        for at, share in shares.items()
    }


def settled_after(rows: Sequence[Row], began: float, promise: Promise) -> float:
    """Seconds from ``began`` until requests that come keep the promise, with those after them:
    95 % of them, and the next ten nearly all."""
    ordered = sorted(rows, key=lambda row: row.due)
    kept = [promise.is_kept(row) for row in ordered]
    dues = [row.due for row in ordered]
    for index in range(bisect.bisect_left(dues, began), len(ordered)):
        rest, near = kept[index:], kept[index : index + 10]
        if statistics.mean(rest) >= 0.95 and statistics.mean(near) >= 0.9:
            return max(0.0, dues[index] - began)
    return float("inf")


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor time of each thread of a process, to the nanosecond."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def cpu_between(before: dict[str, float], after: dict[str, float]) -> float:
    """Seconds of all threads that are still there."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
