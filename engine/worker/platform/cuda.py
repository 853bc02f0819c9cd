"""A CUDA device: queued work, copies next to it, recorded graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.gpu_memory import TRIED_GRAPHS, GraphTrial, MemoryUse, graphs_bytes
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
            # Other threads of the program may allocate memory meanwhile.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
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

    def current(self) -> AbstractContextManager[object]:
        if torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

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
        return torch.cuda.mem_get_info(self.device)

    def measure(self, work: Work) -> MemoryUse:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        # What was taken from the device counts: gaps between tensors are of use to no one else.
        loaded = torch.cuda.memory_reserved(self.device)
        work()
        torch.cuda.synchronize(self.device)
        activations = torch.cuda.max_memory_reserved(self.device) - loaded
        free, total = self.free_and_total()
        others = total - free - torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return MemoryUse(total=total, loaded=loaded, activations=activations, others=others)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._pool = torch.cuda.graph_pool_handle()  # one ends with the last graph in it
        was_collecting = gc.isenabled()
        gc.collect()  # what a dead engine left must not end while something is recorded
        gc.disable()
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            if was_collecting:
                gc.enable()
            # What ran before it was recorded: the activations of the largest once more.
            torch.cuda.empty_cache()

    def measure_graphs(self, record: Callable[[int], None], num_sizes: int) -> int:
        if not num_sizes:
            return 0
        num_several = min(num_sizes, TRIED_GRAPHS)
        before = self.free_and_total()[0]
        record(1)
        one = self.free_and_total()[0]
        record(0)  # before further ones: a new recording shares no memory with another
        record(num_several)
        several = self.free_and_total()[0]
        record(0)
        trial = GraphTrial(before=before, one=one, several=several, num_several=num_several)
        return graphs_bytes(trial, num_sizes)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(self._homeward)
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return home.copy_(tensor, non_blocking=True)
