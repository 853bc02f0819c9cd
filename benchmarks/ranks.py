"""Measures tensor or pipeline parallel next to one worker with as many threads.

    python benchmarks/ranks.py MODEL_DIR [--ranks 2 | --stages 2 [--split 7 5]] [--rounds 6]
                               [--workloads D32,P2000] [--dtype float32] [--json FILE]

All engines have a process for their core, and take turns; those that rest sleep. Workloads are
those of `workloads.py`. Printed for each: milliseconds of a turn, a step or a prompt of both, and
the speed of the ranks as a ratio to one worker's, with a 95 % interval.

With --stages N, each stage has one thread, and a decode workload also has a floor. N stages share
the decodes of n requests as N micro-batches of n / N. In the time in which each request gets one
token, every stage computes all N micro-batches, so the weights are read N times, where one worker
reads them once. The floor is the time in which one worker with as many threads computes the
micro-batches one after the other: for D32 with two stages, twice the time of a step of D16.

If each thread had the memory's bandwidth to itself, the same would take the time in which one
worker with one thread computes a step of n / N rows, which is printed as "one thread". Stages
cannot reach that where processors share the bandwidth. By default stages have the same bytes, but a
decode reads the whole output layer and one row of the embedding, while a prompt computes one row of
the output layer: --split sets the layers of each stage. For a prompt of c chunks, N equal stages
take (c + N - 1) / (c N) of one thread's time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import workloads
from figures import keep, print_table
from pairs import Pair, interval, ratio_of_sums

from engine import EngineArgs, LLMEngine, SamplingParams


def engine(
    args: argparse.Namespace, *, ranks: int = 1, stages: int = 1, num_threads: int = 0
) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=args.model,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            log_level="error",
            multiprocess=True,
            num_threads=num_threads or args.stages or args.ranks,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            pipeline_layer_split=args.split if stages > 1 else None,
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


def micro_batch_of(name: str, num_stages: int) -> str | None:
    """The workload of one micro-batch of a decode workload, ``None`` for other workloads."""
    size = name[1:]
    if not (num_stages and name.startswith("D") and int(size) % num_stages == 0):
        return None
    return f"D{int(size) // num_stages}"


def compared(pairs: list[Pair]) -> dict[str, Any]:
    return {
        "one_ms": 1e3 * statistics.median(x for pair in pairs for x in pair.other),
        "ranks_ms": 1e3 * statistics.median(x for pair in pairs for x in pair.ours),
        "ratio": ratio_of_sums(pairs),
        "interval": interval(pairs, ratio_of_sums),
    }


def measure(engines: dict[str, LLMEngine], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the engines on a workload, and stages with their floors under the names of both."""
    part = micro_batch_of(name, args.stages)
    loads = [("one", name), ("ranks", name)]
    loads += [("one", part), ("thread", part)] if part is not None else []
    pairs: dict[str, list[Pair]] = {}
    for turn in range(args.rounds + 1):
        times = {}
        for side, load in loads[:: -1 if turn % 2 else 1]:  # so that drifts affect all alike
            times[side, load] = steps_of(engines[side], workloads.make(load, turn))
        if not turn:
            continue  # it compiles
        ours = times["ranks", name]
        pairs.setdefault(name, []).append(Pair(times["one", name], ours))
        if part is not None:
            in_turn = times["one", part] * args.stages  # each micro-batch takes these steps
            pairs.setdefault(f"{name} / floor", []).append(Pair(in_turn, ours))
            pairs.setdefault(f"{name} / one thread", []).append(Pair(times["thread", part], ours))
    return {each: compared(found) for each, found in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=0)
    parser.add_argument("--split", type=int, nargs="+")
    parser.add_argument("--workloads", default="D32,P2000")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    what = f"{args.stages} stages" if args.stages else f"{args.ranks} ranks"
    with ExitStack() as stack:
        engines = {"one": stack.enter_context(engine(args))}
        if args.stages:
            engines["ranks"] = stack.enter_context(engine(args, stages=args.stages))
            engines["thread"] = stack.enter_context(engine(args, num_threads=1))
        else:
            engines["ranks"] = stack.enter_context(engine(args, ranks=args.ranks))
        for name in args.workloads.split(","):
            found |= measure(engines, name, args)
    head = ["", "one worker, ms", f"{what}, ms", "ratio", "95 %"]
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
    kind = "pipeline" if args.stages else "tensor"
    print_table(f"{kind} parallel next to one worker: medians of steps", head, rows)
    keep(
        args.json,
        model=Path(args.model).name,
        ranks=args.ranks,
        stages=args.stages,
        workloads=found,
    )


if __name__ == "__main__":
    main()
