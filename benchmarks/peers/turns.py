"""Runs the loads of one checkout turn by turn, for `benchmarks/against.py`.

    python .../peers/turns.py KIND NAMES MODEL ROUND

Runs in the folder `benchmarks/` of the measured checkout, which may be older than this file, and
uses its adapters. Each line on standard input starts a turn. The answer is a line with `@` and, as
JSON, the name of the load, the seconds of each part and the processor seconds.

    workloads   a turn is one step of the engine, or the adding of a workload's requests
    trips       a turn is 40 round trips of a request of one token whose model takes no time
    loads       a turn is a few steps of the scheduler, or a load from its first step to its last
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

TRIPS_A_TURN = 40
STEPS_A_TURN = {"decode": 8, "queue": 4}
KV_GIB = 2.0

Turn = tuple[str, list[float]]


def workloads(names: list[str], model: str, repeat: int) -> Iterator[Turn]:
    import workloads as made

    from peers import driver, metronome

    task = driver.Task(model, names, started=time.time(), repeat=repeat, kv_gib=KV_GIB)
    engine = metronome.Metronome(task)
    driver.run(engine, [made.Arrival(0.0, list(range(10, 42)), 1)], "first")
    driver.run(engine, made.warm_up(), "warm")
    yield "", []
    for name in names:
        arrivals = made.make(name, repeat)
        began = time.perf_counter()
        for index, arrival in enumerate(arrivals):
            engine.add(f"{name}-{index}", arrival.prompt, arrival.num_output)
        yield name, [time.perf_counter() - began]
        while engine.is_busy():
            began = time.perf_counter()
            engine.step()
            yield name, [time.perf_counter() - began]


def trips(names: list[str], model: str, repeat: int) -> Iterator[Turn]:
    from wire_cores import WaitingBuild, start

    from engine.config.engine import EngineConfig
    from engine.config.model import ModelConfig

    (name,) = names
    if name == "in-process":
        config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
        yield from _trips(name, WaitingBuild()(config))
        return
    owner = start(WaitingBuild())
    try:
        yield from _trips(name, owner)
    finally:
        owner.shutdown()


def _trips(name: str, client: Any) -> Iterator[Turn]:
    from wire_cores import request

    number = 0
    yield "", []
    while True:
        times = []
        for _ in range(TRIPS_A_TURN):
            number += 1
            began = time.perf_counter()
            client.add(request(number, 1))
            while not any(batch.finished for batch in client.step()):
                pass
            times.append(time.perf_counter() - began)
        yield name, times


def loads(names: list[str], model: str, repeat: int) -> Iterator[Turn]:
    from scheduler_loads import named

    from peers import metronome_scheduler, scheduler_driver

    (name,) = names
    load, bench = named(name), None
    gc.collect()
    gc.freeze()
    yield "", []
    if load.kind == "lookup":
        while True:
            found = scheduler_driver.measure_lookup(metronome_scheduler.Ours, load)
            yield name, [found["miss_us"] / 1e6, found["hit_us"] / 1e6]
    while True:
        if load.kind == "drain" or bench is None or not bench.is_busy():
            bench = metronome_scheduler.Ours(load.setup)
            scheduler_driver.add_all(bench, load)
            if load.kind == "decode":
                while bench.step().num_tokens != load.requests:
                    pass
            elif load.kind == "queue":  # until some end in almost every step
                for _ in range(load.num_output + scheduler_driver.WARM_UP):
                    bench.step()
        if load.kind == "drain":
            steps = scheduler_driver.drain(bench)
            gc.collect()
        else:
            steps = [bench.step() for _ in range(STEPS_A_TURN[load.kind])]
        yield name, [(step.planned + step.settled) / 1e9 for step in steps]


KINDS: dict[str, Callable[[list[str], str, int], Iterator[Turn]]] = {
    "workloads": workloads,
    "trips": trips,
    "loads": loads,
}


def answer(found: object) -> bool:
    """Print the result of a turn and wait; ``False`` if standard input has ended."""
    print("@" + json.dumps(found), flush=True)
    return bool(sys.stdin.readline())


def main() -> None:
    kind, names, model, repeat = sys.argv[1:]
    turns = KINDS[kind](names.split(","), model, int(repeat))
    try:
        next(turns)  # everything is ready
        before, is_wanted = time.process_time(), answer(None)
        while is_wanted:
            before = time.process_time()
            found = next(turns, None)
            if found is None:
                answer(None)
                break
            name, times = found
            is_wanted = answer([name, times, time.process_time() - before])
    finally:
        turns.close()


if __name__ == "__main__":
    # Import the adapters of the measured checkout, not those next to this file.
    sys.path[0] = os.getcwd()
    main()
