"""``Collectives`` over torch.distributed with gloo, between hosts without GPUs.

Groups are made directly, not as torch's process-wide default group, which belongs to the program
that uses the engine.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.errors import RankError

WAIT_SECONDS = 600.0


def serve(host: str, size: int, *, wait_seconds: float = WAIT_SECONDS) -> TCPStore:
    """Start the store at which ``size`` ranks find each other; rank 0's process keeps it. ``port``
    of the result is where the others connect. It listens at ``host`` only. Raises ``RankError`` if
    it cannot."""
    limit = timedelta(seconds=wait_seconds)
    try:
        with socket.create_server((host, 0), backlog=size) as listener:
            port, fd = listener.getsockname()[1], listener.detach()
        return TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
    except (OSError, dist.DistError) as error:
        raise RankError(f"rank 0 cannot listen at {host}: {first_line(error)}") from error


def connect(host: str, port: int, size: int, *, wait_seconds: float = WAIT_SECONDS) -> Store:
    """Connect to the store of rank 0. Raises ``RankError`` if it does not answer."""
    limit = timedelta(seconds=wait_seconds)
    try:
        return TCPStore(host, port, size, is_master=False, timeout=limit)
    except dist.DistError as error:
        raise RankError(f"rank 0 does not answer at {host}:{port}: {first_line(error)}") from error


class TorchCollectives:
    """One rank's operations. All ranks get the same bits; 16-bit floats are added in float32."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str = "127.0.0.1",
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """store: of ``serve`` or ``connect``; host: address of this machine that the others reach.
        Raises ``RankError`` if not all ranks come."""
        self.rank = rank
        self.size = size
        self.num_begun = 0
        """Operations that this rank has begun."""
        self._failed: Exception | None = None
        self.waited_ns = 0
        """Nanoseconds in operations so far, those of computing included."""
        gloo: Any = dist.ProcessGroupGloo  # torch describes a part of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=wait_seconds)
        try:
            self._group: Any = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise RankError(f"not all of {size} ranks have connected: {first_line(error)}") from (
                error
            )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            self._finish("all_reduce", lambda: self._group.allreduce([x]))
            return x
        return x.copy_(self.all_reduce(x.float()))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        rows = gathered.view(self.size, -1), x.view(1, -1)
        self._finish("all_gather", lambda: self._group._allgather_base(*rows))
        return gathered

    def barrier(self) -> None:
        self._finish("barrier", lambda: self._group.barrier())

    def check(self) -> None:
        if self._failed is not None:
            raise RankError(str(self._failed)) from self._failed

    def limit(self, wait_seconds: float) -> None:
        """Change nothing: the limit of a group is fixed."""

    def stop(self) -> None:
        """Let the operations in which this rank waits raise ``RankError``, as far as the backend
        can. Any thread of this rank may call this."""
        self._group.abort()

    def close(self) -> None:
        """Change nothing: the group ends with this object."""

    def _finish(self, name: str, start: Any) -> None:
        self.check()
        self.num_begun += 1
        began = time.perf_counter_ns()
        try:
            start().wait()
            self.waited_ns += time.perf_counter_ns() - began
        except RuntimeError as error:
            self._failed = RankError(f"rank {self.rank} failed in {name}: {first_line(error)}")
            raise self._failed from error


def first_line(error: Exception) -> str:
    """The first line of an error's message; torch adds a traceback."""
    return str(error).strip().partition("\n")[0]
