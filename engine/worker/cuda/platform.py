"""The device as the runner sees it: memory, the order of its work, the way home, graphs.

`CudaPlatform` is the real one. `HostPlatform` stands in for it on the CPU, where everything is done
when it is asked for: the same runner then computes with interpreted kernels, or with plain torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.gpu_memory import MemoryUse
from engine.worker.cuda.graphs import CudaGraph, Graph, RerunGraph
from engine.worker.memory import free_host_bytes


class Mark(Protocol):
    """A place in the order of the device's work."""

    def record(self) -> None:
        """Move the mark behind all that was asked for so far."""
        ...

    def synchronize(self) -> None:
        """Sleep until the device is there."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds of the device from here to a later mark; both have been reached."""
        ...


class Fetched(NamedTuple):
    """Tensors on their way to the host; they may be read once the mark is reached."""

    tensors: list[torch.Tensor]
    done: Mark


class Platform(Protocol):
    """What the runner asks of a device. Work is done in the order in which it is asked for."""

    device: torch.device
    compiles: bool
    """Whether a kernel costs seconds when it is first launched in a new shape."""

    def mark(self) -> Mark:
        """A new mark behind all that was asked for so far."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory [num_bytes] uint8 that the device copies from by itself."""
        ...

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device, for the work that is asked for next. The values may change."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Copy home what these hold now, beside the work that is asked for next."""
        ...

    def graph(self) -> Graph:
        """A new graph; all of a platform share one pool of memory."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of memory."""
        ...

    def measure(self, work: Callable[[], None]) -> MemoryUse:
        """Do this work and say what memory it took beside what was there before."""
        ...


class CudaPlatform:
    """The current CUDA device. One stream computes, another brings results home."""

    compiles = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._homeward = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def mark(self) -> Mark:
        # A blocking event lets the waiting thread sleep, where others spin.
        mark = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        # torch gives pinned memory to nobody else before copies out of it are done.
        pinned = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        # Copies of their own: the next step writes over what a graph has put out.
        held = [tensor.clone() for tensor in tensors]
        self._homeward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._homeward):
            home = [self._bring(tensor) for tensor in held]
            return Fetched(home, self.mark())

    def graph(self) -> Graph:
        return CudaGraph(self._recording, self._pool)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info()

    def measure(self, work: Callable[[], None]) -> MemoryUse:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        activations = torch.cuda.max_memory_allocated() - before
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        return MemoryUse(total=total, loaded=before, activations=activations, others=others)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(self._homeward)
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return home.copy_(tensor, non_blocking=True)


class HostMark:
    """The CPU is always there already."""

    def __init__(self) -> None:
        self.record()

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostMark, /) -> float:
        return (later.seconds - self.seconds) * 1e3


class HostPlatform:
    """The CPU in a device's place."""

    compiles = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def mark(self) -> Mark:
        return HostMark()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return Fetched([tensor.clone() for tensor in tensors], self.mark())

    def graph(self) -> Graph:
        return RerunGraph()

    def free_and_total(self) -> tuple[int, int]:
        return (free_host_bytes(),) * 2

    def measure(self, work: Callable[[], None]) -> MemoryUse:
        work()
        return MemoryUse(total=free_host_bytes(), loaded=0, activations=0, others=0)
