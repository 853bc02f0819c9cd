"""How near the steps of a model on the CPU come to what memory and arithmetic allow.

The machine's ceilings are measured once, in its second start, and kept next to the compiled
kernels. The floor of a step is the larger of its bytes / bandwidth and its operations / peak; once
a second a result tells it, next to the seconds that the steps took (``SchedulerStats``).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.messages.step import Column
from engine.models.decoder import Decoder
from engine.models.load import native_spec
from engine.models.quant import format_of
from engine.models.work import ModelWork, Shapes
from kernels.cpu.disk_cache import kept_file
from kernels.cpu.threads import num_threads

logger = logging.getLogger("engine.worker")

READ_BYTES = 512 << 20
SECONDS = 0.6  # of each probe, at least
Product = tuple[int, int, int]
"""Rows, inputs, outputs."""
PRODUCTS: tuple[Product, ...] = ((1024, 1024, 1024), (2048, 1024, 4096))
REPORT_SECONDS = 1.0  # accumulate this many seconds of steps per report
REPORT_STEPS = 64  # or this many
_QUICK = 0.05  # seconds of a probe after a start
_QUICK_BYTES = 128 << 20


Positive = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class Ceilings:
    """What a machine does in a second, with this many threads."""

    threads: int
    bytes: Positive
    float32: Positive
    """Operations."""
    bfloat16: Positive

    def peak(self, dtype: str) -> float:
        """Operations a second on weights of this type: they may be widened first."""
        return max(self.float32, self.bfloat16) if dtype == "bfloat16" else self.float32

    def floor(self, work: ModelWork, dtype: str) -> float:
        """Seconds."""
        return max(work.bytes / self.bytes, work.operations / self.peak(dtype))


class Measured(NamedTuple):
    """A step: the seconds that it took, and of each row the new tokens, those before them, and
    whether a token was drawn."""

    seconds: float
    counts: Column
    starts: Column
    samples: Column


class Roofline:
    """The floors of one model's steps."""

    def __init__(
        self, shapes: Shapes, ceilings: Ceilings, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        self._shapes = shapes
        self._ceilings = ceilings
        self._dtype = str(dtype).removeprefix("torch.")
        self._cells = dtype.itemsize, kv_dtype.itemsize

    def floor(self, steps: Sequence[Measured]) -> float:
        """Seconds that the steps take at least."""
        works = (
            self._shapes.work(
                step.counts.astype(np.int64),
                step.starts.astype(np.int64),
                self._cells,
                num_logits=int(step.samples.sum()),
            )
            for step in steps
        )
        return sum(self._ceilings.floor(work, self._dtype) for work in works)


def make_roofline(
    config: ModelConfig, info: ModelInfo, model: Decoder, kv_dtype: torch.dtype, *, is_quiet: bool
) -> Roofline | None:
    """``None`` where a step's work is not known: of general models and of quantized weights.

    is_quiet: the machine's ceilings may be measured now, if no earlier start has kept them.
    """
    if config.quantization is not None or format_of(info) is not None:
        return None
    spec = native_spec(info)
    ceilings = None if spec is None else known_ceilings(num_threads(), is_quiet=is_quiet)
    if spec is None or ceilings is None:
        return None
    return Roofline(Shapes(spec), ceilings, model.weight_dtype, kv_dtype)


def known_ceilings(threads: int, *, is_quiet: bool) -> Ceilings | None:
    """The ceilings kept of an earlier start, else measured now, for about half a second; ``None``
    where they cannot be kept: no start should pay for them twice."""
    file = kept_file(f"ceilings-{threads}.json")
    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Ceilings)
    except (OSError, msgspec.MsgspecError):  # not there, or not what was written
        if not is_quiet:
            return None
    found = measured(threads, _QUICK, _QUICK_BYTES, PRODUCTS[:1])
    _keep(file, found)
    return found


def _keep(file: Path, ceilings: Ceilings) -> None:
    try:
        file.write_text(json.dumps(asdict(ceilings)))
    except OSError as error:
        logger.warning("%s cannot be written: %s", file, error)


def measured(
    threads: int,
    seconds: float = SECONDS,
    size: int = READ_BYTES,
    products: Sequence[Product] = PRODUCTS,
) -> Ceilings:
    """Find the ceilings by torch, with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            source = torch.ones(size // 4, dtype=torch.float32)
            half = len(source) // 2
            one, other = source[:half], source[half:]
            reads = (source.sum, lambda: one.dot(other))
            read = min(least_seconds(call, seconds) for call in reads)
            peaks = {
                name: peak(getattr(torch, name), seconds, products)
                for name in ("float32", "bfloat16")
            }
    finally:
        torch.set_num_threads(before)
    return Ceilings(threads, source.nbytes / read, **peaks)


def peak(dtype: torch.dtype, seconds: float, products: Sequence[Product]) -> float:
    """Operations a second of the best of some products."""
    best = 0.0
    for rows, inner, out in products:
        x, weight = torch.ones(rows, inner, dtype=dtype), torch.ones(out, inner, dtype=dtype)
        took = least_seconds(partial(torch.nn.functional.linear, x, weight), seconds)
        best = max(best, 2 * rows * inner * out / took)
    return best


def least_seconds(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """The least seconds among repeats for this long, and three at least; the first is not
    counted."""
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)
