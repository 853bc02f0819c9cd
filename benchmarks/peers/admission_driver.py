"""Runs any engine's scheduler on a virtual clock; an adapter says how to build, add and step.

    python -m peers.<engine>_admission '<json of Task>'      (in benchmarks/)

The last line printed is a JSON object: what came of each load of `admission_loads.py`.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from admission_loads import Cost, Load, make
from scheduler_loads import Setup

MOST_STEPS = 200_000


class Step(NamedTuple):
    """What a step computed, by row, and who got a token in it."""

    starts: list[int]
    counts: list[int]
    sampled: list[str]
    num_preempted: int
    settle: Callable[[float], None]  # with the seconds it took


class Bench(Protocol):
    """A scheduler and a worker that answers at no cost."""

    def add(self, name: str, prompt: list[int], num_output: int, priority: int) -> Any: ...

    def plan(self) -> Step: ...

    def is_busy(self) -> bool: ...


@dataclass(frozen=True)
class Figures:
    """What came of a load. First tokens in steps and in seconds after the request came."""

    ttft_steps_mean: float
    ttft_steps_p50: float
    ttft_mean: float
    ttft_p50: float
    seconds: float
    steps: int
    preempted: int
    num_tokens: int


def run(bench: Bench, load: Load, cost: Cost) -> Figures:
    """Each request at its time, steps as long as there is work, until the last one has ended."""
    coming = list(load.requests)
    now, num_steps, num_tokens, num_preempted = 0.0, 0, 0, 0
    came: dict[str, tuple[int, float]] = {}
    first: dict[str, tuple[int, float]] = {}
    while coming or bench.is_busy():
        if not bench.is_busy():
            now = max(now, coming[0].seconds)
        while coming and coming[0].seconds <= now:
            request = coming.pop(0)
            came[request.name] = num_steps, request.seconds
            bench.add(request.name, request.prompt, request.num_output, 0)
        step = bench.plan()
        seconds = cost.seconds(step.starts, step.counts) if step.counts else cost.fixed
        now += seconds
        num_steps += 1
        num_tokens += sum(step.counts)
        num_preempted += step.num_preempted
        for name in step.sampled:
            first.setdefault(name, (num_steps, now))
        step.settle(seconds)
        assert num_steps < MOST_STEPS, f"no end after {num_steps} steps"
    steps = [first[name][0] - came[name][0] for name in came]
    waits = [first[name][1] - came[name][1] for name in came]
    return Figures(
        round(statistics.mean(steps), 4),
        statistics.median(steps),
        round(statistics.mean(waits), 6),
        round(statistics.median(waits), 6),
        round(now, 6),
        num_steps,
        num_preempted,
        num_tokens,
    )


def main(start: Callable[[Setup], Bench], about: dict[str, Any]) -> None:
    """Run the loads that the command line asks for, print one line."""
    task = json.loads(sys.argv[1])
    cost = Cost(**task["cost"])
    figures = {}
    for number in task["loads"]:
        load = make(number, cost)
        figures[number] = asdict(run(start(load.setup), load, cost))
    print("\n" + json.dumps({**about, "loads": figures}), flush=True)
