"""Each operation of a step on the CPU next to its floor: what memory or arithmetic allows.

    python benchmarks/cpu_kernels.py [--threads 2] [--only linears,decode,...] [--json FILE]

The ceilings are measured in the same run: bytes a second of a copy or a sum of 256 MiB, and float32
operations a second of a large product, by torch or by ours, whichever is faster; four 8-bit
products count as one. Operations run on enough weights and caches that nothing stays in a cache
that would not in a real step; activations do stay, so what only passes over them may beat its
floor. The least of the repeats is shown, and the median. On a busy machine trust the least, and on
a very busy one only `--threads 1`, where the clock is the thread's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import machine
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Shape, Step, model_directory

import kernels
from engine.config.model import ModelConfig, read_model_info
from engine.layers.batch import ForwardBatch
from engine.layers.linear import make_linear
from engine.models.load import load_model
from kernels.cpu.sampling import choose_tokens
from kernels.cpu.threads import num_threads, set_threads

RESULTS = Path(__file__).parent / "results"
BLOCK = 16
KEPT = {"fp32": torch.float32, "bf16": torch.bfloat16}
DECODES = {"32 x 280": [(1, 279)] * 32, "32 x 1k": [(1, 1023)] * 32, "8 x 4k": [(1, 4095)] * 8}
CHUNKS = {"512": [(512, 0)], "512 after 2k": [(512, 2048)]}
Call = Callable[[], object]
Sequences = dict[str, list[tuple[int, int]]]
"""By label, new tokens and those before them of each sequence in a step."""


@dataclass(frozen=True)
class Sizes:
    """How much is gone through; less of it only shows that everything runs."""

    out_of_cache: int = 256 << 20
    """Bytes gone through before any is read again."""
    copied: int = 256 << 20
    decodes: Sequences = field(default_factory=lambda: DECODES)
    chunks: Sequences = field(default_factory=lambda: CHUNKS)

    def copies(self, num_bytes: float, most: int = 64) -> int:
        """Copies of operands of this size, so that none is read again from a cache."""
        return max(1, min(most, int(self.out_of_cache // num_bytes)))


class Work(NamedTuple):
    """Calls of one operation, each on memory of its own, and what each must do at least."""

    group: str
    name: str
    calls: Sequence[Call]
    num_bytes: float
    num_operations: float = 0.0


class Ceilings(NamedTuple):
    """What this machine does in a second."""

    bytes: float
    operations: float

    def floor(self, work: Work) -> float:
        """Seconds that a call takes at least."""
        return max(work.num_bytes / self.bytes, work.num_operations / self.operations)


@dataclass
class Timing:
    """Microseconds of a call."""

    group: str
    name: str
    least_us: float
    median_us: float
    floor_us: float
    gbps: float
    gflops: float


class Clock:
    """Repeats calls until there are enough times, for at least `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = time.thread_time if num_threads() == 1 else time.perf_counter

    def times(self, calls: Sequence[Call]) -> list[float]:
        """Seconds a call, of each round through all of them after the first."""
        found: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(found) < 4 or time.perf_counter() < end:
            start = self.now()
            for call in calls:
                call()
            found.append((self.now() - start) / len(calls))
        return found[1:]


def ceilings(clock: Clock, copied: int) -> Ceilings:
    source = torch.ones(copied // 4)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / min(clock.times([lambda: target.copy_(source)]))
    read = source.nbytes / min(clock.times([lambda: source.sum()]))
    a, ours = torch.randn(1024, 1024), make_linear(torch.randn(1024, 1024))
    product = min(*clock.times([lambda: a @ a]), *clock.times([lambda: ours(a)]))
    return Ceilings(max(copy, read), 2 * 1024**3 / product)


def linears(shape: Shape, sizes: Sizes) -> Iterator[Work]:
    matrices = {**shape.linears, "head": (shape.vocab, shape.hidden)}
    for kind, cell in (("fp32", 4), ("int8", 1)):
        for name, (out, inner) in matrices.items():
            weights = [
                make_linear(torch.randn(out, inner), quantization=None if cell == 4 else "int8")
                for _ in range(sizes.copies(out * inner * cell))
            ]
            for num in (1, 32) if name == "head" else (1, 32, 256):
                x = torch.randn(num, inner)
                yield Work(
                    f"linear {kind}",
                    f"{name} {out}x{inner}, {num} rows",
                    [lambda f=f, x=x: f(x) for f in weights],
                    out * inner * cell + 4 * num * (out + inner),
                    2 * out * inner * num * cell / 4,
                )


def attention(shape: Shape, group: str, steps: Sequences, sizes: Sizes) -> Iterator[Work]:
    width = shape.kv_heads * shape.head_dim
    for label, sequences in steps.items():
        step = Step(sequences, BLOCK)
        q = torch.randn(step.num_tokens, shape.heads, shape.head_dim)
        for kind, dtype in KEPT.items():
            num_bytes = 2 * width * dtype.itemsize * step.num_keys
            caches = [
                step.cache(shape.kv_heads, shape.head_dim, dtype)
                for _ in range(sizes.copies(num_bytes))
            ]

            def attend(cache, step=step, q=q):
                return kernels.paged_attention(q, cache, step.meta(), scale=0.1)

            yield Work(
                f"{group} {kind}",
                label,
                [lambda cache=cache: attend(cache) for cache in caches],
                num_bytes + 8 * q.numel(),
                4 * step.num_pairs * shape.heads * shape.head_dim,
            )


def writes(shape: Shape, sizes: Sizes) -> Iterator[Work]:
    heads = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    table = torch.randn(4096, shape.head_dim)
    for label, sequences in (
        ("1", [(1, 279)]),
        ("32", sizes.decodes["32 x 280"]),
        ("512", [(512, 0)]),
    ):
        step = Step(sequences, BLOCK)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        qkv = torch.randn(step.num_tokens, width)
        for kind, dtype in KEPT.items():
            caches = [step.cache(shape.kv_heads, shape.head_dim, dtype) for _ in range(4)]

            def write(cache, step=step, qkv=qkv):
                return kernels.qkv_rope_write(qkv, cache, step.meta(), cos_sin=table, **heads)

            kept = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
            each = 4 * (width + shape.heads * shape.head_dim) + kept
            calls = [lambda cache=cache: write(cache) for cache in caches]
            yield Work(f"KV write {kind}", f"{label} tokens", calls, step.num_tokens * each)


def pointwise(shape: Shape, sizes: Sizes) -> Iterator[Work]:
    weight = torch.ones(shape.hidden)
    for num in (1, 32, 512):
        xs = [torch.randn(num, shape.hidden) for _ in range(8)]
        gates = [torch.randn(num, 2 * shape.ff) for _ in range(8)]
        norm = [lambda x=x: kernels.add_rms_norm(x, x, weight, 1e-6) for x in xs]
        act = [lambda x=x: kernels.act_mul(x, "silu") for x in gates]
        yield Work("add + norm", f"{num} rows", norm, 4 * 4 * num * shape.hidden)
        yield Work("activation", f"{num} rows", act, 3 * 4 * num * shape.ff)


def samplers(shape: Shape, sizes: Sizes) -> Iterator[Work]:
    kinds = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top-k 50, top-p 0.9": (1.0, 50, 0.9)}
    for num in (1, 32):
        xs = [
            torch.randn(num, shape.vocab) * 3
            for _ in range(sizes.copies(4 * num * shape.vocab, 16))
        ]
        for name, (temperature, top_k, top_p) in kinds.items():
            columns = (
                np.full(num, temperature),
                np.full(num, top_k, np.int32),
                np.full(num, top_p),
                np.zeros(num),
                np.arange(num, dtype=np.uint64),
                np.zeros(num, np.int32),
            )
            calls = [lambda x=x, columns=columns: choose_tokens(x, *columns) for x in xs]
            yield Work("sampler", f"{name}, {num} rows", calls, 4 * num * shape.vocab)


def decode_steps(shape: Shape, sizes: Sizes) -> Iterator[Work]:
    """Whole forward passes up to the logits, the weights random."""
    with model_directory(shape, 8192) as root:
        config = ModelConfig(model=root, load_format="dummy")
        model = load_model(config, read_model_info(root), device="cpu", max_model_len=8192)
    for label, sequences in {"1 x 200": [(1, 199)], **sizes.decodes}.items():
        step = Step(sequences, BLOCK)
        ids = torch.zeros(step.num_tokens, dtype=torch.int64)
        for kind, dtype in KEPT.items():
            caches = [
                step.cache(shape.kv_heads, shape.head_dim, dtype) for _ in range(shape.layers)
            ]

            def forward(step=step, ids=ids, caches=caches):
                meta = step.meta()
                return model.logits(
                    model.forward(ForwardBatch(ids, meta.positions, meta), caches).last
                )

            kept = step.num_keys * shape.kv_bytes(dtype.itemsize)
            pairs = 4 * step.num_pairs * shape.heads * shape.head_dim * shape.layers
            operations = 2 * shape.num_read * step.num_tokens + pairs
            yield Work(
                f"decode step {kind}", label, [forward], 4 * shape.num_read + kept, operations
            )


GROUPS: dict[str, Callable[[Shape, Sizes], Iterator[Work]]] = {
    "linears": linears,
    "decode": lambda shape, sizes: attention(shape, "decode", sizes.decodes, sizes),
    "prefill": lambda shape, sizes: attention(shape, "prefill", sizes.chunks, sizes),
    "write": writes,
    "pointwise": pointwise,
    "sampler": samplers,
    "steps": decode_steps,
}


def measure(work: Work, clock: Clock, most: Ceilings) -> Timing:
    found = clock.times(work.calls)
    least = min(found)
    return Timing(
        work.group,
        work.name,
        1e6 * least,
        1e6 * statistics.median(found),
        1e6 * most.floor(work),
        work.num_bytes / least / 1e9,
        work.num_operations / least / 1e9,
    )


def show(timings: Sequence[Timing], title: str, most: Ceilings) -> None:
    rates = f"{most.bytes / 1e9:.1f} GB/s, {most.operations / 1e9:.0f} GFLOP/s"
    table = Table(title=f"{title}; ceilings: {rates}")
    for column in ("operation", "", "least us", "median us", "GB/s", "GFLOP/s", "floor us", "%"):
        table.add_column(column, justify="left" if column in ("operation", "") else "right")
    for group in dict.fromkeys(timing.group for timing in timings):
        for row in (timing for timing in timings if timing.group == group):
            figures = [row.least_us, row.median_us, row.gbps, row.gflops, row.floor_us]
            cells = [f"{figure:.4g}" for figure in figures]
            table.add_row(group, row.name, *cells, f"{100 * row.floor_us / row.least_us:.0f}")
        table.add_section()
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="mid")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each operation, at least")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    sizes = sizes or Sizes()
    threads, shape = set_threads(args.threads), SHAPES[args.model]
    clock, timings = Clock(args.seconds), []
    with torch.inference_mode():
        most = ceilings(clock, sizes.copied)
        for name in args.only.split(","):
            timings += [measure(work, clock, most) for work in GROUPS[name](shape, sizes)]
    show(timings, f"{args.model}, {threads} threads", most)
    found = {
        "machine": machine.describe(),
        "model": args.model,
        "threads": threads,
        "ceilings": most._asdict(),
        "timings": [asdict(timing) for timing in timings],
    }
    where = args.json or RESULTS / f"cpu-kernels-{args.model}-{threads}.json"
    where.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
