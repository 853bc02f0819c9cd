"""What this machine's memory and arithmetic allow a model: the floor below each phase of its work.

    python benchmarks/roofline.py [MODEL_DIR] [--dtype bfloat16] [--threads 2]
                                  [--batch 32] [--context 288] [--prompt 256] [--json FILE]

The ceilings are found in the same run: bytes read a second from memory, by one thread and by all,
and operations a second of large products, float32 and bfloat16. The floor of a phase is the larger
of its bytes / bandwidth and its operations / peak. What counts as bytes: each weight once a step,
in the type that is computed in; keys and values, read by those that attend to them and written
once; logits. What counts as operations: products at two each. The table of embeddings, of which a
step reads some rows, does not count, and nothing counts that could stay in a cache. Where a CPU is
slower in bfloat16 than in float32, products in float32 of widened weights are what arithmetic
allows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
import workloads
from rich.console import Console
from rich.table import Table

from engine.config.model import read_model_info
from engine.models.load import native_spec
from engine.models.quant import format_of
from engine.models.spec import DecoderSpec
from engine.models.targets import targets

READ_BYTES = 512 << 20
SECONDS = 0.6  # of each probe, at least
PRODUCTS = ((1024, 1024, 1024), (2048, 1024, 4096))  # rows, inputs, outputs
CELL = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_BYTES = 4
Chunk = tuple[int, int]
"""New tokens of a sequence, and those before them that are in the cache."""


class Work(NamedTuple):
    """What must be read or written at least, and computed."""

    bytes: float
    operations: float


@dataclass(frozen=True)
class Ceilings:
    """What a machine does in a second, with so many threads."""

    threads: int
    bytes: float
    float32: float
    """Operations."""
    bfloat16: float

    def peak(self, dtype: str) -> float:
        """Operations a second on weights of this type: they may be widened first."""
        return max(self.float32, self.bfloat16) if dtype == "bfloat16" else self.float32

    def floor(self, work: Work, dtype: str) -> float:
        """Seconds."""
        return max(work.bytes / self.bytes, work.operations / self.peak(dtype))


def least_seconds(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """Of repeats for so long, and three at least; the first is not counted."""
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def measured(threads: int, seconds: float = SECONDS, size: int = READ_BYTES) -> Ceilings:
    """Find the ceilings by torch, with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            source = torch.ones(size // 4)
            half = len(source) // 2
            one, other = source[:half], source[half:]
            reads = (source.sum, lambda: one.dot(other))
            read = min(least_seconds(call, seconds) for call in reads)
            peaks = {name: peak(getattr(torch, name), seconds) for name in ("float32", "bfloat16")}
    finally:
        torch.set_num_threads(before)
    return Ceilings(threads, source.nbytes / read, **peaks)


def peak(dtype: torch.dtype, seconds: float) -> float:
    """Operations a second of the best of some products."""
    best = 0.0
    for rows, inner, out in PRODUCTS:
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(out, inner).to(dtype)
        took = least_seconds(lambda x=x, w=weight: torch.nn.functional.linear(x, w), seconds)
        best = max(best, 2 * rows * inner * out / took)
    return best


class Model:
    """What the shapes of a native family's decoder make of tokens."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        sizes = {target.name: prod(target.shape) for target in targets(spec)}
        self.num_weights = sum(sizes.values())
        """All of them, the table of embeddings included."""
        self._head = sizes["embed" if spec.tied else "head"]
        del sizes["embed"]
        sizes.pop("head", None)
        self._experts = sum(size for name, size in sizes.items() if is_expert(name))
        self._dense = sum(sizes.values()) - self._experts

    @classmethod
    def of(cls, directory: str | Path) -> Model:
        """Raises ``ValueError`` for what is no native family, and for quantised weights."""
        info = read_model_info(directory)
        if (form := format_of(info)) is not None:
            raise ValueError(f"{info.path} holds weights quantized by {form.name!r}")
        spec = native_spec(info)
        if spec is None:
            raise ValueError(f"{info.architecture or info.model_type} is no native family")
        return cls(spec)

    def kv_bytes(self, cell: int) -> int:
        """Of one token in all layers."""
        return 2 * len(self.spec.layers) * self.spec.attention.kv_width * cell

    def step(self, chunks: Sequence[Chunk], dtype: str, shared: int = 0) -> Work:
        """One forward pass, behind each sequence of which a token is drawn.

        shared: tokens that all sequences have in common, of which keys and values are read once.
        """
        num_tokens, num_logits, cell = sum(new for new, _ in chunks), len(chunks), CELL[dtype]
        used = self._dense + self._experts * self.share_of_experts(num_tokens)
        each = self._dense + self._experts * self.share_of_experts(1)
        keys, pairs = self.attended(chunks, shared)
        return Work(
            cell * (used + self._head + 2 * self.spec.attention.kv_width * keys)
            + LOGIT_BYTES * num_logits * self.spec.vocab_size,
            2.0 * num_tokens * each
            + 2.0 * num_logits * self._head
            + 4.0 * self.spec.attention.q_width * pairs,
        )

    def attended(self, chunks: Sequence[Chunk], shared: int = 0) -> tuple[int, int]:
        """Tokens of which keys and values are read or written, and pairs of query and key, summed
        over the layers."""
        keys = pairs = 0
        for layer in self.spec.layers:
            for index, (new, context) in enumerate(chunks):
                before = context if not layer.window else min(context, layer.window - 1)
                known = max(0, shared - (context - before)) if index else 0
                keys += before - min(before, known) + 2 * new
                pairs += num_pairs(new, context, layer.window)
        return keys, pairs

    def share_of_experts(self, num_tokens: int) -> float:
        """That so many tokens use together, if routes are even and independent."""
        moe = self.spec.moe
        return 0.0 if moe is None else 1 - (1 - moe.top_k / moe.num_experts) ** num_tokens

    def decode(self, batch: int, context: int, dtype: str) -> Work:
        """A step of so many sequences, each with so many tokens before the new one."""
        return self.step([(1, context)] * batch, dtype)


def is_expert(name: str) -> bool:
    """Whether a target is of one expert: `layer.expert.matrix`."""
    return name.count(".") == 2


def num_pairs(new: int, context: int, window: int) -> int:
    """Pairs of query and key: a token sees what is before it and itself, at most a window."""
    if not window:
        return new * context + new * (new + 1) // 2
    return sum(min(position + 1, window) for position in range(context, context + new))


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
    num_requests: int
    num_output: int
    """Of all requests together."""

    def of(self, metric: str) -> float | None:
        """The floor of one of the benchmarks' metrics, or the ceiling if it is a rate."""
        return {
            "output_tok_s": self.num_output / self.whole,
            "steady_tok_s": self.num_requests / self.step,
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
        len(arrivals) * num_output,
    )


def both(threads: int) -> tuple[Ceilings, Ceilings]:
    """With one thread and with all."""
    return measured(1), measured(threads)


def show(all_ceilings: Sequence[Ceilings]) -> None:
    view = Table(title=machine.describe()["cpu"])
    for name in ("threads", "GB/s read", "float32 GFLOP/s", "bfloat16 GFLOP/s"):
        view.add_column(name, justify="right")
    for each in all_ceilings:
        rates = (each.bytes, each.float32, each.bfloat16)
        view.add_row(str(each.threads), *(f"{rate / 1e9:.4g}" for rate in rates))
    Console(width=100).print(view)


def show_floors(model: Model, ceilings: Ceilings, asked: argparse.Namespace) -> None:
    view = Table(title=f"{asked.model.name}, {asked.dtype}, {ceilings.threads} threads")
    for name in ("phase", "GB", "GFLOP", "bytes ms", "operations ms", "floor ms", "tokens/s"):
        view.add_column(name, justify="left" if name == "phase" else "right")
    works = {
        f"decode, {asked.batch} at {asked.context}": (
            model.decode(asked.batch, asked.context, asked.dtype),
            asked.batch,
        ),
        f"prompts, {asked.batch} of {asked.prompt}": (
            model.step([(asked.prompt, 0)] * asked.batch, asked.dtype),
            asked.batch * asked.prompt,
        ),
    }
    for name, (work, num_tokens) in works.items():
        floor = ceilings.floor(work, asked.dtype)
        figures = (
            work.bytes / 1e9,
            work.operations / 1e9,
            1e3 * work.bytes / ceilings.bytes,
            1e3 * work.operations / ceilings.peak(asked.dtype),
            1e3 * floor,
            num_tokens / floor,
        )
        view.add_row(name, *(f"{figure:.4g}" for figure in figures))
    Console(width=100).print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="model directory")
    parser.add_argument("--dtype", choices=CELL, default="bfloat16", help="that is computed in")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=288)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--json", type=Path, help="keep the ceilings here")
    asked = parser.parse_args()
    found = both(asked.threads)
    show(found)
    if asked.model:
        show_floors(Model.of(asked.model), found[-1], asked)
    if asked.json:
        body: dict[str, Any] = {"machine": machine.describe(), "ceilings": list(map(asdict, found))}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
