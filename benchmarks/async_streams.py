"""What ``AsyncLLMEngine`` costs around a core in a process of its own.

    python benchmarks/async_streams.py [--rounds 5] [--seconds 6] [--json FILE]

The core's device takes 20 ms for a step, whatever is in it. Some streams run all the time; beside
them short requests come one after the other. Measured are how long those wait for their first
output (which takes one to two steps), and the processor time of the front end's process for each
token that the streams get. Fresh processes; medians over the rounds.

``results/async-clients.json`` has rounds of this with the synchronous client in a thread, as it is,
beside an asyncio client in the event loop, which was given up for it (687604b has both).
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import machine
from measure import Usage, quantile
from wire_cores import MAX_MODEL_LEN, WaitingBuild, start

from engine import AsyncLLMEngine, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.frontend.session import Session

NUM_STREAMS = (1, 256)
STEP_SECONDS = 0.02
NUM_WARM_UP = 10  # of the short requests
PROMPT = {"prompt_token_ids": list(range(1, 9))}
CONFIG = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)

Figures = dict[str, float]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta"
    )


class Load:
    """Streams that run all the time, and what they were given."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self.num_tokens = 0
        self._engine = engine

    async def run(self, name: str) -> None:
        while True:
            async for output in self._engine.generate(PROMPT, params(MAX_MODEL_LEN - 100), name):
                self.num_tokens += len(output.outputs[0].token_ids)

    async def first_output(self, name: str) -> float:
        """Seconds that a new request waits for it."""
        began, first = time.perf_counter(), None
        async for _ in self._engine.generate(PROMPT, params(2), name):
            first = first or time.perf_counter()
        assert first is not None
        return first - began


async def measure(engine: AsyncLLMEngine, num_streams: int, seconds: float) -> Figures:
    load = Load(engine)
    running = [asyncio.create_task(load.run(f"s{i}")) for i in range(num_streams)]
    while load.num_tokens < 20 * num_streams:
        await asyncio.sleep(STEP_SECONDS)
    for index in range(NUM_WARM_UP):
        await load.first_output(f"w{index}")
    cpu, tokens = time.process_time(), load.num_tokens
    await asyncio.sleep(seconds / 2)
    cpu, tokens = time.process_time() - cpu, load.num_tokens - tokens
    waits: list[float] = []
    until = time.monotonic() + seconds / 2
    while time.monotonic() < until:
        waits.append(await load.first_output(f"p{len(waits)}"))
        await asyncio.sleep(0.37 * STEP_SECONDS * (len(waits) % 3))  # any phase of a step
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {
        "first_output_ms": round(1e3 * statistics.median(waits), 3),
        "first_output_p90_ms": round(1e3 * quantile(waits, 0.9), 3),
        "cpu_us_per_token": round(1e6 * cpu / tokens, 2),
        "tokens_s": round(2 * tokens / seconds),
    }


def measure_here(num_streams: int, seconds: float) -> Figures:
    client = start(WaitingBuild(step_seconds=STEP_SECONDS, max_num_seqs=num_streams + 1))
    engine = AsyncLLMEngine(Session(CONFIG, client, None, time.monotonic))
    try:
        return asyncio.run(measure(engine, num_streams, seconds))
    finally:
        engine.shutdown()


def measure_in_process(num_streams: int, seconds: float) -> Figures:
    """The same, in a fresh process."""
    command = [sys.executable, __file__, "--streams", str(num_streams), "--seconds", str(seconds)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    figures: Figures = json.loads(told.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--streams", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.streams:
        print(json.dumps(measure_here(asked.streams, asked.seconds)))
        return
    before = Usage.now()
    rounds = [
        {str(num): measure_in_process(num, asked.seconds) for num in NUM_STREAMS}
        for _ in range(asked.rounds)
    ]
    for num in map(str, NUM_STREAMS):
        for name in rounds[0][num]:
            values = sorted(each[num][name] for each in rounds)
            print(f"{num} streams: {name} {statistics.median(values):,.2f}  of {values}")
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {"machine": machine.describe(), "usage": others, "rounds": rounds}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
