"""Measures the cost of structured outputs: throughput, first token, and other requests.

    python benchmarks/structured.py MODEL_DIR [--num 32] [--tokens 96] [--rounds 5] [--bombs]
                                    [--multiprocess] [--json FILE]

One engine runs loads of --num requests of --tokens tokens in turn: none with a schema, all with
one, and half with one, where the time between tokens of the other half is compared with the first
load. Then the first token of single requests is timed: without a grammar, with a new schema, and
with the first schema of the process, for which the tokenizer is prepared. With --bombs, instead,
requests without a grammar run next to the forty harmful or broken grammars of the tests, one every
few steps, and next to as many requests without a grammar. Figures are medians over the rounds, with
95 % intervals of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
from figures import keep, print_table
from measure import median_interval, quantile
from schemas_for_peers import long_schema, simple_schema

from engine import EngineArgs, LLMEngine, RequestError, SamplingParams, StructuredOutputsParams

sys.path.append(str(Path(__file__).resolve().parents[1]))

PROMPT = list(range(20, 84))


def params(num_tokens: int, seed: int, schema: dict[str, Any] | None) -> SamplingParams:
    if schema is None:
        return SamplingParams(
            temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
    form = StructuredOutputsParams(json=schema)
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=num_tokens, detokenize=False, structured_outputs=form
    )


class Load(NamedTuple):
    """The figures of one load."""

    tokens_per_second: float
    gaps: list[float]
    """Seconds between tokens of the requests that had no grammar."""


def run(engine: LLMEngine, num_tokens: int, schemas: list[dict[str, Any] | None]) -> Load:
    for index, schema in enumerate(schemas):
        prompt = {"prompt_token_ids": PROMPT}
        engine.add_request(str(index), prompt, params(num_tokens, index, schema))
    began, total = time.perf_counter(), 0
    last: dict[str, float] = {}
    gaps: list[float] = []
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            total += int(output.finished) and len(output.outputs[0].token_ids)
            if schemas[int(output.request_id)] is None:
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
    return Load(total / (time.perf_counter() - began), gaps)


def first_token(engine: LLMEngine, schema: dict[str, Any] | None) -> float:
    """Seconds to the first token of a single request."""
    began = time.perf_counter()
    engine.add_request("alone", {"prompt_token_ids": PROMPT}, params(1, 0, schema))
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - began


def measure(engine: LLMEngine, num: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    first_token(engine, None)
    cold = first_token(engine, simple_schema(0)) - first_token(engine, None)
    half = num // 2
    loads = {
        "without": [None] * num,
        "with": [long_schema()] * num,
        "half": [long_schema(), None] * half,
    }
    ratios: dict[str, list[float]] = {"throughput": [], "neighbours_p99": [], "neighbours_p50": []}
    delays, rates = [], []
    run(engine, 8, loads["half"])
    for turn in range(rounds):
        names = list(loads) if turn % 2 == 0 else list(loads)[::-1]
        found = {name: run(engine, num_tokens, loads[name]) for name in names}
        rates.append({name: load.tokens_per_second for name, load in found.items()})
        ratios["throughput"].append(rates[-1]["with"] / rates[-1]["without"])
        for share, name in ((0.99, "neighbours_p99"), (0.5, "neighbours_p50")):
            together, alone = (quantile(found[kind].gaps, share) for kind in ("half", "without"))
            ratios[name].append(together / alone)
        alone = min(first_token(engine, None) for _ in range(3))
        schemas = [simple_schema(3 * turn + n + 1) for n in range(3)]
        delays.append(statistics.median(first_token(engine, s) for s in schemas) - alone)
    return {
        "tokens_per_second": {
            name: statistics.median(rate[name] for rate in rates) for name in loads
        },
        "ratios": {
            name: {"median": statistics.median(values), "interval": median_interval(values)}
            for name, values in ratios.items()
        },
        "delay_of_a_new_schema_ms": 1e3 * statistics.median(delays),
        "delay_of_the_first_schema_ms": 1e3 * cold,
    }


def run_with(engine: LLMEngine, num: int, num_tokens: int, bombs: list[Any]) -> list[float]:
    """Seconds between tokens of requests without a grammar, while a bomb joins every few steps."""
    for index in range(num):
        engine.add_request(
            str(index), {"prompt_token_ids": PROMPT}, params(num_tokens, index, None)
        )
    every = max(1, num_tokens // (len(bombs) + 1))
    last: dict[str, float] = {}
    gaps: list[float] = []
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        if bombs and step % every == 0 and step // every <= len(bombs):
            submit_bomb(engine, f"bomb {step}", bombs[step // every - 1])
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            if output.request_id.startswith("bomb"):
                continue
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
    return gaps


def submit_bomb(engine: LLMEngine, name: str, fields: dict[str, Any] | None) -> None:
    """Add a request with a harmful grammar, or without a grammar for ``None``."""
    try:
        form = None if fields is None else StructuredOutputsParams(**fields)
        own = SamplingParams(
            temperature=1.0, seed=1, max_tokens=24, detokenize=False, structured_outputs=form
        )
        engine.add_request(name, {"prompt_token_ids": PROMPT}, own)
    except RequestError:
        pass  # refused before it joins


def measure_bombs(engine: LLMEngine, num: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    from tests.structured.bombs import BOMBS

    run_with(engine, num, 8, [])
    first_token(engine, simple_schema(0))
    found: dict[str, list[float]] = {"p50": [], "p99": [], "most": []}
    for turn in range(rounds):
        loads = {"alone": [None] * len(BOMBS), "together": list(BOMBS.values())}
        names = list(loads) if turn % 2 == 0 else list(loads)[::-1]
        gaps = {name: run_with(engine, num, num_tokens, loads[name]) for name in names}
        for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "most")):
            together, alone = (quantile(gaps[kind], share) for kind in ("together", "alone"))
            found[name].append(together / alone)
    return {
        name: {"median": statistics.median(values), "interval": median_interval(values)}
        for name, values in found.items()
    }


def ratio_row(name: str, ratio: dict[str, Any]) -> tuple[str, str]:
    """A line of the table: a ratio with its interval."""
    low, high = ratio["interval"]
    return name, f"{ratio['median']:.3f} [{low:.3f}, {high:.3f}]"


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the table of ``measure``."""
    ratios = found["ratios"].items()
    return [
        *(
            (f"tokens/s, schema: {name}", f"{r:.1f}")
            for name, r in found["tokens_per_second"].items()
        ),
        *(ratio_row(f"{name}, with to without", ratio) for name, ratio in ratios),
        ("first token later by, a new schema, ms", f"{found['delay_of_a_new_schema_ms']:.1f}"),
        (
            "the same, the first schema of a process, ms",
            f"{found['delay_of_the_first_schema_ms']:.0f}",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory with a tokenizer")
    parser.add_argument("--num", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bombs", action="store_true", help="neighbours of harmful grammars")
    parser.add_argument("--multiprocess", action="store_true", help="the core in its own process")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    engine_args = EngineArgs(
        model=args.model,
        log_level="error",
        max_model_len=1024,
        max_num_seqs=args.num,
        multiprocess=args.multiprocess,
    )
    with LLMEngine.from_engine_args(engine_args) as engine:
        how = measure_bombs if args.bombs else measure
        found = how(engine, args.num, args.tokens, args.rounds)
    keep(args.json, **found)
    if args.bombs:
        words = "between tokens, {}, next to harmful or harmless ones"
        rows = [ratio_row(words.format(name), ratio) for name, ratio in found.items()]
    else:
        rows = rows_of(found)
    print_table(f"{Path(args.model).name}, {machine.describe()['cpu']}", ("", ""), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
