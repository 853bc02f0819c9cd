"""The platform of a CUDA device: streams, asynchronous copies and CUDA graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.gpu_memory import TRIED_GRAPHS, GraphTrial, MemoryUse, graphs_bytes
from engine.worker.platform import Fetched, Graph, Mark, Work

PIECE = 2 << 20  # bytes of a long copy to the device that are queued at a time


class CudaGraph:
    """A CUDA graph. Graphs may share a memory pool; then only one of them may run at a time."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, work: Work) -> None:
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            # Run once unrecorded, so that kernels are compiled and libraries allocate workspaces.
            work()
            torch.cuda.synchronize()
            # thread_local: other threads may allocate memory during the capture.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # raised by a broken capture; hides the cause
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        now.wait_stream(self._stream)

    def replay(self) -> None:
        self._graph.replay()


class CudaPlatform:
    """The current CUDA device, with a stream for computation and one for copies in each
    direction."""

    compiles = True
    shares_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._homeward = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._outward = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._aside = threading.local()
        self._pool = torch.cuda.graph_pool_handle()

    def current(self) -> AbstractContextManager[object]:
        if torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def aside(self) -> AbstractContextManager[object]:
        # One stream for each thread: torch has 32, then it hands out those of steps again, and it
        # keeps freed memory for each stream by itself.
        stream = getattr(self._aside, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._aside.stream = stream
        return torch.cuda.stream(stream)

    def mark(self) -> Mark:
        # With blocking=True the waiting thread sleeps instead of spinning.
        mark = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        # torch reuses pinned memory only after copies from it are done.
        pinned = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def send(self, source: torch.Tensor, target: torch.Tensor, after: Mark) -> None:
        self._outward.wait_event(after)  # type: ignore[arg-type]
        with torch.cuda.stream(self._outward):
            # In pieces, so that the inputs of the next step need not wait for all of them.
            for begin in range(0, len(source), PIECE):
                piece = slice(begin, begin + PIECE)
                target[piece].copy_(source[piece], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._outward)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        # Clone: the next replay of a graph overwrites its outputs.
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
        # Reserved, not allocated, memory counts: gaps between tensors are lost to other processes.
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
        self._pool = torch.cuda.graph_pool_handle()  # a pool dies with its last graph
        was_collecting = gc.isenabled()
        gc.collect()  # objects of an earlier engine must not be freed during a capture
        gc.disable()
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            if was_collecting:
                gc.enable()
            # Free the activations of the unrecorded runs.
            torch.cuda.empty_cache()

    def measure_graphs(self, record: Callable[[int], None], num_sizes: int) -> int:
        if not num_sizes:
            return 0
        num_several = min(num_sizes, TRIED_GRAPHS)
        before = self.free_and_total()[0]
        record(1)
        one = self.free_and_total()[0]
        record(0)  # free them first: a new recording shares no memory with another
        record(num_several)
        several = self.free_and_total()[0]
        record(0)
        trial = GraphTrial(before=before, one=one, several=several, num_several=num_several)
        return graphs_bytes(trial, num_sizes)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(self._homeward)
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return home.copy_(tensor, non_blocking=True)
