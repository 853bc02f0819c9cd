"""Measures what this machine's memory and arithmetic allow a model: the floor of each phase.

    python benchmarks/roofline.py [MODEL_DIR] [--dtype bfloat16] [--threads 2]
                                  [--batch 32] [--context 288] [--prompt 256] [--json FILE]

The ceilings are found in the same run: bytes read a second from memory, by one thread and by all,
and operations a second of large products, float32 and bfloat16 (`engine/worker/roofline.py`). The
floor of a phase is the larger of its bytes / bandwidth and its operations / peak; what counts is
described in `engine/models/work.py`. Where a CPU is slower in bfloat16 than in float32, products in
float32 of widened weights are what arithmetic allows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import machine
import numpy as np
import workloads
from figures import keep, print_table

from engine.config.model import read_model_info
from engine.models.load import native_spec
from engine.models.quant import format_of
from engine.models.work import ModelWork, Shapes
from engine.worker.roofline import Ceilings, measured

CELL = {"float32": 4, "bfloat16": 2, "float16": 2}
Chunk = tuple[int, int]
"""New tokens of a sequence, and those before them that are in the cache."""


class Model(Shapes):
    """Bytes and operations of steps, from the shapes of a native family's decoder."""

    @classmethod
    def of(cls, directory: str | Path) -> Model:
        """Raises ``ValueError`` for what is not a native family, and for quantised weights."""
        info = read_model_info(directory)
        if (form := format_of(info)) is not None:
            raise ValueError(f"{info.path} has weights quantized by {form.name!r}")
        spec = native_spec(info)
        if spec is None:
            raise ValueError(f"{info.architecture or info.model_type} is not a native family")
        return cls(spec)

    def step(self, chunks: Sequence[Chunk], dtype: str, shared: int = 0) -> ModelWork:
        """One forward pass, after which a token is drawn for each sequence."""
        new, context = np.array(chunks, dtype=np.int64).T
        cells = CELL[dtype], CELL[dtype]
        return self.work(new, context, cells, num_logits=len(chunks), shared=shared)

    def decode(self, batch: int, context: int, dtype: str) -> ModelWork:
        """A step of `batch` sequences, each with `context` tokens before the new one."""
        return self.step([(1, context)] * batch, dtype)


@dataclass(frozen=True)
class Phases:
    """Floors of a workload, seconds. All requests come at once, so that they run together."""

    first: float
    """Until the token of the median request, prompts one after the other."""
    last: float
    """Until every request has its first token."""
    step: float
    """A decode step with all requests running, half of the output made."""
    whole: float
    """All requests together."""
    num_requests: int
    num_prompt: int
    num_output: int
    """Tokens of all requests together."""

    def of(self, metric: str) -> float | None:
        """The floor of one of the benchmarks' metrics, or the ceiling if it is a rate."""
        return {
            "output_tok_s": self.num_output / self.whole,
            "steady_tok_s": self.num_requests / self.step,
            "prompt_tok_s": self.num_prompt / self.last,
            "ttft_ms_p50": 1e3 * self.first,
            "ttft_ms_max": 1e3 * self.last,
            "itl_ms_p50": 1e3 * self.step,
        }.get(metric)


def phases(model: Model, ceilings: Ceilings, dtype: str, name: str) -> Phases | None:
    """Floors of a workload by name; none of W4, in which arrivals decide.

    What requests share is computed once, and its keys and values are read once a step.
    """
    if name == "W4":
        return None
    arrivals = workloads.make(name)
    shared, num_output = workloads.num_shared(arrivals), arrivals[0].num_output
    lengths = [len(arrival.prompt) for arrival in arrivals]
    chunks = [(lengths[0], 0), *((length - shared, shared) for length in lengths[1:])]

    def prompts(num: int) -> float:
        return ceilings.floor(model.step(chunks[:num], dtype, shared), dtype)

    def decode(made: int) -> float:
        step = [(1, length + made) for length in lengths]
        return ceilings.floor(model.step(step, dtype, shared), dtype)

    return Phases(
        prompts(len(chunks) // 2 + 1),
        prompts(len(chunks)),
        decode(num_output // 2),
        prompts(len(chunks)) + sum(decode(made) for made in range(num_output - 1)),
        len(arrivals),
        sum(lengths),
        len(arrivals) * num_output,
    )


def both(threads: int) -> tuple[Ceilings, Ceilings]:
    """Ceilings with one thread and with all."""
    return measured(1), measured(threads)


def show(all_ceilings: Sequence[Ceilings]) -> None:
    rows = [
        [str(each.threads)]
        + [f"{rate / 1e9:.4g}" for rate in (each.bytes, each.float32, each.bfloat16)]
        for each in all_ceilings
    ]
    head = ("threads", "GB/s read", "float32 GFLOP/s", "bfloat16 GFLOP/s")
    print_table(machine.describe()["cpu"], head, rows)


def show_floors(model: Model, ceilings: Ceilings, args: argparse.Namespace) -> None:
    works = {
        f"decode, {args.batch} at {args.context}": (
            model.decode(args.batch, args.context, args.dtype),
            args.batch,
        ),
        f"prompts, {args.batch} of {args.prompt}": (
            model.step([(args.prompt, 0)] * args.batch, args.dtype),
            args.batch * args.prompt,
        ),
    }
    if num_bytes := model.state_bytes(CELL[args.dtype]):
        advanced = ModelWork(2 * args.batch * num_bytes, args.batch * model.state_operations())
        works[f"states of {args.batch} decodes"] = (advanced, args.batch)
        works["copy of a snapshot"] = (ModelWork(2 * num_bytes, 0.0), 1)
    rows = []
    for name, (work, num_tokens) in works.items():
        floor = ceilings.floor(work, args.dtype)
        figures = (
            work.bytes / 1e9,
            work.operations / 1e9,
            1e3 * work.bytes / ceilings.bytes,
            1e3 * work.operations / ceilings.peak(args.dtype),
            1e3 * floor,
            num_tokens / floor,
        )
        rows.append([name, *(f"{figure:.4g}" for figure in figures)])
    head = ("phase", "GB", "GFLOP", "bytes ms", "operations ms", "floor ms", "tokens/s")
    print_table(f"{args.model.name}, {args.dtype}, {ceilings.threads} threads", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="model directory")
    parser.add_argument("--dtype", choices=CELL, default="bfloat16", help="that is computed in")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=288)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--json", type=Path, help="keep the ceilings here")
    args = parser.parse_args()
    found = both(args.threads)
    show(found)
    if args.model:
        show_floors(Model.of(args.model), found[-1], args)
    keep(args.json, ceilings=list(map(asdict, found)))


if __name__ == "__main__":
    main()
