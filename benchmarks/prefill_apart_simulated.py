"""Simulates ``prefill_apart.py``, and compares the figures with those that were measured.

    python benchmarks/prefill_apart_simulated.py [--measured FILE] [--every 2.2] [--seeds 5]
                                                 [--loads] [--links] [--json FILE]

One core has the step times of two threads, each of several cores those of one while the other
computes, too: ``results/step-times-mid-*.json``, from logs of ``step_times.py``. --measured: a
result of ``prefill_apart.py``. --loads, --links: ratios to one core for other loads, and for other
links between prefill and decode core. Figures are medians over seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import keep, print_table
from measure import quantile
from msgspec.structs import replace as with_values
from prefill_apart import KINDS, LONG, LONG_OUT, SHORT, SHORT_OUT, WARM_SECONDS

from engine.messages.requests import CoreOutputs
from engine.sched.predict.profile import HostCost, read_profile
from policylab.sim.apart import ApartRun
from policylab.sim.engine import Engine
from policylab.sim.job import Job, Span
from policylab.sim.records import Seen
from policylab.sim.tiers import Tier
from policylab.sim.workloads import JobSource, Workload

BLOCK_BYTES = 16 * 12 * 2 * 4 * 64 * 2  # of ``mid``: tokens, layers, keys and values, heads, bytes
ARENA = Tier(name="arena", load=5e-5, latency=1e-3)  # 2,000 tokens take 6 to 8 ms
HOST = HostCost(step=2e-4, sequence=1e-5, request=1e-4)  # the logs of steps have pauses
LOADS = (1.5, 2.2, 3.0, 4.0, 5.0, 10.0)  # seconds between long prompts
LINKS = {"1 GB/s": 1e9, "100 MB/s": 1e8, "30 MB/s": 3e7, "20 MB/s": 2e7, "10 MB/s": 1e7}
"""Bytes per second between the cores; each with a latency of 1 ms."""


@dataclass(frozen=True, kw_only=True)
class LongAmongShort(Workload):
    """Streams of short requests, and a long prompt every few seconds."""

    kind = "long-among-short"
    streams: int = 8
    every: float = 2.2
    seconds: float = 20.0

    natural_rate = None
    max_prompt = LONG[1]
    max_output = SHORT_OUT

    def source(self, seed: int, rate: float | None = None) -> JobSource:
        dice, end = random.Random(seed), WARM_SECONDS + self.seconds
        starts = [float(place) for place in _until(WARM_SECONDS, self.every)]
        starts += [WARM_SECONDS + place for place in _until(self.seconds, self.every)]
        short = [_job(f"s{n}.0", 0.0, SHORT, SHORT_OUT) for n in range(self.streams)]
        long = [_job(f"l{n}", at, dice.randint(*LONG), LONG_OUT) for n, at in enumerate(starts)]

        def follow(job: Job, time: float) -> Iterator[Job]:
            if job.num_prompt == SHORT and time < end:
                name, _, nth = job.request_id.partition(".")
                yield _job(f"{name}.{int(nth) + 1}", time, SHORT, SHORT_OUT)

        return JobSource(iter(sorted([*short, *long], key=lambda job: job.arrival)), follow)


def _until(end: float, every: float) -> Iterator[float]:
    at = 0.0
    while at < end:
        yield at
        at += every


def _job(name: str, at: float, num_prompt: int, num_output: int) -> Job:
    prompt = (Span(f"prompt {name}", num_prompt),)
    return Job(request_id=name, arrival=at, prompt=prompt, num_output=num_output)


class Watched(Seen):
    """Also collects the times of all tokens, by request."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Job] = {}
        self.tokens: defaultdict[str, list[float]] = defaultdict(list)

    def came(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        super().came(job)

    def note(self, batches: Iterable[CoreOutputs]) -> list[tuple[Job, float]]:
        batches = list(batches)
        for batch in batches:
            counts = batch.counts or [1] * len(batch.request_ids)
            for name, number in zip(batch.request_ids, counts, strict=True):
                self.tokens[name] += [batch.time] * number
        return super().note(batches)


def simulated(engine: Engine, workload: LongAmongShort, seed: int) -> dict[str, float]:
    """The figures of a run, as ``prefill_apart.py`` computes them."""
    made = ApartRun("fcfs", workload, engine, seed=seed, rate=None)
    seen = made.seen = Watched()
    made.finish()
    began, ended = WARM_SECONDS, WARM_SECONDS + workload.seconds
    gaps, firsts, num_tokens = [], [], 0
    for name, times in seen.tokens.items():
        job, first = seen.jobs[name], times[0]
        if job.num_prompt == SHORT:
            pairs = pairwise(times)
            gaps += [1e3 * (later - earlier) for earlier, later in pairs if began <= later <= ended]
            num_tokens += sum(began <= each <= ended for each in times)
        elif began <= first <= ended:
            firsts.append(first - job.arrival)
        num_tokens += job.num_prompt if began <= first <= ended else 0
    return {
        "gap_p50_ms": quantile(gaps, 0.5),
        "gap_p99_ms": quantile(gaps, 0.99),
        "long_ttft_s": statistics.median(firsts) if firsts else float("nan"),
        "tokens_per_s": num_tokens / workload.seconds,
    }


def medians(engine: Engine, workload: LongAmongShort, num_seeds: int) -> dict[str, float]:
    """The medians of the figures over the seeds."""
    runs = [simulated(engine, workload, seed) for seed in range(num_seeds)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def engines(profiles: Path) -> dict[str, Engine]:
    """The engine of each kind, with the options that ``prefill_apart.py`` sets."""
    both, half = (
        with_values(read_profile(profiles / f"step-times-mid-{n}.json"), host=HOST, host_noise=[])
        for n in (2, 1)
    )
    options = {"max_mixed_prefill_tokens": 128, "num_mixed_prefill_steps": 6}
    base = Engine(
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        num_blocks=4000,
        scheduler=options,
        kv_link=ARENA,
    )
    return {
        kind: replace(base, **cores, cost=half if cores else both) for kind, cores in KINDS.items()
    }


# -- tables


def ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The figures of each kind as multiples of those of one core."""
    one = found["one core"]
    return {kind: {name: own[name] / one[name] for name in one} for kind, own in found.items()}


def compare(kinds: dict[str, Engine], every: float, seeds: int, measured: Any) -> dict[str, Any]:
    """Print the figures of each kind and the ratios to one core, simulated and measured."""
    workload = LongAmongShort(every=every)
    own = {kind: medians(engine, workload, seeds) for kind, engine in kinds.items()}
    rows = []
    for title, table, theirs in (
        ("", own, measured and measured["medians"]),
        ("/ one core", ratios(own), measured and measured["ratios"]),
    ):
        for kind, row in table.items():
            cells = [
                f"{value:.3g}" + (f" ({theirs[kind][name]:.3g})" if known(theirs, name) else "")
                for name, value in row.items()
            ]
            rows.append([f"{kind} {title}", *cells])
    head = ["simulated (measured)", *next(iter(own.values()))]
    print_table(f"a long prompt every {every:g} s", head, rows)
    return {"every": every, "simulated": own, "ratios": ratios(own)}


def known(theirs: Any, name: str) -> bool:
    """True if a figure was measured."""
    return bool(theirs) and name in theirs["one core"]


def sweep(title: str, cases: dict[str, tuple[dict[str, Engine], float]], seeds: int) -> Any:
    """Print the ratios of several cores to one core in each case."""
    found, rows, known = {}, [], {}
    for name, (kinds, every) in cases.items():
        workload = LongAmongShort(every=every, seconds=60.0)
        for engine in kinds.values():
            if (id(engine), every) not in known:
                known[id(engine), every] = medians(engine, workload, seeds)
        each = {kind: known[id(engine), every] for kind, engine in kinds.items()}
        found[name] = {"figures": each, "ratios": ratios(each)}
        for kind in [kind for kind in kinds if kind != "one core"]:
            row, own = found[name]["ratios"][kind], each[kind]
            cells = [f"{row[name]:.2f}" for name in ("gap_p99_ms", "tokens_per_s", "long_ttft_s")]
            gaps = [f"{own['gap_p99_ms']:.0f}", f"{each['one core']['gap_p99_ms']:.0f}"]
            rows.append([f"{name}: {kind}", *cells, *gaps])
    head = [title, "p99 / one", "tokens/s", "first token", "p99 in ms", "of one core"]
    print_table(title, head, rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--every", type=float, default=2.2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    own = engines(parsed.profiles)
    measured = None if parsed.measured is None else json.loads(parsed.measured.read_text())
    every = parsed.every if measured is None else measured["about"]["every"]
    found: dict[str, Any] = {"compared": compare(own, every, parsed.seeds, measured)}
    if parsed.loads:
        by_load = {f"every {each:g} s": (own, each) for each in LOADS}
        found["loads"] = sweep("a long prompt", by_load, parsed.seeds)
    if parsed.links:
        by_link = {
            name: (with_link(own, BLOCK_BYTES / speed), every) for name, speed in LINKS.items()
        }
        found["links"] = sweep(f"link, every {every:g} s", by_link, parsed.seeds)
    keep(parsed.json, **found)


def with_link(kinds: dict[str, Engine], load: float) -> dict[str, Engine]:
    """One core, and prefill apart with a link that moves a block in this many seconds."""
    link = Tier(name="link", load=load, latency=1e-3)
    apart = replace(kinds["prefill apart"], kv_link=link)
    return {"one core": kinds["one core"], "prefill apart": apart}


if __name__ == "__main__":
    main()
