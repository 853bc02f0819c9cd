"""Roofline of CPU steps: how close they come to the machine's memory bandwidth and peak operations.

The machine's limits, its ceilings, are measured once, at the first start that compiles nothing, and
stored next to the compiled kernels. The minimum time of a step, its floor, is the larger of bytes /
bandwidth and operations / peak. About once a second a step result reports the floor and the
measured time of the steps since the last report (``SchedulerStats``)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.gguf.link import gguf_file
from engine.messages.step import Column
from engine.models.decoder import NativeDecoder
from engine.models.load import native_spec
from engine.models.quant import format_of
from engine.models.work import ModelWork, Shapes
from kernels.cpu.disk_cache import kept_file
from kernels.cpu.threads import num_threads
from kernels.reference.kv_rows import scale_bytes

logger = logging.getLogger("engine.worker")

READ_BYTES = 512 << 20
SECONDS = 0.6  # minimum time of each measurement
Product = tuple[int, int, int]
"""The size of a matrix product: rows, inputs, outputs."""
PRODUCTS: tuple[Product, ...] = ((1024, 1024, 1024), (2048, 1024, 4096))
REPORT_SECONDS = 1.0  # accumulate this many seconds of steps per report
REPORT_STEPS = 64  # or this many
_QUICK = 0.05  # seconds of each measurement during a start
_QUICK_BYTES = 128 << 20


Positive = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second of this machine with this many threads."""

    threads: int
    bytes: Positive
    float32: Positive
    """Operations per second with weights of this dtype; ``bfloat16`` likewise."""
    bfloat16: Positive

    def peak(self, dtype: str) -> float:
        """Operations per second with this dtype, or with float32 instead if that is faster."""
        return max(self.float32, self.bfloat16) if dtype == "bfloat16" else self.float32

    def floor(self, work: ModelWork, dtype: str) -> float:
        """Minimum time of this work in seconds."""
        return max(work.bytes / self.bytes, work.operations / self.peak(dtype))


class Measured(NamedTuple):
    """A measured step: its seconds, and for each row the number of tokens computed, the number of
    earlier tokens in the sequence, and whether a token was sampled."""

    seconds: float
    counts: Column
    starts: Column
    samples: Column


class Roofline:
    """Computes the minimum time of one model's steps."""

    def __init__(
        self, shapes: Shapes, ceilings: Ceilings, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        self._shapes = shapes
        self._ceilings = ceilings
        self._dtype = str(dtype).removeprefix("torch.")
        scale = scale_bytes(kv_dtype) / shapes.spec.attention.head_dim
        self._cells = dtype.itemsize, kv_dtype.itemsize + scale

    def floor(self, steps: Sequence[Measured]) -> float:
        """Minimum time of these steps together, in seconds."""
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
    config: ModelConfig,
    info: ModelInfo,
    model: NativeDecoder,
    kv_dtype: torch.dtype,
    *,
    is_quiet: bool,
) -> Roofline | None:
    """Create a model's roofline; ``None`` for quantized weights, for GGUF files and for models that
    transformers computes, whose work per step is unknown.

    is_quiet: this start compiles nothing, so measure the ceilings now if none are stored.
    """
    requested = config.quantization or config.output_layer_quantization
    is_stored_packed = format_of(info) is not None or gguf_file(info.path) is not None
    if requested is not None or is_stored_packed:
        return None
    spec = native_spec(info)
    if spec is not None and model.mine.shard.size > 1:
        spec = replace(model.spec, vocab_size=len(model.mine.vocabulary))
    if spec is not None:
        spec = replace(spec, layers=tuple(spec.layers[index] for index in model.stage.layers))
    ceilings = None if spec is None else known_ceilings(num_threads(), is_quiet=is_quiet)
    if spec is None or ceilings is None:
        return None
    return Roofline(Shapes(spec), ceilings, model.weight_dtype, kv_dtype)


def known_ceilings(threads: int, *, is_quiet: bool) -> Ceilings | None:
    """Return the stored ceilings. If none are stored and ``is_quiet`` (this start compiles
    nothing), measure them in 0.5 s and store them. Returns ``None`` if they are neither stored nor
    measured, or cannot be stored."""
    file = kept_file(f"ceilings-{threads}.json")
    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Ceilings)
    except (OSError, msgspec.MsgspecError):  # missing or damaged
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
    """Measure the ceilings with torch on this many threads. ``seconds``: minimum time of each
    measurement; ``size``: bytes to read."""
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
    """Operations per second of the fastest of these matrix products."""
    best = 0.0
    for rows, inner, out in products:
        x, weight = torch.ones(rows, inner, dtype=dtype), torch.ones(out, inner, dtype=dtype)
        took = least_seconds(partial(torch.nn.functional.linear, x, weight), seconds)
        best = max(best, 2 * rows * inner * out / took)
    return best


def least_seconds(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """Call repeatedly for ``seconds``, at least three times, and return the shortest time in
    seconds. The first call is not counted."""
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)
