"""Runs the workloads on any engine, through an adapter that starts it, adds requests and steps.

    python -m peers.<adapter> '<json of Task>'        (working directory: benchmarks/)

The last printed line is a JSON object with the figures.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import measure
import workloads

NUM_PROMPTS = 4


@dataclass(frozen=True)
class Task:
    """The work of one process."""

    model: str
    workloads: list[str]
    started: float  # wall clock when the process was started
    repeat: int = 0
    rate: float = 2.0
    max_model_len: int = 2048
    max_num_seqs: int = 256
    kv_gib: float = 4.0
    dtype: str | None = None  # to compute in; None: the engine chooses
    options: dict[str, Any] = field(default_factory=dict)


class Adapter(Protocol):
    """An engine that has been started."""

    def add(self, request_id: str, prompt: list[int], num_output: int) -> None: ...

    def step(self) -> list[tuple[str, int]]:
        """(request id, tokens it has so far) of every request that got tokens."""
        ...

    def is_busy(self) -> bool: ...

    def describe(self) -> dict[str, Any]:
        """Name, version, settings, and the `dtype` that the engine computes in."""
        ...


def run(engine: Adapter, arrivals: list[workloads.Arrival], tag: str) -> measure.Timeline:
    """Add each request at its time, step while there is work, note when each token appears."""
    timeline = measure.Timeline(arrivals, time.perf_counter())
    waiting = 0
    while waiting < len(arrivals) or engine.is_busy():
        now = time.perf_counter() - timeline.start
        while waiting < len(arrivals) and arrivals[waiting].seconds <= now:
            arrival = arrivals[waiting]
            engine.add(f"{tag}-{waiting}", arrival.prompt, arrival.num_output)
            waiting += 1
        if not engine.is_busy():
            wake = timeline.start + arrivals[waiting].seconds
            time.sleep(max(0.0, wake - time.perf_counter()))
            continue
        made = engine.step()
        now = time.perf_counter()
        for request_id, num_tokens in made:
            timeline.note(int(request_id.rpartition("-")[2]), num_tokens, now)
        timeline.note_cpu()
    return timeline


def measured(engine: Adapter, task: Task, name: str) -> dict[str, float]:
    if name.startswith("P"):
        return measured_prompts(engine, task, name)
    arrivals = workloads.make(name, task.repeat, task.rate)
    before = measure.Usage.now()
    timeline = run(engine, arrivals, name)
    return timeline.summary() | measure.Usage.now().since(before)


def measured_prompts(engine: Adapter, task: Task, name: str) -> dict[str, float]:
    """Compute prompts one after the other; the summary is that of the last one."""
    before = measure.Usage.now()
    began = time.perf_counter()
    for number in range(NUM_PROMPTS):
        arrivals = workloads.make(name, NUM_PROMPTS * task.repeat + number)
        timeline = run(engine, arrivals, name)
    used = measure.Usage.now().since(before)
    num_tokens = NUM_PROMPTS * len(arrivals[0].prompt)
    wall = time.perf_counter() - began
    return (
        timeline.summary()
        | used
        | {
            "wall_s": wall,
            "prompt_tok_cpu_s": round(num_tokens / used["cpu_s"], 2),
            "prompt_tok_s": round(num_tokens / wall, 2),
        }
    )


def main(start: Callable[[Task], Adapter]) -> None:
    """Start an engine, time its first token, run the task's workloads, print one line."""
    task = Task(**json.loads(sys.argv[1]))
    engine = start(task)
    constructed = time.time()
    run(engine, [workloads.Arrival(0.0, list(range(10, 42)), 1)], "first")
    first_token = time.time()
    memory = measure.memory()
    run(engine, workloads.warm_up(), "warm")
    result = {
        **engine.describe(),
        "dtype_asked": task.dtype,
        "startup": {
            "constructed_s": round(constructed - task.started, 3),
            "first_token_s": round(first_token - task.started, 3),
        },
        "workloads": {name: measured(engine, task, name) for name in task.workloads},
        "memory_at_start": memory,
        "memory": measure.memory(),
    }
    print("\n" + json.dumps(result), flush=True)
