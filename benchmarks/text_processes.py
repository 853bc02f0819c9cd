"""What tokenizer and detokenizer processes bring (``tokenizer_pool_size``), and what they cost.

    python benchmarks/text_processes.py [--rounds 5] [--seconds 4] [--json FILE]

A core in a process of its own says tokens of real text, of a byte-level BPE tokenizer with 32,000
entries that is trained here. 16 and 256 streams read them from AsyncLLMEngine, with 0, 1 and 2
processes of each kind, in fresh processes and in turn. Medians over the rounds:

    cpu             processor time for a token: of the process with the engine, and with the text
                    processes
    gap             time between two outputs of a stream, while the device takes 20 ms for a step
    gap beside long the same while prompts of 100,000 characters come, one after the other
    long prompt     from such a prompt to its first token
    tokens/s        of all streams together, when the device takes no time
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
from measure import Usage, quantile
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from wire_cores import MAX_MODEL_LEN, Device, WaitingBuild, cpu_seconds, start

from engine import AsyncLLMEngine, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.frontend.session import Session
from engine.frontend.text_workers import TextPool
from engine.messages.step import StepPlan, StepResult
from engine.text.tokenizer import load_tokenizer

POOLS = (0, 1, 2)
NUM_STREAMS = (16, 256)
STEP_SECONDS = 0.02
VOCAB_SIZE = 32_000
NUM_TEXT_CHARS = 20_000_000  # that the tokenizer is trained with
NUM_LONG_CHARS = 100_000
NUM_FAST_TOKENS = 512
PROMPT = "A text about "

Figures = dict[str, float]


def texts() -> list[str]:
    """Source files of the standard library: there is no text like them on every machine."""
    files, found, size = sorted(Path(asyncio.__file__).parent.parent.rglob("*.py")), [], 0
    for path in files:
        if size < NUM_TEXT_CHARS and "site-packages" not in path.parts:
            found.append(path.read_text(errors="replace"))
            size += len(found[-1])
    return found


def make_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    ids = tokenizer.encode("".join(texts()[:40])).ids
    np.save(directory / "ids.npy", np.array(ids, dtype=np.int32))


class TalkingDevice(Device):
    """Says the tokens of a text, each row from another place."""

    def __init__(self, seconds: float, ids: Any) -> None:
        super().__init__(seconds, is_spinning=False)
        self._ids = ids
        self._num_steps = 0

    def launch(self, plan: StepPlan) -> tuple[float, StepResult]:
        done_at, result = super().launch(plan)
        self._num_steps += 1
        places = np.arange(len(result.token_ids)) * 1009 + self._num_steps
        return done_at, StepResult(plan.step, self._ids[places % len(self._ids)], plan.samples)


@dataclass(frozen=True)
class TalkingBuild(WaitingBuild):
    directory: str = ""

    def device(self) -> Device:
        return TalkingDevice(self.step_seconds, np.load(Path(self.directory) / "ids.npy"))


class Load:
    """Streams that run all the time, and the times of what they were given."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self.num_tokens = 0
        self.gaps: list[float] = []
        self._engine = engine

    async def run(self, name: str) -> None:
        while True:
            await self.read(name, MAX_MODEL_LEN - 100)

    async def read(self, name: str, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, output_kind="delta")
        last = None
        async for output in self._engine.generate(PROMPT + name, params, name):
            now = time.perf_counter()
            if last is not None:
                self.gaps.append(now - last)
            last = now
            self.num_tokens += len(output.outputs[0].token_ids)

    async def long_prompt(self, text: str, name: str = "first") -> float:
        """Seconds to its first token. It is cut to fit when it has been tokenised."""
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=64)
        began = time.perf_counter()
        async for _ in self._engine.generate(text, params, name):
            pass
        return time.perf_counter() - began

    async def long_prompts(self, text: str, waits: list[float]) -> None:
        """One after the other."""
        while True:
            waits.append(await self.long_prompt(text, f"long {len(waits)}"))


async def measure(
    engine: AsyncLLMEngine, pool: TextPool | None, num: int, seconds: float, text: str
) -> Figures:
    load, waits = Load(engine), list[float]()
    await load.long_prompt(text)  # what is made on first use exists before the clock runs
    running = [asyncio.create_task(load.run(f"s{i}")) for i in range(num)]
    while load.num_tokens < 20 * num:
        await asyncio.sleep(0.05)

    def busy() -> tuple[float, float]:
        own = time.process_time()
        return own, own + sum(map(cpu_seconds, pool.pids.values() if pool else ()))

    before, tokens = busy(), load.num_tokens
    load.gaps.clear()
    await asyncio.sleep(seconds)
    after, tokens = busy(), load.num_tokens - tokens
    figures = {
        "cpu_us_per_token": 1e6 * (after[0] - before[0]) / tokens,
        "cpu_us_per_token_all": 1e6 * (after[1] - before[1]) / tokens,
        "gap_p50_ms": 1e3 * quantile(load.gaps, 0.5),
        "gap_p99_ms": 1e3 * quantile(load.gaps, 0.99),
    }
    load.gaps.clear()
    long = asyncio.create_task(load.long_prompts(text, waits))
    await asyncio.sleep(seconds)
    figures |= {
        "gap_p99_beside_long_ms": 1e3 * quantile(load.gaps, 0.99),
        "long_prompt_p50_ms": 1e3 * quantile(waits, 0.5),
    }
    for each in (*running, long):
        if each.done():
            each.result()  # it goes on until it is cancelled
        each.cancel()
    await asyncio.gather(*running, long, return_exceptions=True)
    return figures


async def measure_speed(engine: AsyncLLMEngine, num: int) -> Figures:
    """Of streams that begin and end together."""
    load, began = Load(engine), time.perf_counter()
    await asyncio.gather(*(load.read(f"s{i}", NUM_FAST_TOKENS) for i in range(num)))
    return {"tokens_s": load.num_tokens / (time.perf_counter() - began)}


def measure_here(directory: str, size: int, num: int, seconds: float) -> Figures:
    model = ModelConfig(model=directory)
    config = EngineConfig(model=model, disable_log_stats=True)
    text = "".join(texts()[:40])[:NUM_LONG_CHARS]
    figures: Figures = {}
    for step_seconds in (STEP_SECONDS, 0.0):
        build = TalkingBuild(
            step_seconds=step_seconds,
            max_num_seqs=num + 1,
            vocab_size=VOCAB_SIZE,
            directory=directory,
        )
        client, pool = start(build), TextPool(model, size) if size else None
        if pool is not None:
            pool.wait_until_ready()
        session = Session(config, client, load_tokenizer(model), time.monotonic, pool)
        engine = AsyncLLMEngine(session)
        try:
            if step_seconds:
                figures |= asyncio.run(measure(engine, pool, num, seconds, text))
            else:
                figures |= asyncio.run(measure_speed(engine, num))
        finally:
            engine.shutdown()
    return {name: round(value, 3) for name, value in figures.items()}


def measure_in_process(directory: str, size: int, num: int, seconds: float) -> Figures:
    """The same, in a fresh process."""
    asked = ["--here", directory, str(size), str(num), "--seconds", str(seconds)]
    told = subprocess.run(
        [sys.executable, __file__, *asked], check=True, capture_output=True, text=True, timeout=600
    )
    figures: Figures = json.loads(told.stdout.splitlines()[-1])
    return figures


def table_of(medians: dict[str, Figures]) -> Table:
    view = Table(title="text processes")
    view.add_column("")
    for name in medians:
        view.add_column(name, justify="right")
    for name in next(iter(medians.values())):
        view.add_row(name, *(f"{each[name]:,.1f}" for each in medians.values()))
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each figure")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        directory, size, num = asked.here
        print(json.dumps(measure_here(directory, int(size), int(num), asked.seconds)))
        return
    before = Usage.now()
    with tempfile.TemporaryDirectory() as directory:
        make_tokenizer(Path(directory))
        rounds = [
            {
                f"{num} streams, {size}": measure_in_process(directory, size, num, asked.seconds)
                for num in NUM_STREAMS
                for size in POOLS
            }
            for _ in range(asked.rounds)
        ]
    medians = {
        key: {name: statistics.median(each[key][name] for each in rounds) for name in own}
        for key, own in rounds[0].items()
    }
    Console(width=140).print(table_of(medians))
    others = Usage.now().since(before)
    print(others)
    if asked.json:
        body = {"machine": machine.describe(), "usage": others, "median": medians, "rounds": rounds}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
