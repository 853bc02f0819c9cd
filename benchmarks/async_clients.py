"""Behind ``AsyncLLMEngine``: the synchronous client in a thread, or the asyncio client in the loop.

    python benchmarks/async_clients.py [--rounds 5] [--seconds 6] [--json FILE]

The core is in a process of its own and its device takes 20 ms for a step, whatever is in it. Some
streams run all the time; beside them short requests come one after the other. Measured are how long
those wait for their first output (which takes one to two steps), and the processor time of the
front end's process for each output that it delivers. Both kinds are measured in fresh processes,
the two of a round one after the other, which is first in turn. Medians over the rounds, and of the
ratios of each round.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import machine
from measure import Usage, quantile
from rich.console import Console
from rich.table import Table
from wire_cores import MAX_MODEL_LEN, WaitingBuild, start

from engine import AsyncLLMEngine, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.frontend.output import OutputProcessor
from engine.frontend.prompt import InputProcessor
from engine.frontend.session import Session, _limits
from engine.frontend.stream import Stream
from engine.messages.outputs import RequestOutput
from engine.rpc.aio_client import AsyncEngineCoreClient

KINDS = ("thread", "loop")
NUM_STREAMS = (1, 256)
STEP_SECONDS = 0.02
NUM_WARM_UP = 10  # of the short requests
PROMPT = {"prompt_token_ids": list(range(1, 9))}
CONFIG = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)

Figures = dict[str, float]


class LoopEngine:
    """What ``AsyncLLMEngine`` would be over the asyncio client, as far as it is measured here."""

    def __init__(self, client: AsyncEngineCoreClient) -> None:
        self._client = client
        limits = _limits(CONFIG, client.decided, None)
        self._inputs = InputProcessor(None, limits, time.monotonic, client.id_prefix)
        self._outputs = OutputProcessor(None)
        self._streams: dict[str, Stream] = {}
        self.reading = asyncio.create_task(self._read())

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        submission = self._inputs.process(request_id, prompt, params, {})
        self._outputs.register(submission)
        stream = Stream(asyncio.get_running_loop(), params.output_kind)
        self._streams[request_id] = stream
        for error in (await self._client.add_all(submission.requests)).values():
            raise error
        while not stream.is_finished or stream._waiting is not None:
            yield await stream.next()

    async def _read(self) -> None:
        while True:
            for batch in await self._client.step():
                for output in self._outputs.process(batch):
                    self._streams[output.request_id].put(output)
                    if output.finished:
                        del self._streams[output.request_id]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta"
    )


class Load:
    """Streams that run all the time, and what they were given."""

    def __init__(self, engine: Any) -> None:
        self.num_outputs = 0
        self.num_tokens = 0
        self._engine = engine

    async def run(self, name: str) -> None:
        while True:
            async for output in self._engine.generate(PROMPT, params(MAX_MODEL_LEN - 100), name):
                self.num_outputs += 1  # of several tokens, if it was not taken at once
                self.num_tokens += len(output.outputs[0].token_ids)

    async def first_output(self, name: str) -> float:
        """Seconds that a new request waits for it."""
        began, first = time.perf_counter(), None
        async for _ in self._engine.generate(PROMPT, params(2), name):
            first = first or time.perf_counter()
        assert first is not None
        return first - began


async def measure(engine: Any, num_streams: int, seconds: float) -> Figures:
    load = Load(engine)
    running = [asyncio.create_task(load.run(f"s{i}")) for i in range(num_streams)]
    while load.num_outputs < 20 * num_streams:
        await asyncio.sleep(STEP_SECONDS)
    for index in range(NUM_WARM_UP):
        await load.first_output(f"w{index}")
    cpu, outputs, tokens = time.process_time(), load.num_outputs, load.num_tokens
    await asyncio.sleep(seconds / 2)
    cpu = time.process_time() - cpu
    outputs, tokens = load.num_outputs - outputs, load.num_tokens - tokens
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
        "cpu_us_per_output": round(1e6 * cpu / outputs, 2),
        "cpu_us_per_token": round(1e6 * cpu / tokens, 2),
        "tokens_s": round(2 * tokens / seconds),
    }


async def measure_loop(address: Any, num_streams: int, seconds: float) -> Figures:
    client = await AsyncEngineCoreClient.connect(address)
    engine = LoopEngine(client)
    figures = await measure(engine, num_streams, seconds)
    engine.reading.cancel()
    await client.shutdown()
    return figures


def measure_here(kind: str, num_streams: int, seconds: float) -> Figures:
    owner = start(WaitingBuild(step_seconds=STEP_SECONDS, max_num_seqs=num_streams + 1))
    if kind == "loop":
        try:
            return asyncio.run(measure_loop(owner.address, num_streams, seconds))
        finally:
            owner.shutdown()
    engine = AsyncLLMEngine(Session(CONFIG, owner, None, time.monotonic))
    try:
        return asyncio.run(measure(engine, num_streams, seconds))
    finally:
        engine.shutdown()


def measure_in_process(kind: str, num_streams: int, seconds: float) -> Figures:
    """The same, in a fresh process."""
    command = [sys.executable, __file__, "--kind", kind, "--streams", str(num_streams)]
    command += ["--seconds", str(seconds)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    figures: Figures = json.loads(told.stdout.splitlines()[-1])
    return figures


def show(rounds: list[dict[str, dict[str, Figures]]]) -> None:
    for num in map(str, NUM_STREAMS):
        view = Table(title=f"{num} streams; ratios: loop / thread, median [least, most]")
        for name in ("figure", *KINDS, "ratio"):
            view.add_column(name, justify="right")
        for name in rounds[0][num]["thread"]:
            values = {kind: [each[num][kind][name] for each in rounds] for kind in KINDS}
            ratios = sorted(b / a for a, b in zip(*values.values(), strict=True))
            ratio = f"{statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
            medians = (f"{statistics.median(values[kind]):,.2f}" for kind in KINDS)
            view.add_row(name, *medians, ratio)
        Console(width=100).print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.kind:
        print(json.dumps(measure_here(asked.kind, asked.streams, asked.seconds)))
        return
    before, rounds = Usage.now(), []
    for index in range(asked.rounds):
        order = KINDS if index % 2 == 0 else KINDS[::-1]
        rounds.append(
            {
                str(num): {kind: measure_in_process(kind, num, asked.seconds) for kind in order}
                for num in NUM_STREAMS
            }
        )
        print(f"round {index + 1} of {asked.rounds}: {rounds[-1]}", file=sys.stderr)
    show(rounds)
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {"machine": machine.describe(), "usage": others, "rounds": rounds}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
