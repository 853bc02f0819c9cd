"""Torch's group of NCCL between devices that are not there: gloo carries what `fake_cuda` queues.

Each rank is a process with a device of its own. As on a device, an operation that is not on a
stream of the group is queued on the current one, is captured in a graph and repeated with it, and
numbers are added in their own type. What fails in it is known by the first operation alone. Unlike
there, the host waits in it for the other ranks.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine.config.env import BLOCKING_WAIT, VISIBLE_GPUS
from engine.worker.platform.cuda import CudaPlatform
from engine.worker.worker import ModelWorker
from support import triton_interpreter
from support.device_memory import HOST

if TYPE_CHECKING:
    from support.fake_cuda import FakeCuda
    from support.fake_graphs import Event


class Options:
    _timeout = timedelta(0)


class Work:
    """An operation on the group's own stream, for which the host waits."""

    def __init__(self, group: FakeNccl, event: Event) -> None:
        self._group = group
        self._event = event

    def wait(self) -> None:
        """Raises the error of the communicator."""
        cuda, event = self._group.cuda, self._event
        assert event.stream is not None
        cuda.stream.wait_event(event)
        if not cuda.clocks.knows(HOST, event.stream.name, event.known[event.stream.name]):
            cuda.wait("Work.wait", event.known)
        if self._group.error is not None:
            raise self._group.error


class FakeNccl:
    """``torch.distributed.ProcessGroupNCCL`` on the device ``cuda``."""

    def __init__(self, cuda: FakeCuda, store: Any, rank: int, size: int, options: Options) -> None:
        assert os.environ[BLOCKING_WAIT] == "1", "torch would watch it, and end the process"
        self.cuda = cuda
        self.error: RuntimeError | None = None
        self._stream = torch.cuda.Stream()
        self._arguments = store, rank, size
        self._timeout = options._timeout
        self._gloo: Any = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work | None:
        (x,) = tensors
        return self._queue("all_reduce", self._add, [x], x, opts)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work | None:
        return self._queue("all_gather", self._collect, [out, x], out, opts)

    def abort(self) -> None:
        if self._gloo is not None:
            self._gloo.abort()

    # -- helpers

    def _group(self) -> Any:
        """Ranks meet at the first operation."""
        if self._gloo is None:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = self._timeout
            self._gloo = gloo(*self._arguments, options)
        return self._gloo

    def _add(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        self._carry(lambda group: group.allreduce([wide]))
        return x.copy_(wide)

    def _collect(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._carry(lambda group: group._allgather_base(out, x))
        return out

    def _carry(self, start: Callable[[Any], Any]) -> None:
        if self.error is None:
            try:
                start(self._group()).wait()
            except RuntimeError as error:
                self.error = error

    def _queue(
        self,
        name: str,
        do: Callable[..., torch.Tensor],
        args: list[torch.Tensor],
        written: torch.Tensor,
        opts: Any,
    ) -> Work | None:
        cuda = self.cuda
        for x in args:
            assert cuda.is_here(x) and x.is_contiguous(), (name, x.shape, x.stride())
        if opts is not None and not opts.asyncOp:
            self._compute(name, do, args, written)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._compute(name, do, args, written)
        return Work(self, self._stream.record_event())

    def _compute(
        self,
        name: str,
        do: Callable[..., torch.Tensor],
        args: list[torch.Tensor],
        written: torch.Tensor,
    ) -> None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.cuda.compute(name, do, tuple(args), {}, [written])


def make_fake_rank(module: str, name: str, report: str, *arguments: Any) -> ModelWorker:
    """The worker of another rank, which this function of a module makes, on a made-up device of its
    own. At its end it writes to the file ``report`` what the device has noticed."""
    from support.fake_cuda import FakeCuda

    triton_interpreter.repair()
    CudaPlatform.compiles = False
    cuda = FakeCuda()
    cuda.__enter__()
    worker: ModelWorker = getattr(importlib.import_module(module), name)(*arguments)
    end = worker.shutdown

    def shutdown() -> None:
        end()
        found = {"faults": cuda.faults, "num_replays": cuda.num_replays}
        Path(report).write_text(json.dumps(found | {"gpu": os.environ[VISIBLE_GPUS]}))

    worker.shutdown = shutdown  # type: ignore[method-assign]
    return worker
