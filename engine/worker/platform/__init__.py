"""The worker's interface to a device: memory, order of work, copies to the host, graphs.

``CpuPlatform`` computes immediately, in the host's memory. ``CudaPlatform`` queues work, and the
host gets results later. ``HostPlatform`` runs the code for a GPU on the CPU, with interpreted
kernels or compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.gpu_memory import MemoryUse

Work = Callable[[], None]


class Mark(Protocol):
    """A point in the device's queue of work, like a CUDA event."""

    def record(self) -> None:
        """Move the mark to the end of the work queued so far."""
        ...

    def synchronize(self) -> None:
        """Block until the device has reached the mark."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Device time in milliseconds from this mark to a later one; both must have been
        reached."""
        ...


class Graph(Protocol):
    """Work that is recorded once and replayed; it reads and writes the same memory each time."""

    def capture(self, work: Work) -> None: ...

    def replay(self) -> None: ...


class Fetched(NamedTuple):
    """Tensors that are being copied to the host; they are valid once ``done`` is reached."""

    tensors: list[torch.Tensor]
    done: Mark


class Platform(Protocol):
    """Operations of a device. Work runs in the order in which it is queued."""

    device: torch.device
    compiles: bool
    """True if the first launch of a kernel with a new shape compiles it, which takes seconds."""
    shares_memory: bool
    """True if the device is the host: nothing is copied, and work runs immediately."""

    def current(self) -> AbstractContextManager[object]:
        """Make this the current device of the thread within the context."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Context in which the work of this thread neither waits for steps nor delays them."""
        ...

    def mark(self) -> Mark:
        """Record a new mark after all work queued so far."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed device memory; on a CPU, pages are allocated when first written."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked host memory [num_bytes] uint8 for asynchronous copies."""
        ...

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Copy values to the device. The caller may overwrite the array afterwards."""
        ...

    def send(self, source: torch.Tensor, target: torch.Tensor, after: Mark) -> None:
        """Copy page-locked memory [n] uint8 to the device. Work queued earlier does not wait for
        it, work queued later does. after: the last work that uses what ``target`` contains."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Start copying the current values of these tensors to the host, in parallel to later
        work."""
        ...

    def graph(self) -> Graph:
        """Create a graph; all graphs of a platform share one memory pool."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Free and total memory in bytes."""
        ...

    def measure(self, work: Work) -> MemoryUse:
        """Run ``work`` and return the memory that it used, without what was allocated before."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Context in which graphs are captured. Graphs that exist at the same time must be captured
        in the same context. At its end, memory that only warm-up runs used is freed."""
        ...

    def measure_graphs(self, record: Callable[[int], None], num_sizes: int) -> int:
        """Estimate the bytes that graphs of all ``num_sizes`` sizes will take. ``record(n)``
        captures graphs of the n largest sizes and drops all earlier graphs."""
        ...
