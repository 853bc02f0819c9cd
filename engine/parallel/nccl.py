"""``Collectives`` of GPUs over NCCL, with torch's process group.

A kernel of NCCL waits for the other ranks on the device, without limit. Torch has threads that
notice this, and then end the whole process; a group here is made without them. Instead, ``stop``
aborts the communicator: then the kernels end, and so do the host's waits for the device.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, Store

from engine.config.env import BLOCKING_WAIT, TRACE_BUFFER, environment_with
from engine.errors import ConfigError, RankError
from engine.parallel.distributed import WAIT_SECONDS, first_line

UNWATCHED = {BLOCKING_WAIT: "1", TRACE_BUFFER: "0"}
LOOK_SECONDS = 0.01  # between two looks for ranks that have not come
CLOSE_SECONDS = 2.0  # the communicator is left to the end of the process after this time
STOPPED = "the group has stopped"


class NcclCollectives:
    """One rank's operations on its GPU.

    They are put on the current stream and return at once; ``all_reduce`` and ``all_gather`` can be
    captured in CUDA graphs. Numbers are added in their own type; all ranks get the same bits. The
    first operation waits until all ranks have called one."""

    num_begun = 0  # nobody knows how far the device is
    waited_ns = 0
    """Nobody knows: kernels of NCCL wait on the device."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: str = "cuda",
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """store: of ``engine.parallel.distributed``. device: where tensors are; "cuda" is the
        current GPU. wait_seconds: for the other ranks to come.

        Raises ``ConfigError`` if this build of torch has no NCCL."""
        if not dist.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL, which ranks on GPUs need")
        self.rank = rank
        self.size = size
        self._store = store
        self._device = device
        self._wait_seconds = wait_seconds
        self._failed: RankError | None = None
        self._first: Any = None  # an operation that has ended: it knows errors of the communicator
        self._lock = threading.Lock()  # of ``_aborting``
        self._aborting: threading.Thread | None = None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=wait_seconds)
        with environment_with(UNWATCHED):
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        # On the current stream, not on one of the group's own that waits and is awaited.
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._start("all_reduce", self._group.allreduce, [x], self._reduce)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        rows = gathered.view(self.size, -1), x.view(1, -1)
        self._start("all_gather", self._group._allgather_base, *rows, self._gather)
        return gathered

    def barrier(self) -> None:
        here = torch.zeros(1, device=self._device)
        self.all_reduce(here).item()
        self.check()

    def check(self) -> None:
        if self._failed is None and self._first is not None:
            try:
                self._first.wait()
            except RuntimeError as error:
                raise self._failure("an operation", error) from error
        if self._failed is not None:
            raise self._failed

    def limit(self, wait_seconds: float) -> None:
        """Change nothing: operations have no limit. Who watches the ranks calls ``stop``."""

    def stop(self) -> None:
        """End the operations in which this rank waits; later ones raise ``RankError``. Any thread
        of this rank may call this. It returns at once: NCCL frees a communicator only after all
        recordings of it, which a thread that waits for the device may hold."""
        if self._failed is None:
            self._failed = RankError(STOPPED)
        self._abort()

    def close(self) -> None:
        """Free the communicator, once operations and recordings have ended."""
        if self._failed is None:
            torch.cuda.synchronize()  # other ranks may still read what this one has sent
            self._failed = RankError(STOPPED)
        self._abort().join(CLOSE_SECONDS)

    # -- helpers

    def _start(self, name: str, start: Any, *args: Any) -> None:
        if self._failed is not None:
            raise self._failed
        if self._first is None:
            self._meet()
        try:
            start(*args)
        except RuntimeError as error:
            raise self._failure(name, error) from error

    def _meet(self) -> None:
        """Wait for the other ranks, and connect with them. NCCL's own wait for a rank that does not
        come could not be stopped."""
        self._store.set(f"rank {self.rank}", "here")
        late = {f"rank {rank}" for rank in range(self.size)}
        until = time.monotonic() + self._wait_seconds
        while late := {rank for rank in late if not self._store.check([rank])}:
            if self._failed is not None:
                raise self._failed
            if time.monotonic() > until:
                raise RankError(f"{min(late)} has not come in {self._wait_seconds:g} s")
            time.sleep(LOOK_SECONDS)
        x = torch.zeros(1, device=self._device)
        try:
            self._first = self._group.allreduce([x])
            self._first.wait()
        except RuntimeError as error:
            raise self._failure("its first operation", error) from error

    def _failure(self, name: str, error: RuntimeError) -> RankError:
        """The error that has ended this group: the first one."""
        if self._failed is None:
            self._failed = RankError(f"rank {self.rank} failed in {name}: {first_line(error)}")
        return self._failed

    def _abort(self) -> threading.Thread:
        with self._lock:
            if self._aborting is None:

                def abort() -> None:
                    with suppress(RuntimeError):  # not freed in time
                        self._group.abort()

                self._aborting = threading.Thread(target=abort, name="abort-ranks", daemon=True)
                self._aborting.start()
            return self._aborting
