"""Platforms on the CPU: one for CPU inference, one that runs a GPU's code on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.gpu_memory import MemoryUse
from engine.ipc.host_memory import free_host_bytes
from engine.worker.memory import keep_freed_memory, lazy_zeros
from engine.worker.platform import Fetched, Graph, Mark, Work


class HostMark:
    """A time stamp on the CPU, with the interface of a GPU's event."""

    def __init__(self) -> None:
        self.record()

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostMark, /) -> float:
        return (later.seconds - self.seconds) * 1e3


class RerunGraph:
    """Stands in for a graph: replaying it calls the same function again."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def capture(self, work: Work) -> None:
        work()
        self._work = work

    def replay(self) -> None:
        assert self._work is not None, "replayed before it was captured"
        self._work()


class HostPlatform:
    """Runs a GPU's code on the CPU: it copies as a GPU does, but work runs immediately."""

    compiles = False
    shares_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return HostMark()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return lazy_zeros(shape, dtype)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def send(self, source: torch.Tensor, target: torch.Tensor, after: Mark) -> None:
        target.copy_(source)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return Fetched([tensor.clone() for tensor in tensors], self.mark())

    def graph(self) -> Graph:
        return RerunGraph()

    def free_and_total(self) -> tuple[int, int]:
        return (free_host_bytes(),) * 2

    def measure(self, work: Work) -> MemoryUse:
        work()
        return MemoryUse(total=free_host_bytes(), loaded=0, activations=0, others=0)

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def measure_graphs(self, record: Callable[[int], None], num_sizes: int) -> int:
        return 0


class CpuPlatform(HostPlatform):
    """The CPU as the device, without copies."""

    shares_memory = True

    def __init__(self) -> None:
        super().__init__()
        keep_freed_memory()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return Fetched(list(tensors), self.mark())  # no copy: no later step overwrites them
