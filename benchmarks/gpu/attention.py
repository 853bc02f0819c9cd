"""Measures attention over the paged cache: bytes a second in decodes, operations in prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shapes import Shape, Step
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
from gpu.box import Box, Call, Row, Rows, share
from gpu.ceilings import L2_BYTES

BLOCK = 64
FP8 = torch.float8_e4m3fn


def _queries(box: Box, shape: Shape, num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, shape.heads, shape.head_dim, device=box.device, dtype=box.dtype)


def layers_of(box: Box, shape: Shape, step: Step, dtype: torch.dtype) -> list[torch.Tensor]:
    """KV caches of as many layers as exceed the second-level cache of the device."""
    first = step.cache(shape.kv_heads, shape.head_dim, box.dtype).to(dtype)
    if box.is_dry:
        return [first]
    return [first, *(first.clone() for _ in range(min(31, L2_BYTES // first.nbytes)))]


def calls_of(
    box: Box, shape: Shape, step: Step, dtype: torch.dtype, kept: Sequence[torch.Tensor]
) -> list[Call]:
    q = _queries(box, shape, step.num_tokens)
    ones = torch.ones(2, shape.kv_heads, device=box.device)
    scales = ones if dtype is FP8 else None

    meta = step.meta()  # shared by the layers of a step, so it is not timed

    def attend(cache: torch.Tensor) -> torch.Tensor:
        scale = shape.head_dim**-0.5
        return kernels.paged_attention(q, cache, meta, scale=scale, kv_scales=scales)

    return [lambda cache=cache: attend(cache) for cache in kept]


def decodes(box: Box) -> Rows:
    for context in box.sizes((1024, 8192), (70,)):
        for batch in box.sizes((1, 8, 64, 256), (2,)):
            for model, shape in box.shapes().items():
                for dtype in (box.dtype,) if box.is_dry else (box.dtype, FP8):
                    yield _decode(box, model, shape, [context] * batch, dtype)
                    box.clear()
    for model, shape in box.shapes().items():  # one long request among many
        yield _decode(box, model, shape, [70] if box.is_dry else [100_000] + [1024] * 63, box.dtype)
        box.clear()


def _decode(box: Box, model: str, shape: Shape, lengths: Sequence[int], dtype: torch.dtype) -> Row:
    step = Step([(1, length - 1) for length in lengths], BLOCK, box.device)
    kept = layers_of(box, shape, step, dtype)
    timed = box.time(calls_of(box, shape, step, dtype, kept))
    num_bytes = 2 * step.num_keys * shape.kv_heads * shape.head_dim * dtype.itemsize
    floor = num_bytes / box.ceilings.bytes
    return {
        "model": model,
        "batch": len(lengths),
        "context": max(lengths),
        "cache": str(dtype).removeprefix("torch."),
        "us": 1e6 * timed.least,
        "median us": 1e6 * timed.median,
        "GB/s": num_bytes / timed.least / 1e9,
        "floor us": 1e6 * floor,
        "%": share(floor, timed.least),
        "graph": timed.is_graphed,
    }


PROMPTS = {
    "1 x 1k": [(1024, 0)],
    "1 x 4k": [(4096, 0)],
    "1 x 16k": [(16384, 0)],
    "8 x 1k": [(1024, 0)] * 8,
    "2k after 8k": [(2048, 8192)],
    "64 after 100k": [(64, 100_000)],
    "64 decodes + 2k": [(1, 1023)] * 64 + [(2048, 0)],
}
DRY_PROMPTS = {"1 x 40": [(40, 0)], "20 after 30": [(20, 30)]}


def prompts(box: Box) -> Rows:
    for label, sequences in (DRY_PROMPTS if box.is_dry else PROMPTS).items():
        for model, shape in box.shapes().items():
            step = Step(sequences, BLOCK, box.device)
            kept = layers_of(box, shape, step, box.dtype)[:1]
            timed = box.time(calls_of(box, shape, step, box.dtype, kept))
            operations = 4 * step.num_pairs * shape.heads * shape.head_dim
            floor = operations / box.ceilings.operations
            row: Row = {
                "model": model,
                "prompts": label,
                "us": 1e6 * timed.least,
                "TFLOP/s": operations / timed.least / 1e12,
                "floor us": 1e6 * floor,
                "%": share(floor, timed.least),
            }
            if not any(context for _, context in sequences):
                row["cuDNN TFLOP/s"] = _of_cudnn(box, shape, sequences, operations)
            yield row
            box.clear()


def _of_cudnn(box: Box, shape: Shape, sequences: list, operations: float) -> object:
    """TFLOP/s of cuDNN on the same tokens, or the error that it raises."""
    try:
        call = cudnn(box, shape, len(sequences), sequences[0][0])
        return operations / box.time([call]).least / 1e12
    except Exception as error:  # not built in, other signature, unknown head size
        return f"{type(error).__name__}: {error}"[:60]


def cudnn(box: Box, shape: Shape, batch: int, length: int) -> Call:
    """scaled_dot_product_attention of cuDNN, on contiguous K and V."""

    def made(heads: int) -> torch.Tensor:
        size = (batch, heads, length, shape.head_dim)
        return torch.randn(size, device=box.device, dtype=box.dtype)

    q, k, v = made(shape.heads), made(shape.kv_heads), made(shape.kv_heads)

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend
