"""The device under measurement, or the CPU with interpreted kernels in its place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from shapes import SHAPES, Shape

Call = Callable[[], object]
Row = dict[str, object]
Rows = Iterator[Row]

LEAST_MS = 0.5  # of work between two events, whose clock is too coarse for less
SECONDS = 0.25  # for each figure, about
MOST_ROUNDS = 50


class Ceilings(NamedTuple):
    """Bytes that a copy reads and writes in a second, and operations of a large product."""

    bytes: float
    operations: float


# Measured on an H200; a run replaces them by those of its device.
USUAL = Ceilings(4.3e12, 790e12)


class Timed(NamedTuple):
    """Seconds that a call takes."""

    least: float
    median: float
    is_graphed: bool  # launched by a graph, without time of the host


class Box:
    """Device, sizes and clock of a run."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.device = "cpu" if is_dry else "cuda"
        # The interpreter has no bfloat16 of its own.
        self.dtype = torch.float32 if is_dry else torch.bfloat16
        self.ceilings = USUAL

    def name(self) -> str:
        return "the CPU, interpreting" if self.is_dry else torch.cuda.get_device_name()

    def shapes(self) -> dict[str, Shape]:
        names = ["tiny"] if self.is_dry else ["qwen3-0.6b", "llama-3.1-8b"]
        return {name: SHAPES[name] for name in names}

    def sizes(self, real: Sequence[int], dry: Sequence[int]) -> Sequence[int]:
        return dry if self.is_dry else real

    def time(self, calls: Sequence[Call]) -> Timed:
        """Time calls, each of which works on memory of its own, so that no cache helps."""
        if self.is_dry:
            start = time.perf_counter()
            calls[0]()
            return Timed(*[time.perf_counter() - start] * 2, False)
        return time_on_device(calls)

    def clear(self) -> None:
        """Return unused memory to the device."""
        if not self.is_dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def time_on_device(calls: Sequence[Call]) -> Timed:
    """Time the replays of one graph of all calls, or the calls themselves if capture fails."""
    run, is_graphed = _recorded(calls)
    first = _elapsed_ms(run)
    repeats = max(1, min(100, int(LEAST_MS / max(first, 1e-3))))
    rounds = max(3, min(MOST_ROUNDS, int(1e3 * SECONDS / max(first * repeats, 1e-3))))
    found = [_elapsed_ms(run, repeats) / (1e3 * repeats * len(calls)) for _ in range(rounds)]
    return Timed(min(found), statistics.median(found), is_graphed)


def _recorded(calls: Sequence[Call]) -> tuple[Call, bool]:
    def run() -> None:
        for call in calls:
            call()

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run, False
    graph.replay()
    return graph.replay, True


def _elapsed_ms(run: Call, repeats: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def share(floor: float, seconds: float) -> int:
    """The floor in percent of the measured time: 100 is as fast as the device allows."""
    return round(100 * floor / seconds)
