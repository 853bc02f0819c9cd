"""Measures the small operations of a step, the sampler, and kernel launches."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import triton
from shapes import Shape, Step

import kernels
from gpu.attention import BLOCK
from gpu.box import Box, Call, Row, Rows, share
from gpu.ceilings import L2_BYTES
from kernels import slots

LAUNCHES = 300
VOCABS = {"qwen3": 151936, "llama-3.1": 128256}
KINDS = {
    "greedy": (0.0, 0, 1.0),
    "plain": (1.0, 0, 1.0),
    "top-k 50": (1.0, 50, 1.0),
    "top-p 0.9": (1.0, 0, 0.9),
}


def samplers(box: Box) -> Rows:
    """Time the sampler, next to the time to read the logits in float32 once."""
    for name, vocab in ({"tiny": 300} if box.is_dry else VOCABS).items():
        for num in box.sizes((1, 64, 256), (2,)):
            logits = torch.randn(num, vocab, device=box.device) * 3
            for kind, settings in KINDS.items():
                taken = box.time([_sample(logits, settings)]).least
                floor = logits.nbytes / box.ceilings.bytes
                yield {
                    "vocabulary": name,
                    "rows": num,
                    "kind": kind,
                    "us": 1e6 * taken,
                    "one pass us": 1e6 * floor,
                    "passes": taken / floor,
                }


def _sample(logits: torch.Tensor, settings: tuple[float, int, float]) -> Call:
    num, device = len(logits), logits.device

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num,), value, dtype=dtype, device=device)

    temperature, top_k, top_p = settings
    columns = slots.SamplingColumns(
        column(temperature, torch.float64),
        column(top_k, torch.int32),
        column(top_p, torch.float64),
        column(0.0, torch.float64),
        torch.arange(num, device=device),
    )
    rows = torch.arange(num, dtype=torch.int32, device=device)
    return lambda: slots.sample(slots.Rows(logits, rows, rows), columns)


def pieces(box: Box) -> Rows:
    """Time writes of keys and values, norms and activations, in bytes a second."""
    for model, shape in box.shapes().items():
        for num in box.sizes((1, 64, 256, 8192), (3,)):
            for name, calls, num_bytes in _pieces(box, shape, num):
                taken = box.time(calls).least
                floor = num_bytes / box.ceilings.bytes
                yield {
                    "model": model,
                    "operation": name,
                    "tokens": num,
                    "us": 1e6 * taken,
                    "floor us": 1e6 * floor,
                    "%": share(floor, taken),
                    "GB/s": num_bytes / taken / 1e9,
                }


def _pieces(box: Box, shape: Shape, num: int) -> Iterator[tuple[str, list[Call], int]]:
    size = box.dtype.itemsize

    def made(width: int) -> list[torch.Tensor]:
        count = 1 if box.is_dry else max(1, min(32, L2_BYTES // (num * width * size)))
        return [torch.randn(num, width, device=box.device, dtype=box.dtype) for _ in range(count)]

    weight = torch.ones(shape.hidden, device=box.device, dtype=box.dtype)
    calls = [lambda x=x: kernels.add_rms_norm(x, x, weight, 1e-6) for x in made(shape.hidden)]
    yield "add + norm", calls, 4 * num * shape.hidden * size
    calls = [lambda x=x: kernels.act_mul(x, "silu") for x in made(2 * shape.ff)]
    yield "activation", calls, 3 * num * shape.ff * size
    step = Step([(1, 100)] * num, BLOCK, box.device)
    heads = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    cache = step.cache(shape.kv_heads, shape.head_dim, box.dtype)
    table = torch.randn(128, shape.head_dim, device=box.device)
    meta = step.meta()

    def write(qkv: torch.Tensor) -> torch.Tensor:
        return kernels.qkv_rope_write(qkv, cache, meta, cos_sin=table, **heads)

    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    calls = [lambda x=x: write(x) for x in made(width)]
    yield "KV write", calls, 2 * num * width * size


@triton.jit
def nothing_kernel(  # noqa: PLR0913
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t,  # noqa: E741
):  # fmt: skip
    """Twenty arguments and no work."""


def launches(box: Box) -> Rows:
    """Microseconds of the host for each launch, and of the device where a graph launches it."""
    shape = next(iter(box.shapes().values()))
    (num,) = box.sizes((8,), (1,))
    x = torch.randn(num, shape.hidden, device=box.device, dtype=box.dtype)
    weight = torch.ones_like(x[0])
    step = Step([(1, 30)] * num, BLOCK, box.device)
    cache = step.cache(shape.kv_heads, shape.head_dim, box.dtype)
    q = torch.randn(num, shape.heads, shape.head_dim, device=box.device, dtype=box.dtype)
    meta = step.meta()
    logits = torch.randn(num, 1000, device=box.device)
    calls: dict[str, Call] = {
        "empty Triton kernel, 20 arguments": lambda: nothing_kernel[(1,)](*[x] * 10, *range(10)),
        "torch's add": lambda: x.add_(0),
        "norm": lambda: kernels.rms_norm(x, weight, 1e-6),
        f"decode attention, {num} rows": lambda: kernels.paged_attention(q, cache, meta, scale=0.1),
        f"sampler, {num} rows": _sample(logits, KINDS["top-p 0.9"]),
    }
    for name, call in calls.items():
        yield _launch(box, name, call)


def _launch(box: Box, name: str, call: Call) -> Row:
    call()
    box.clear()
    count = 1 if box.is_dry else LAUNCHES
    start = time.perf_counter()
    for _ in range(count):
        call()
    host = (time.perf_counter() - start) / count
    return {
        "launch": name,
        "host us": 1e6 * host,
        "in a graph us": 1e6 * box.time([call] * 20).least,
    }
