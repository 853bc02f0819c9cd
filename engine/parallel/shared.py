"""``Collectives`` of processes of one machine, in memory that they share.

The memory has no name: it is a sealed file of the process that makes the group, and is freed when
the last rank ends.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import RankError
from engine.ipc.sealed_files import SealedFile, SharedFile, open_sealed
from kernels.cpu.collectives import DIFFERENT, LATE, WAIT_SECONDS, SharedRanks, shared_bytes

NAME = "metronome-ranks"


class SharedMemory(SharedFile):
    """The memory of a group of ``size`` ranks. ``handle``: with which ranks open it.

    Raises ``OSError`` if there is no anonymous memory that other processes can open."""

    def __init__(self, size: int) -> None:
        super().__init__(NAME, shared_bytes(size))


class SharedCollectives:
    """One rank's operations.

    num_threads: computing threads of all ranks of this machine; if they are more than the
    processors, ranks do not spin while they wait. wait_seconds: how long a rank waits for another
    one. Raises ``WireError`` if the memory cannot be opened."""

    num_begun = 0  # the others see in the memory for whom they wait

    def __init__(
        self,
        memory: SealedFile | NDArray[np.uint8],
        rank: int,
        size: int,
        *,
        num_threads: int,
        wait_seconds: float = WAIT_SECONDS,
        first: int = 0,
    ) -> None:
        """memory: handle of the group's memory, or the memory, if ranks are threads. first: what
        the first of the ranks is called in errors."""
        self.rank = rank
        self.size = size
        self._wait_seconds = wait_seconds
        self._first = first
        self._ranks = SharedRanks(
            _opened(memory) if isinstance(memory, SealedFile) else memory,
            rank,
            size,
            num_threads=num_threads,
            wait_seconds=wait_seconds,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), (x.shape, x.stride())
        self._ranks.all_reduce(x)
        self.check()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), (x.shape, x.stride())
        gathered = self._ranks.all_gather(x)
        self.check()
        return gathered

    def barrier(self) -> None:
        self._ranks.barrier()
        self.check()

    def check(self) -> None:
        if self._ranks.has_failed:
            raise RankError(self._reason())

    @property
    def waited_ns(self) -> int:
        """Nanoseconds in which this rank has waited for others so far."""
        return self._ranks.waited_ns

    def limit(self, wait_seconds: float) -> None:
        """Set how long this rank waits for another one, from the next operation on."""
        self._wait_seconds = wait_seconds
        self._ranks.limit(wait_seconds)

    def stop(self) -> None:
        """Let the operations in which a rank waits raise ``RankError``, in all ranks. Any thread of
        any rank may call this."""
        self._ranks.stop()

    def close(self) -> None:
        """Let go of the memory, which is freed when the last rank has. The group counts as stopped
        then."""
        self._ranks = SharedRanks(np.zeros(shared_bytes(1), np.uint8), 0, 1, num_threads=1)
        self._ranks.stop()

    def _reason(self) -> str:
        failure = self._ranks.failure
        assert failure is not None
        code, other, mine, theirs, number = failure
        own, other = self._first + self.rank, self._first + other
        if code == DIFFERENT:
            return (
                f"rank {own} computes {mine}, but rank {other} computes {theirs} (meeting "
                f"{number}): all ranks must do the same"
            )
        if code == LATE:
            return (
                f"rank {other} has not answered for {self._wait_seconds:g} s: rank {own} "
                f"waited for it in {mine} (meeting {number})"
            )
        return (
            f"the group has stopped: rank {own} waited for rank {other} in {mine} (meeting "
            f"{number})"
        )


def _opened(handle: SealedFile) -> NDArray[np.uint8]:
    fd = open_sealed(handle, NAME, to_write=True)
    try:
        memory = np.frombuffer(mmap.mmap(fd, handle.size), np.uint8)
    finally:
        os.close(fd)  # the mapping keeps the file
    np.add.reduce(memory[:: mmap.PAGESIZE])  # the first step need not wait for pages
    return memory
