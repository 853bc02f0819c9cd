"""What tokenizer and detokenizer processes bring, against doing both in the user's process.

    python benchmarks/tokenizer_pool.py [--pools 0,1,2] [--streams 64] [--tokens 128] [--repeats 3]

The model in the box, its core in a process of its own, so that the time of this process is that of
the front end: checks, text and streams. A run has all streams at once, as AsyncLLMEngine serves
them. Medians of the repeats:

    tokens/s        of all streams together
    front end       processor time of this process for a token, microseconds
    hold-up         longest time the event loop stands still while a long prompt is tokenised
    first token     of a short prompt that comes right behind that long one
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import machine
from rich.console import Console
from rich.table import Table

from engine import AsyncLLMEngine, EngineArgs, RequestError, SamplingParams
from engine.assets import BOX_MODEL

PROMPT = "A list comprehension is "
LONG_PROMPT = "several words " * 50_000
UNITS = {
    "tokens/s": ("tokens_per_second", "{:.0f}"),
    "front end us": ("front_end_us", "{:.1f}"),
    "hold-up ms": ("hold_up_ms", "{:.1f}"),
    "first token ms": ("first_token_ms", "{:.1f}"),
}


def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta"
    )


async def stream(engine: AsyncLLMEngine, name: str, num_tokens: int) -> int:
    """Read one stream to its end; its tokens."""
    read = 0
    async for output in engine.generate(PROMPT + name, params_of(num_tokens), name):
        read += len(output.outputs[0].token_ids)
    return read


async def measure_streams(
    engine: AsyncLLMEngine, num_streams: int, num_tokens: int
) -> dict[str, float]:
    began, worked = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(stream(engine, str(i), num_tokens) for i in range(num_streams)))
    seconds, busy = time.perf_counter() - began, time.process_time() - worked
    assert counts == [num_tokens] * num_streams
    return {
        "tokens_per_second": sum(counts) / seconds,
        "front_end_us": 1e6 * busy / sum(counts),
    }


async def measure_long_prompt(engine: AsyncLLMEngine) -> dict[str, float]:
    """It is refused in the end: what is measured is what others notice of it."""

    async def ask() -> None:
        try:
            async for _ in engine.generate(LONG_PROMPT, params_of(1), "long"):
                return
        except RequestError:
            pass

    async def first_token() -> float:
        await stream(engine, "short", 1)
        return time.perf_counter() - began

    began = time.perf_counter()
    long = asyncio.create_task(ask())
    short = asyncio.create_task(first_token())
    longest, last = 0.0, began
    while not (long.done() and short.done()):
        await asyncio.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await long
    return {"hold_up_ms": 1e3 * longest, "first_token_ms": 1e3 * await short}


async def measure(pool: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians with a pool of this size."""
    args = EngineArgs(
        model=str(BOX_MODEL),
        multiprocess=True,
        tokenizer_pool_size=pool,
        max_num_seqs=options.streams,
        max_model_len=512,
        num_kv_blocks=32 * options.streams + 1,
        num_threads=1,
        disable_log_stats=True,
        log_level="warning",
    )
    engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, args)
    try:
        await measure_streams(engine, options.streams, 8)  # warm
        runs = []
        for _ in range(options.repeats):
            run = await measure_streams(engine, options.streams, options.tokens)
            runs.append(run | await measure_long_prompt(engine))
    finally:
        engine.shutdown()
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def table_of(results: dict[int, dict[str, float]], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.streams} streams of {options.tokens} tokens")
    for heading in ("pool", *UNITS):
        table.add_column(heading, justify="right")
    for pool, figures in results.items():
        cells = [layout.format(figures[name]) for name, layout in UNITS.values()]
        table.add_row(str(pool), *cells)
    return table


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pools", type=sizes, default=[0, 1, 2], metavar="N,N")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    results = {pool: asyncio.run(measure(pool, options)) for pool in options.pools}
    Console().print(table_of(results, options))
    if options.output is not None:
        document = {"machine": machine.describe(), "pools": results}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
