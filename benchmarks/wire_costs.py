"""What it costs that the core runs in a process of its own.

    python benchmarks/wire_costs.py [--seconds 5] [--rounds 3] [--steps-in-flight 2]
                                    [--model DIRECTORY] [--json FILE]

Idle: the share of a processor core that the process uses, and the time from a client's send to the
first step. Decoding: with steps of 10 ms on the device and 1 or 64 requests running, the share of a
processor core and what a token takes beyond the 10 ms. Two ways to wait are measured in turn
(`wire_cores.py`).
Round trip: a request of one token whose model takes no time, from the client's call to its output.
Throughput: 64 requests at once on a small model, with the core in this process and in its own.
Shown are medians over the rounds.
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
from wire_cores import LOOPS, WaitingBuild, cpu_seconds, pid_of, request, start

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.rpc.zmq_client import EngineCoreClient

STEP_SECONDS = 0.010
NUM_WAKES = 200
WAKE_EVERY = 0.01  # seconds
WARM_UP_STEPS = 20
RUNNING = (1, 64)
NUM_TRIPS, NUM_WARM_UP_TRIPS = 1000, 100
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 64, 32, 128
PLACES = ("in-process", "multiprocess")

Figures = dict[str, float]


def idle_share(client: EngineCoreClient, seconds: float) -> float:
    """Percent of a processor core."""
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
        while not (batches := client.step()):
            pass
        times.append(1e6 * (batches[0].started[0].scheduled_time - sent))
    return times


def decode(client: EngineCoreClient, running: int, seconds: float) -> Figures:
    """Percent of a processor core, and microseconds a token beyond the device's."""
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


def waiting(variant: str, seconds: float, num_steps_in_flight: int = 2) -> Figures:
    """All figures of one way to wait, in a process of its own.

    By default a GPU has two steps in flight and a CPU has one.
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


def round_trips(place: str) -> Figures:
    """Microseconds of a request of one token, by the synchronous client."""
    if place == "in-process":
        config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
        client: Any = WaitingBuild()(config)
    else:
        client = start(WaitingBuild())
    times = []
    for index in range(NUM_TRIPS + NUM_WARM_UP_TRIPS):
        began = time.perf_counter()
        client.add(request(index, 1))
        while not any(batch.finished for batch in client.step()):
            pass
        times.append(time.perf_counter() - began)
    client.shutdown()
    times = times[NUM_WARM_UP_TRIPS:]
    return {"median_us": 1e6 * statistics.median(times), "p99_us": 1e6 * quantile(times, 0.99)}


def throughputs(model: str, rounds: int) -> list[Figures]:
    """Output tokens a second with the core in each place, by round."""
    llms = {
        place: LLM(
            model=model,
            multiprocess=place == "multiprocess",
            max_num_seqs=NUM_REQUESTS,
            disable_log_stats=True,
        )
        for place in PLACES
    }
    for llm in llms.values():
        _rate(llm)
    found = []
    for index in range(rounds):
        order = PLACES if index % 2 == 0 else PLACES[::-1]
        found.append({place: _rate(llms[place]) for place in order})
    for llm in llms.values():
        llm.shutdown()
    return found


def _rate(llm: LLM) -> float:
    prompts = [
        {"prompt_token_ids": [10 + (index + i) % 200 for i in range(NUM_PROMPT)]}
        for index in range(NUM_REQUESTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != NUM_REQUESTS * NUM_OUTPUT:
        raise ValueError(f"{num_tokens} tokens came back instead of {NUM_REQUESTS * NUM_OUTPUT}")
    return num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--model", default=str(BOX_MODEL))
    parser.add_argument("--json", type=Path, help="keep the figures here")
    options = parser.parse_args()
    before = Usage.now()
    rounds = [
        {name: waiting(name, options.seconds, options.steps_in_flight) for name in LOOPS}
        for _ in range(options.rounds)
    ]
    rates = throughputs(options.model, options.rounds)
    figures = {
        variant: {
            name: round(statistics.median(each[variant][name] for each in rounds), 2)
            for name in rounds[0][variant]
        }
        for variant in LOOPS
    }
    for place in PLACES:
        rate = statistics.median(each[place] for each in rates)
        figures[place] = {**round_trips(place), "tokens_per_s": round(rate, 1)}
    body = {"machine": machine.describe(), "usage": Usage.now().since(before), "median": figures}
    print(json.dumps(body, indent=1))
    if options.json:
        kept = {**body, "rounds": rounds, "rates": rates}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
