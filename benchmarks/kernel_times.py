"""Each operation of a decode or prefill step on the CPU, and what they add up to.

    python benchmarks/kernel_times.py [--model mid] [--threads 2] [--repeats 30] [--json FILE]

Operations are timed in turn, over and over, on weights and caches of all layers, so that nothing
stays in a cache that would not in a real step; the least and the median of the repeats are shown.
On a busy machine trust the least, and on a very busy one only `--threads 1`, where the clock is
the thread's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

import kernels
from engine.layers.linear import Linear, make_linear
from kernels.cpu.threads import set_threads

BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """What of a decoder's configuration decides its time."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int


SHAPES = {
    "tiny": Shape(4, 128, 4, 2, 32, 384, 8192),
    "mid": Shape(12, 768, 12, 4, 64, 2560, 32000),
    "qwen06": Shape(28, 1024, 16, 8, 128, 3072, 151936),
}
# Query tokens and context of each sequence.
STEPS = {
    "decode, 1 sequence": [(1, 200)],
    "decode, 32 sequences": [(1, 280)] * 32,
    "decode, 256 sequences": [(1, 96)] * 256,
    "prefill, 256 tokens": [(256, 0)],
}


@dataclass
class Timing:
    """Milliseconds of one operation over all layers."""

    step: str
    operation: str
    calls: int
    least_ms: float
    median_ms: float


class Model:
    """Random weights of one shape, linear layers as the engine makes them."""

    def __init__(self, shape: Shape, quantization: str | None) -> None:
        self.shape = shape
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = {
            "qkv": (qkv, shape.hidden),
            "out": (shape.hidden, shape.heads * shape.head_dim),
            "gate_up": (2 * shape.ff, shape.hidden),
            "down": (shape.hidden, shape.ff),
        }
        self.layers: dict[str, list[Linear]] = {
            name: [self._linear(size, quantization) for _ in range(shape.layers)]
            for name, size in sizes.items()
        }
        self.layers["head"] = [self._linear((shape.vocab, shape.hidden), quantization)]
        self.norm = torch.ones(shape.hidden)
        self.table = torch.randn(4096, shape.head_dim)

    @staticmethod
    def _linear(size: tuple[int, int], quantization: str | None) -> Linear:
        return make_linear(torch.randn(size) * 0.02, quantization=quantization)


class Step:
    """One step's tokens, their places in a scattered cache, and the operations on them."""

    def __init__(self, model: Model, sequences: list[tuple[int, int]]) -> None:
        self.model, self.sequences = model, sequences
        shape = model.shape
        lens = [new + context for new, context in sequences]
        width = max(-(-length // BLOCK) for length in lens)
        blocks = torch.randperm(len(lens) * width, dtype=torch.int32) + 1
        self.num = sum(new for new, _ in sequences)
        tables = blocks.view(len(lens), width)
        positions = torch.cat([torch.arange(c, c + n) for n, c in sequences])
        owner = torch.repeat_interleave(torch.tensor([n for n, _ in sequences]))
        slots = tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        self.kv = [
            torch.zeros(len(blocks) + 1, 2, shape.kv_heads, BLOCK, shape.head_dim)
            for _ in range(shape.layers)
        ]
        counts = [new for new, _ in sequences]
        self.fields = (
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            tables,
            positions,
            slots,
            BLOCK,
            sum(n == 1 for n in counts),
            max(counts),
            max(lens),
        )
        self.meta = kernels.AttentionMeta(*self.fields)

    def operations(self) -> dict[str, list[Callable[[], object]]]:
        """Name -> one call a layer."""
        shape, model = self.model.shape, self.model
        heads = {
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
        }
        hidden = torch.randn(self.num, shape.hidden)
        q = torch.randn(self.num, shape.heads, shape.head_dim)
        qkv = torch.randn(self.num, model.layers["qkv"][0].out_features)
        gate_up = torch.randn(self.num, 2 * shape.ff)
        attended = torch.randn(self.num, shape.heads * shape.head_dim)
        inputs = {
            "qkv": hidden,
            "out": attended,
            "gate_up": hidden,
            "down": torch.randn(self.num, shape.ff),
            "head": hidden[: len(self.sequences)],
        }
        calls: dict[str, list[Callable[[], object]]] = {
            f"linear {name}": [lambda f=f, x=inputs[name]: f(x) for f in layers]
            for name, layers in model.layers.items()
        }
        calls["qkv_rope_write"] = [
            lambda kv=kv: kernels.qkv_rope_write(qkv, kv, self.meta, cos_sin=model.table, **heads)
            for kv in self.kv
        ]
        calls["paged_attention"] = [
            lambda kv=kv: kernels.paged_attention(q, kv, self.meta, scale=0.1) for kv in self.kv
        ]
        calls["add_rms_norm"] = [lambda: kernels.add_rms_norm(hidden, hidden, model.norm, 1e-6)] * (
            2 * shape.layers
        )
        calls["act_mul"] = [lambda: kernels.act_mul(gate_up, "silu")] * shape.layers
        return calls


def measure(name: str, step: Step, repeats: int, clock: Callable[[], float]) -> list[Timing]:
    operations = step.operations()
    seconds: dict[str, list[float]] = {operation: [] for operation in operations}
    for _ in range(repeats + 1):
        # A new step works out anew what its layers share.
        step.meta = kernels.AttentionMeta(*step.fields)
        for operation, calls in operations.items():
            start = clock()
            for call in calls:
                call()
            seconds[operation].append(clock() - start)
    return [
        Timing(
            name,
            operation,
            len(calls),
            1e3 * min(seconds[operation][1:]),
            1e3 * statistics.median(seconds[operation][1:]),
        )
        for operation, calls in operations.items()
    ]


def show(timings: list[Timing], title: str) -> None:
    table = Table(title=title)
    for column in ("step", "operation", "calls", "least ms", "median ms"):
        table.add_column(column, justify="left" if column in ("step", "operation") else "right")
    for step in dict.fromkeys(timing.step for timing in timings):
        rows = [timing for timing in timings if timing.step == step]
        for row in rows:
            figures = (f"{row.least_ms:.3f}", f"{row.median_ms:.3f}")
            table.add_row(step, row.operation, str(row.calls), *figures)
        least, median = (sum(getattr(r, f) for r in rows) for f in ("least_ms", "median_ms"))
        table.add_row(step, "[bold]all", "", f"[bold]{least:.3f}", f"[bold]{median:.3f}")
        table.add_section()
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="mid")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json")
    args = parser.parse_args()
    threads = set_threads(args.threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    timings: list[Timing] = []
    with torch.inference_mode():
        model = Model(SHAPES[args.model], args.quantization)
        for name in args.steps:
            timings += measure(name, Step(model, STEPS[name]), args.repeats, clock)
    show(timings, f"{args.model}, {args.quantization or 'float32'}, {threads} threads")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(timing) for timing in timings], file, indent=1)


if __name__ == "__main__":
    main()
