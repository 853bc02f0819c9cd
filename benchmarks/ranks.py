"""Measures tensor parallel next to one worker with as many threads.

    python benchmarks/ranks.py MODEL_DIR [--ranks 2] [--workloads D32,P2000] [--rounds 6]
                               [--dtype float32] [--json FILE]

Both engines have a process for their core, and take turns; the one that rests sleeps. Workloads are
those of `workloads.py`. Printed for each: milliseconds of a turn, a step or a prompt of both, and
the speed of the ranks as a ratio to one worker's, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workloads
from figures import keep, print_table
from pairs import Pair, in_order, interval, ratio_of_sums

from engine import EngineArgs, LLMEngine, SamplingParams


def engine(args: argparse.Namespace, num_ranks: int) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=args.model,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            log_level="error",
            multiprocess=True,
            num_threads=args.ranks,
            tensor_parallel_size=num_ranks,
            max_model_len=2048,
            num_kv_blocks=2048,
            enable_prefix_caching=False,
        )
    )


def steps_of(engine: LLMEngine, arrivals: Sequence[workloads.Arrival]) -> list[float]:
    """Seconds between the outputs of steps, all requests arriving at once."""
    for number, arrival in enumerate(arrivals):
        params = SamplingParams(
            temperature=0, max_tokens=arrival.num_output, ignore_eos=True, detokenize=False
        )
        prompt = [token % 512 for token in arrival.prompt]  # the smallest model has no other ids
        engine.add_request(str(number), prompt, params)
    times, before = [], time.perf_counter()
    while engine.has_unfinished_requests():
        if engine.step():
            now = time.perf_counter()
            times.append(now - before)
            before = now
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workloads", default="D32,P2000")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with engine(args, 1) as one, engine(args, args.ranks) as ranks:
        for name in args.workloads.split(","):
            pairs = []
            for turn in range(args.rounds + 1):
                arrivals, times = workloads.make(name, turn), {}
                for side, measured in in_order({"one": one, "ranks": ranks}, turn).items():
                    times[side] = steps_of(measured, arrivals)
                if turn:  # the first compiles
                    pairs.append(Pair(times["one"], times["ranks"]))
            found[name] = {
                "one_ms": 1e3 * statistics.median(x for pair in pairs for x in pair.other),
                "ranks_ms": 1e3 * statistics.median(x for pair in pairs for x in pair.ours),
                "ratio": ratio_of_sums(pairs),
                "interval": interval(pairs, ratio_of_sums),
            }
    head = ["", "one worker, ms", f"{args.ranks} ranks, ms", "ratio", "95 %"]
    rows = [
        [
            name,
            f"{each['one_ms']:.2f}",
            f"{each['ranks_ms']:.2f}",
            f"{each['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*each["interval"]),
        ]
        for name, each in found.items()
    ]
    print_table("tensor parallel next to one worker: medians of steps", head, rows)
    keep(args.json, model=Path(args.model).name, ranks=args.ranks, workloads=found)


if __name__ == "__main__":
    main()
