"""Measures long prompts among short ones: one prefill core and one decode core, next to one core
with all threads, and to two equal cores.

    python benchmarks/prefill_apart.py MODEL_DIR [--threads 2] [--streams 8] [--every 2.5]
                                       [--seconds 20] [--rounds 3] [--json FILE]

``--streams`` requests of 64 tokens decode at any time, 64 tokens each; every ``--every`` seconds
comes a prompt of 2,000 to 4,000 tokens, which decodes 16. Printed for each kind: milliseconds
between two outputs of a short request (median, p99), the same and seconds to the first token for
long ones, tokens per second (prompts and outputs); then the ratios to one core, of each round the
median. Each figure is from processes of their own; kinds alternate within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import machine
from measure import quantile

from engine import EngineArgs, LLMEngine, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "one core": {},
    "two cores": {"data_parallel_size": 2},
    "prefill apart": {"prefill_cores": 1, "decode_cores": 1},
}
SHORT, SHORT_OUT, LONG, LONG_OUT = 64, 64, (2000, 4000), 16
WARM_SECONDS = 4.0
FIGURES = ("gap_p50_ms", "gap_p99_ms", "long_ttft_s", "tokens_per_s", "short_out_per_s", "num_long")
RATIOS = ("gap_p99_ms", "long_ttft_s", "tokens_per_s", "short_out_per_s")


@dataclass
class Stream:
    """A request in progress. ``times``: of its outputs."""

    num_prompt: int
    added: float
    times: list[float] = field(default_factory=list)


class Load:
    """Keeps short requests in progress, and adds a long one every few seconds."""

    def __init__(self, engine: LLMEngine, num_streams: int, every: float, seed: int) -> None:
        self._engine = engine
        self._num_streams = num_streams
        self._every = every
        self._rng = random.Random(seed)
        self._open: dict[str, Stream] = {}
        self._num_added = 0
        self.done: list[Stream] = []

    def run(self, seconds: float) -> None:
        """Run for this long, or with 0 until all requests have ended."""
        began, next_long = time.perf_counter(), 0.0
        while (elapsed := time.perf_counter() - began) < seconds or (not seconds and self._open):
            num_short = sum(each.num_prompt == SHORT for each in self._open.values())
            for _ in range(self._num_streams - num_short if seconds else 0):
                self._add(SHORT, SHORT_OUT)
            if seconds and self._every and elapsed >= next_long:
                self._add(self._rng.randint(*LONG), LONG_OUT)
                next_long += self._every
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                stream = self._open[output.request_id]
                stream.times.append(now)
                if output.finished:
                    self.done.append(self._open.pop(output.request_id))

    def figures(self, began: float, ended: float) -> dict[str, float]:
        """Figures of what was put out between these times."""
        streams = [*self.done, *self._open.values()]
        short = [each for each in streams if each.num_prompt == SHORT]
        long = [each for each in streams if each.num_prompt != SHORT and each.times]
        gaps = [
            1e3 * (later - earlier)
            for each in short
            for earlier, later in zip(each.times, each.times[1:], strict=False)
            if began <= later <= ended
        ]
        firsts = [each.times[0] - each.added for each in long if began <= each.times[0] <= ended]
        num_out = sum(began <= each <= ended for stream in short for each in stream.times)
        prompts = [each for each in streams if each.times and began <= each.times[0] <= ended]
        num_in = sum(each.num_prompt for each in prompts)
        seconds = ended - began
        return {
            "gap_p50_ms": quantile(gaps, 0.5),
            "gap_p99_ms": quantile(gaps, 0.99),
            "long_ttft_s": statistics.median(firsts) if firsts else float("nan"),
            "tokens_per_s": (num_in + num_out) / seconds,
            "short_out_per_s": num_out / seconds,
            "num_long": len(firsts),
        }

    def _add(self, num_prompt: int, num_new: int) -> None:
        prompt = self._rng.choices(range(100, 2000), k=num_prompt)
        params = SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        name = str(self._num_added)
        self._num_added += 1
        self._open[name] = Stream(num_prompt, time.perf_counter())
        self._engine.add_request(name, prompt, params)


def measure(kind: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run of one kind, in this process and its cores."""
    engine_args = EngineArgs(
        model=args.model,
        skip_tokenizer_init=True,
        log_level="error",
        multiprocess=True,
        num_threads=args.threads,
        max_model_len=LONG[1] + 64,
        num_kv_blocks=4000,
        **KINDS[kind],
    )
    with LLMEngine.from_engine_args(engine_args) as engine:
        load = Load(engine, args.streams, args.every, seed)
        load.run(WARM_SECONDS)
        began = time.perf_counter()
        load.run(args.seconds)
        found = load.figures(began, time.perf_counter())
        stats = engine.stats()
        counters = {} if stats is None else stats.counters
        names = ("prefill apart.", "kv load.blocks", "kv load.awaited")
        return found | {name: n for name, n in counters.items() if name.startswith(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--every", type=float, default=2.5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--one", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args, args.seed)))
        return
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for nth in range(args.rounds):
        order = list(KINDS)[nth % len(KINDS) :] + list(KINDS)[: nth % len(KINDS)]
        for kind in order:
            command = [sys.executable, __file__, args.model, "--one", kind, "--seed", str(nth)]
            for name in ("threads", "streams", "every", "seconds"):
                command += [f"--{name}", str(getattr(args, name))]
            busy = os.getloadavg()[0]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[kind].append(json.loads(done.stdout.splitlines()[-1]) | {"load_before": busy})
            print(kind, runs[kind][-1], flush=True)
    medians = {
        kind: {name: statistics.median(run[name] for run in found) for name in FIGURES}
        for kind, found in runs.items()
    }
    ratios = {
        kind: {
            name: statistics.median(
                run[name] / first[name]
                for run, first in zip(runs[kind], runs["one core"], strict=True)
            )
            for name in RATIOS
        }
        for kind in KINDS
    }
    for title, table in (("medians", medians), ("ratios to one core", ratios)):
        print(f"\n{title}")
        for kind, row in table.items():
            print(f"{kind:14}", "  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    if args.json:
        settings = {
            name: getattr(args, name) for name in ("threads", "streams", "every", "seconds")
        }
        about = {"machine": machine.describe(), **settings}
        found = {"about": about, "medians": medians, "ratios": ratios, "runs": runs}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
