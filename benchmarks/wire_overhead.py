"""What it costs that the core is in a process of its own.

    python benchmarks/wire_overhead.py [--rounds 5] [--model DIRECTORY] [--json FILE]

Round trip: one request of one token whose model takes no time, from the client's call to its
output in the client's hands. Throughput: 64 requests at once on a small model, the core in this
process and in its own, in turn; medians over the rounds, and of the ratios of each round.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from measure import Usage, quantile
from rich.console import Console
from rich.table import Table
from wire_cores import WaitingBuild, request, start

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.core.aio_client import AsyncEngineCoreClient

NUM_TRIPS = 1000
NUM_WARM_UP = 100
NUM_REQUESTS = 64
NUM_PROMPT = 32
NUM_OUTPUT = 128
PLACES = ("in-process", "multiprocess")

Figures = dict[str, float]


def in_process_trips() -> list[float]:
    """Of a core that is called directly."""
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    return _trips(WaitingBuild()(config))


def wire_trips() -> list[float]:
    """Of a core in a process, by the synchronous client."""
    client = start(WaitingBuild())
    try:
        return _trips(client)
    finally:
        client.shutdown()


def asyncio_trips() -> list[float]:
    """Of a core in a process, by the asyncio client."""
    owner = start(WaitingBuild())
    try:
        return asyncio.run(_asyncio_trips(owner.address))
    finally:
        owner.shutdown()


def _trips(client: Any) -> list[float]:
    times = []
    for index in range(NUM_TRIPS + NUM_WARM_UP):
        began = time.perf_counter()
        client.add(request(index, 1))
        while not any(batch.finished for batch in client.step()):
            pass
        times.append(time.perf_counter() - began)
    return times[NUM_WARM_UP:]


async def _asyncio_trips(address: Any) -> list[float]:
    client = await AsyncEngineCoreClient.connect(address)
    times = []
    for index in range(NUM_TRIPS + NUM_WARM_UP):
        began = time.perf_counter()
        await client.add(request(f"{client.id_prefix}{index}", 1))
        while not any(batch.finished for batch in await client.step()):
            pass
        times.append(time.perf_counter() - began)
    await client.shutdown()
    return times[NUM_WARM_UP:]


TRIPS: dict[str, Callable[[], list[float]]] = {
    "in-process": in_process_trips,
    "multiprocess": wire_trips,
    "multiprocess, asyncio": asyncio_trips,
}


def round_trips() -> dict[str, Figures]:
    """Microseconds."""
    found = {}
    for name, measure in TRIPS.items():
        times = measure()
        found[name] = {
            "median_us": round(1e6 * statistics.median(times), 1),
            "p99_us": round(1e6 * quantile(times, 0.99), 1),
        }
    return found


def throughputs(model: str, rounds: int) -> list[Figures]:
    """Output tokens a second of each place, by round."""
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
        found.append({place: round(_rate(llms[place]), 1) for place in order})
    for llm in llms.values():
        llm.shutdown()
    return found


def _rate(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    prompts = [
        {"prompt_token_ids": [10 + (index + i) % 200 for i in range(NUM_PROMPT)]}
        for index in range(NUM_REQUESTS)
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != NUM_REQUESTS * NUM_OUTPUT:
        raise ValueError(f"{num_tokens} tokens came back instead of {NUM_REQUESTS * NUM_OUTPUT}")
    return num_tokens / seconds


def show(trips: dict[str, Figures], rates: list[Figures]) -> None:
    view = Table(title=f"one request without model time; {NUM_REQUESTS} requests at once")
    for name in ("core", "round trip µs", "p99 µs", "tokens/s"):
        view.add_column(name, justify="right")
    for name, figures in trips.items():
        known = [each[name] for each in rates if name in each]
        rate = f"{statistics.median(known):,.0f}" if known else ""
        view.add_row(name, f"{figures['median_us']:,.0f}", f"{figures['p99_us']:,.0f}", rate)
    Console(width=100).print(view)
    ratios = [each["multiprocess"] / each["in-process"] for each in rates]
    print(f"multiprocess / in-process: {statistics.median(ratios):.3f}  of {sorted(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=str(BOX_MODEL))
    parser.add_argument("--json", type=Path, help="keep the figures here")
    asked = parser.parse_args()
    before = Usage.now()
    trips, rates = round_trips(), throughputs(asked.model, asked.rounds)
    show(trips, rates)
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {"machine": machine.describe(), "usage": others, "trips": trips, "rates": rates}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
