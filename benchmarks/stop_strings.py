"""What a stream notices of neighbours whose requests end by stop strings.

    python benchmarks/stop_strings.py MODEL_DIR [--pairs 12] [--tokens 300] [--json FILE]

One stream over asyncio, the core in a process of its own, beside a task that runs requests of three
tokens one after the other. They end by a stop string, which only the front end can see, or by
length, which the core sees itself. Each kind is measured in fresh processes, the two of a pair one
after the other, which is first in turn. Figures are times between two tokens of the stream: medians
over the pairs, and the median of the ratios of each pair with its 95 % interval.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
from measure import Usage, median_interval, quantile
from rich.console import Console
from rich.table import Table

from engine import AsyncLLMEngine, EngineArgs, SamplingParams

KINDS = ("length", "stop string")
NUM_NEIGHBOUR = 3  # tokens of each of the neighbour's requests
NUM_SKIPPED = 10  # of the stream's first gaps
QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}

Figures = dict[str, float]


class Neighbour(NamedTuple):
    """A prompt, and a string that its third token completes."""

    prompt: str
    stop: str

    def params(self, kind: str) -> SamplingParams:
        if kind == "length":
            return greedy(NUM_NEIGHBOUR)
        return greedy(64, stop=[self.stop])


def greedy(num_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind="delta",
        **options,  # type: ignore[arg-type]
    )


async def text_of(engine: AsyncLLMEngine, prompt: str, num_tokens: int) -> str:
    outputs = [o async for o in engine.generate(prompt, greedy(num_tokens), "text")]
    return "".join(output.outputs[0].text for output in outputs)


async def find_neighbour(engine: AsyncLLMEngine) -> Neighbour:
    """The first of many prompts whose third token adds text that was not there before."""
    for number in range(100):
        prompt = f"import number {number}: def"
        shorter = await text_of(engine, prompt, NUM_NEIGHBOUR - 1)
        longer = await text_of(engine, prompt, NUM_NEIGHBOUR)
        stop = longer[len(shorter) :]
        if stop and longer.startswith(shorter) and longer.find(stop) == len(shorter):
            return Neighbour(prompt, stop)
    raise ValueError("no prompt has a third token that can be a stop string")


async def gaps_beside(
    engine: AsyncLLMEngine, neighbour: Neighbour, kind: str, num_tokens: int
) -> tuple[list[float], int]:
    """Seconds between the tokens of the stream, and how many requests ended meanwhile."""
    num_ended = 0

    async def ask() -> None:
        nonlocal num_ended
        params = neighbour.params(kind)
        for number in itertools.count():
            # A salt of its own: each computes its prompt.
            prompt = {"prompt": neighbour.prompt, "cache_salt": f"{kind} {number}"}
            num_read = 0
            async for output in engine.generate(prompt, params, "neighbour"):
                num_read += len(output.outputs[0].token_ids)
            reason = output.outputs[0].finish_reason
            if (num_read, reason) != (NUM_NEIGHBOUR, "length" if kind == "length" else "stop"):
                raise ValueError(f"a neighbour ended by {reason} after {num_read} tokens")
            num_ended += 1

    beside = asyncio.create_task(ask())
    times = []
    async for output in engine.generate("class Stream:", greedy(num_tokens), "stream"):
        times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        if beside.done():
            break
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    if not beside.cancelled():
        beside.result()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return gaps[NUM_SKIPPED:], num_ended


async def measure(engine: AsyncLLMEngine, kind: str, num_tokens: int) -> Figures:
    """Milliseconds between two tokens beside neighbours of this kind."""
    neighbour = await find_neighbour(engine)
    await gaps_beside(engine, neighbour, kind, 30)  # warm
    gaps, num_ended = await gaps_beside(engine, neighbour, kind, num_tokens)
    quantiles = {name: round(1e3 * quantile(gaps, share), 2) for name, share in QUANTILES.items()}
    return quantiles | {"ended": num_ended}


def measure_here(model: str, kind: str, num_tokens: int) -> Figures:
    engine = AsyncLLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            multiprocess=True,
            max_num_seqs=8,
            max_model_len=512,
            num_kv_blocks=512,
            disable_log_stats=True,
            log_level="warning",
        )
    )
    try:
        return asyncio.run(measure(engine, kind, num_tokens))
    finally:
        engine.shutdown()


def measure_in_process(model: str, kind: str, num_tokens: int) -> Figures:
    """The same, in a fresh process."""
    command = [sys.executable, __file__, model, "--kind", kind, "--tokens", str(num_tokens)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    figures: Figures = json.loads(told.stdout.splitlines()[-1])
    return figures


def ratios(pairs: list[dict[str, Figures]], name: str) -> list[float]:
    """Beside stop strings against beside lengths."""
    return sorted(round(each["stop string"][name] / each["length"][name], 3) for each in pairs)


def summary(pairs: list[dict[str, Figures]]) -> dict[str, dict[str, Any]]:
    """Of each quantile the ratios, their median and its interval."""
    found = {}
    for name in QUANTILES:
        each = ratios(pairs, name)
        found[name] = {
            "median": round(statistics.median(each), 3),
            "interval": median_interval(each),
            "ratios": each,
        }
    return found


def show(pairs: list[dict[str, Figures]]) -> None:
    view = Table(title="between two tokens of a stream, ms, by how its neighbours' requests end")
    for name in ("", *QUANTILES, "ended"):
        view.add_column(name, justify="right")
    for kind in KINDS:
        medians = [
            statistics.median(each[kind][name] for each in pairs) for name in (*QUANTILES, "ended")
        ]
        view.add_row(kind, *(f"{each:.1f}" for each in medians))
    Console(width=100).print(view)
    for name, told in summary(pairs).items():
        least, most = told["interval"]
        print(f"{name}: stop string / length {told['median']:.3f}, 95 % {least:.3f} to {most:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--kind", choices=KINDS, help="measure this alone, and print it as JSON")
    asked = parser.parse_args()
    if asked.kind:
        print(json.dumps(measure_here(asked.model, asked.kind, asked.tokens)))
        return
    before = Usage.now()
    pairs = []
    for number in range(asked.pairs):
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        pairs.append({kind: measure_in_process(asked.model, kind, asked.tokens) for kind in order})
        print(f"pair {number + 1} of {asked.pairs}: {pairs[-1]}", flush=True)
    show(pairs)
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {
            "machine": machine.describe(),
            "model": Path(asked.model).name,
            "usage": others,
            "pairs": pairs,
            "stop string / length": summary(pairs),
        }
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
