"""Measures bandwidth and peak operations of the device, with which all else is compared."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from gpu.box import Box, Ceilings, Rows, share

COPIED, DRY_COPIED = 2 << 30, 1 << 20
L2_BYTES = 256 << 20  # several times the size of the second-level cache


def ceilings(box: Box) -> Rows:
    copied, filled = _memory(box, DRY_COPIED if box.is_dry else COPIED)
    yield {"what": "copy", "value": copied / 1e12, "unit": "TB/s"}
    yield {"what": "fill", "value": filled / 1e12, "unit": "TB/s"}
    box.clear()
    size = 64 if box.is_dry else 8192
    a, b = (torch.randn(size, size, device=box.device, dtype=box.dtype) for _ in range(2))
    multiplied = 2 * size**3 / box.time([lambda: a @ b]).least
    yield {"what": f"product of {size}^3, 16 bits", "value": multiplied / 1e12, "unit": "TFLOP/s"}
    if not box.is_dry:
        box.ceilings = Ceilings(copied, multiplied)


def _memory(box: Box, num_bytes: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and of a fill."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=box.device)
    target = torch.empty_like(source)
    copied = box.time([lambda: target.copy_(source)]).least
    return 2 * num_bytes / copied, num_bytes / box.time([lambda: source.fill_(1)]).least


def products(box: Box) -> Rows:
    """Time products of a few rows with the weights of a layer, computed by torch."""
    for model, shape in box.shapes().items():
        for name, (out, inner) in {**shape.linears, "head": (shape.vocab, shape.hidden)}.items():
            num_bytes = out * inner * box.dtype.itemsize
            weights = [
                torch.randn(out, inner, device=box.device, dtype=box.dtype)
                for _ in range(1 if box.is_dry else max(1, min(64, L2_BYTES // num_bytes)))
            ]
            for num in box.sizes((1, 16, 64, 256), (1,)):
                x = torch.randn(num, inner, device=box.device, dtype=box.dtype)
                taken = box.time([lambda w=w, x=x: F.linear(x, w) for w in weights]).least
                floor = max(
                    num_bytes / box.ceilings.bytes, 2 * num * out * inner / box.ceilings.operations
                )
                yield {
                    "model": model,
                    "product": f"{name} {out}x{inner}",
                    "rows": num,
                    "us": 1e6 * taken,
                    "floor us": 1e6 * floor,
                    "%": share(floor, taken),
                    "TB/s": num_bytes / taken / 1e12,
                    "TFLOP/s": 2 * num * out * inner / taken / 1e12,
                }
