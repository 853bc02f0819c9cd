"""What a core in a process costs while it waits, and how soon it is awake.

    python benchmarks/wire_quiet.py [--seconds 5] [--rounds 3] [--steps-in-flight 2] [--json FILE]

Idle: share of a core that the process uses, and time from a client's send to the first step.
Decode: a device step of 10 ms, with 1 and 64 running: share of a core, and what a token takes
beyond the 10 ms. Three ways to wait are measured in turn (`wire_cores.py`), and a process that does
nothing but sleep and send (`wire_floor.py`); the medians over the rounds are shown.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import machine
from measure import Usage, quantile
from rich.console import Console
from rich.table import Table
from wire_cores import LOOPS, WaitingBuild, cpu_seconds, pid_of, request, start
from wire_floor import floor_percent

from engine.rpc.zmq_client import EngineCoreClient

STEP_SECONDS = 0.010
NUM_WAKES = 200
WAKE_EVERY = 0.01  # seconds
WARM_UP_STEPS = 20
RUNNING = (1, 64)

Figures = dict[str, float]


def idle_share(client: EngineCoreClient, seconds: float) -> float:
    """Percent of a core."""
    pid = pid_of(client)
    time.sleep(0.5)
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return 100.0 * (cpu_seconds(pid) - before) / (time.monotonic() - began)


def wake_times(client: EngineCoreClient) -> list[float]:
    """Microseconds from the client's send to the start of the step, of a core that was idle."""
    times = []
    for index in range(NUM_WAKES):
        time.sleep(WAKE_EVERY)
        sent = time.monotonic()
        client.add(request(f"wake-{index}", 1))
        batch = next(iter(_until_some(client)))
        times.append(1e6 * (batch.started[0].scheduled_time - sent))
    return times


def decode(client: EngineCoreClient, running: int, seconds: float) -> Figures:
    """Percent of a core and microseconds a token beyond the device's."""
    num_steps = int(seconds / STEP_SECONDS)
    requests = [request(f"decode-{i}", 2 * num_steps) for i in range(running)]
    assert not client.add_all(requests)
    pid, times, late = pid_of(client), [], []
    began = before = 0.0
    while len(times) < num_steps:
        for batch in client.step():
            now = time.monotonic()
            if len(batch.request_ids) == running:
                times.append(batch.time)
                late.append(now - batch.time)
        if len(times) <= WARM_UP_STEPS:
            began, before = time.monotonic(), cpu_seconds(pid)
    share = 100.0 * (cpu_seconds(pid) - before) / (time.monotonic() - began)
    client.abort([each.request_id for each in requests])
    while client.has_unfinished():  # their ends are still to be read
        client.step()
    gaps = [b - a - STEP_SECONDS for a, b in itertools.pairwise(times[WARM_UP_STEPS:])]
    return {
        "cpu_percent": share,
        "added_us_median": 1e6 * statistics.median(gaps),
        "added_us_mean": 1e6 * statistics.fmean(gaps),
        "added_us_p99": 1e6 * quantile(gaps, 0.99),
        "delivery_us_median": 1e6 * statistics.median(late[WARM_UP_STEPS:]),
    }


def measure(variant: str, seconds: float, num_steps_in_flight: int = 2) -> Figures:
    """All figures of one way to wait, in a process of its own.

    A GPU has two steps in flight unless told otherwise, a CPU one.
    """
    client = start(WaitingBuild(variant, STEP_SECONDS, num_steps_in_flight))
    try:
        figures = {"idle_percent": idle_share(client, seconds)}
        wakes = wake_times(client)
        figures |= {
            "wake_us_median": statistics.median(wakes),
            "wake_us_p99": quantile(wakes, 0.99),
        }
        for running in RUNNING:
            taken = decode(client, running, seconds)
            figures |= {f"{name}_{running}": value for name, value in taken.items()}
    finally:
        client.shutdown()
    return {name: round(value, 2) for name, value in figures.items()}


def floor(seconds: float) -> Figures:
    """What no core in a process of its own can go below."""
    return {
        f"cpu_percent_{running}": round(floor_percent(STEP_SECONDS, running, seconds), 2)
        for running in RUNNING
    }


def _until_some(client: EngineCoreClient) -> list[Any]:
    while not (batches := client.step()):
        pass
    return batches


def show(figures: dict[str, Figures]) -> None:
    view = Table(title="how a core waits: percent of a core, microseconds")
    view.add_column("")
    for variant in figures:
        view.add_column(variant, justify="right")
    for name in figures["ours"]:
        view.add_row(
            name, *(f"{each[name]:,.1f}" if name in each else "" for each in figures.values())
        )
    Console(width=100).print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    asked = parser.parse_args()
    before = Usage.now()
    rounds = [
        {variant: measure(variant, asked.seconds, asked.steps_in_flight) for variant in LOOPS}
        | {"floor": floor(asked.seconds)}
        for _ in range(asked.rounds)
    ]
    medians = {
        variant: {
            name: statistics.median(each[variant][name] for each in rounds)
            for name in rounds[0][variant]
        }
        for variant in rounds[0]
    }
    show(medians)
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {"machine": machine.describe(), "usage": others, "median": medians, "rounds": rounds}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
