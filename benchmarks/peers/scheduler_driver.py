"""Times any scheduler without a model, through an adapter that builds, adds and steps it.

    python -m peers.<engine>_scheduler '["decode_256", "chunked"]'      (in benchmarks/)

The last printed line is a JSON object with the figures of each load of `scheduler_loads.py`. Time
between schedule() and update_from_output(), in which a worker would compute, does not count. The
garbage collector is on, with all imported objects frozen, as in the engines.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import measure
from scheduler_loads import WARM_UP, Load, Setup, named

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one step, and the nanoseconds of planning and settling it."""

    planned: int
    settled: int
    num_rows: int
    num_tokens: int
    num_preempted: int


class Bench(Protocol):
    """A scheduler with a worker that takes no time."""

    def add(self, name: str, prompt: list[int], num_output: int, priority: int) -> Any:
        """Queue a request of these tokens; returns what ``lookup`` takes."""
        ...

    def lookup(self, request: Any) -> int:
        """Tokens of the request's prompt that are cached."""
        ...

    def step(self) -> Step: ...

    def is_busy(self) -> bool: ...


Start = Callable[[Setup], Bench]


def microseconds(nanoseconds: list[int]) -> float:
    """The median."""
    return round(statistics.median(nanoseconds) / 1e3, 2)


def add_all(bench: Bench, load: Load) -> float:
    """Queue every request of a load and return the mean microseconds of each."""
    prompts = [load.prompt(index) for index in range(load.requests)]
    start = time.perf_counter_ns()
    for index, prompt in enumerate(prompts):
        bench.add(f"req-{index}", prompt, load.output(index), load.priority(index))
    return round((time.perf_counter_ns() - start) / 1e3 / load.requests, 2)


def drain(bench: Bench) -> list[Step]:
    steps = []
    while bench.is_busy():
        steps.append(bench.step())
    return steps


def per_step(steps: list[Step]) -> Figures:
    both = [step.planned + step.settled for step in steps]
    return {
        "schedule_us": microseconds([step.planned for step in steps]),
        "update_us": microseconds([step.settled for step in steps]),
        "both_us": microseconds(both),
        "both_p99_us": round(sorted(both)[int(len(both) * 0.99)] / 1e3, 1),
    }


def measure_decode(start: Start, load: Load) -> Figures:
    """Time steps in which all requests decode and none arrives or ends."""
    bench = start(load.setup)
    add_us = add_all(bench, load)
    while bench.step().num_tokens != load.requests:
        pass
    for _ in range(WARM_UP):
        bench.step()
    steps = [bench.step() for _ in range(load.steps)]
    assert all(step.num_rows == step.num_tokens == load.requests for step in steps)
    both = statistics.mean(step.planned + step.settled for step in steps)
    return {"add_us": add_us, **per_step(steps), "row_us": round(both / 1e3 / load.requests, 3)}


def measure_drain(start: Start, load: Load) -> Figures:
    """Time all steps of a load whose requests arrive together."""
    bench = start(load.setup)
    add_us = add_all(bench, load)
    steps = drain(bench)
    total = sum(step.planned + step.settled for step in steps)
    num_tokens = sum(step.num_tokens for step in steps)
    return {
        "add_us": add_us,
        **per_step(steps),
        "steps": len(steps),
        "num_tokens": num_tokens,
        "num_preempted": sum(step.num_preempted for step in steps),
        "token_us": round(total / 1e3 / num_tokens, 3),
        "total_ms": round(total / 1e6, 2),
    }


def measure_queue(start: Start, load: Load) -> Figures:
    """Time steps with a long queue: each request that ends is replaced from the queue."""
    bench = start(load.setup)
    add_us = add_all(bench, load)
    for _ in range(load.num_output + WARM_UP):  # until some end in almost every step
        bench.step()
    return {"add_us": add_us, **per_step([bench.step() for _ in range(load.steps)])}


def measure_lookup(start: Start, load: Load) -> Figures:
    """Time hashing and looking up one prompt: the difference to adding it without a cache.

    Engines hash at different moments, some when a request is made, some when it is looked up. So
    making and looking up are timed together, less the making of the same without a cache.
    """
    plain, cached = start(replace(load.setup, caching=False)), start(load.setup)
    bare, miss, admit, hit = [], [], [], []
    for index in range(load.requests):
        prompt = load.prompt(index)
        bare.append(made_and_looked_up(plain, f"bare-{index}", prompt, 0))
        miss.append(made_and_looked_up(cached, f"miss-{index}", prompt, 0))
        admit.append(drain(cached)[0].planned)
        found = (len(prompt) - 1) // 16 * 16
        hit.append(made_and_looked_up(cached, f"hit-{index}", prompt, found))
        drain(cached)
        drain(plain)
    base = microseconds(bare)
    return {
        "bare_us": base,
        "miss_us": round(microseconds(miss) - base, 2),
        "hit_us": round(microseconds(hit) - base, 2),
        "admit_us": microseconds(admit),
    }


def made_and_looked_up(bench: Bench, name: str, prompt: list[int], expected: int) -> int:
    """Nanoseconds from token ids to the known number of cached tokens."""
    start = time.perf_counter_ns()
    request = bench.add(name, prompt, 1, 0)
    found = bench.lookup(request)
    taken = time.perf_counter_ns() - start
    assert found == expected, f"{name}: {found} tokens found, {expected} are cached"
    return taken


MEASURES = {
    "decode": measure_decode,
    "drain": measure_drain,
    "queue": measure_queue,
    "lookup": measure_lookup,
}


def measured(start: Start, load: Load) -> Figures:
    gc.collect()
    before, began = measure.Usage.now(), time.perf_counter()
    figures = MEASURES[load.kind](start, load)
    wall = {"wall_s": round(time.perf_counter() - began, 3)}
    return figures | wall | measure.Usage.now().since(before)


def main(start: Start, about: dict[str, Any]) -> None:
    """Measure the loads named on the command line, print one line."""
    gc.collect()
    gc.freeze()
    names = json.loads(sys.argv[1])
    figures = {name: measured(start, named(name)) for name in names}
    print("\n" + json.dumps({**about, "workloads": figures}), flush=True)
