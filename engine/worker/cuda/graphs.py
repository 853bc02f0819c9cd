"""Work that is recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class Graph(Protocol):
    """Work that is recorded once. It reads and writes the same memory whenever it is replayed."""

    def capture(self, work: Work) -> None: ...

    def replay(self) -> None: ...


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


class RerunGraph:
    """Where nothing can be recorded: the same work, done again."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def capture(self, work: Work) -> None:
        work()
        self._work = work

    def replay(self) -> None:
        assert self._work is not None, "replayed before it was captured"
        self._work()
