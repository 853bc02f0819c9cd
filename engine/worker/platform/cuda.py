"""A CUDA device: queued work, copies beside it, recorded graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.gpu_memory import MemoryUse
from engine.worker.platform import Fetched, Graph, Mark, Work


class CudaGraph:
    """A CUDA graph. What it allocates comes from a pool that it may share with others: then only
    one of them may be in use at a time."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, work: Work) -> None:
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            # Run first: kernels are compiled and libraries take their workspace unrecorded.
            work()
            torch.cuda.synchronize()
            self._graph.capture_begin(pool=self._pool)
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # of a recording that is broken; the cause counts
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        now.wait_stream(self._stream)

    def replay(self) -> None:
        self._graph.replay()


class CudaPlatform:
    """The current CUDA device. One stream computes, another copies results to the host."""

    compiles = True
    shares_memory = False

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

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        # torch reuses pinned memory only when copies out of it are done.
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

    def measure(self, work: Work) -> MemoryUse:
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
