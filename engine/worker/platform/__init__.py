"""The device as the worker sees it: memory, the order of its work, copies to the host, graphs.

`cpu` is the processor, which computes at once and shares its memory with the host. `cuda` is a GPU:
work is queued, and the host gets its results later. `host` is the CPU in a GPU's place, where
the same code runs with interpreted kernels or compiled loops.
"""

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
    """A place in the order of the device's work."""

    def record(self) -> None:
        """Move the mark after all work queued so far."""
        ...

    def synchronize(self) -> None:
        """Sleep until the device has reached the mark."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds of the device from here to a later mark; both have been reached."""
        ...


class Graph(Protocol):
    """Work that is recorded once. It reads and writes the same memory whenever it is replayed."""

    def capture(self, work: Work) -> None: ...

    def replay(self) -> None: ...


class Fetched(NamedTuple):
    """Tensors on their way to the host; they may be read once the mark is reached."""

    tensors: list[torch.Tensor]
    done: Mark


class Platform(Protocol):
    """Operations of a device. Work is done in the order in which it is queued."""

    device: torch.device
    compiles: bool
    """Whether a kernel costs seconds when it is first launched in a new shape."""
    shares_memory: bool
    """Whether host and device are one: nothing need be copied, and what is requested is done at
    once."""

    def current(self) -> AbstractContextManager[object]:
        """Within it what this thread queues goes to this device: each thread has its own choice."""
        ...

    def mark(self) -> Mark:
        """A new mark after all work queued so far."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory on the device; where possible, pages are taken only when written."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory [num_bytes] uint8 that the device copies from by itself."""
        ...

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device, for the work that is queued next. The values may change."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Copy to the host what these hold now, next to the work that is queued next."""
        ...

    def graph(self) -> Graph:
        """A new graph; all of a platform share one pool of memory."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of memory."""
        ...

    def measure(self, work: Work) -> MemoryUse:
        """Run this work and return the memory it took in addition."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Within it graphs are captured, all that are kept together. Only they keep memory of what
        ran."""
        ...

    def measure_graphs(self, record: Callable[[int], None], num_sizes: int) -> int:
        """Bytes that the graphs of this many sizes will take. record: capture those of this many
        sizes, the largest, in place of all before."""
        ...
