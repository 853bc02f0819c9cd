"""Where the ranks of a group meet: made by the process of rank 0, opened by each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.ipc.sealed_files import SealedFile
from engine.parallel.collectives import Collectives
from engine.parallel.shared import SharedCollectives, SharedMemory

HOST = "127.0.0.1"


class Stoppable(Collectives, Protocol):
    """Operations of a rank that can be stopped."""

    @property
    def waited_ns(self) -> int:
        """Nanoseconds in which this rank has waited for others so far."""
        ...

    @property
    def num_begun(self) -> int:
        """Operations that this rank has begun, if others need to know it; else 0."""
        ...

    def limit(self, wait_seconds: float) -> None:
        """Set how long this rank waits for another one, if that can be changed."""
        ...

    def stop(self) -> None:
        """Let the operations in which a rank waits end, and later ones raise ``RankError``. Any
        thread may call it; it returns at once."""
        ...

    def close(self) -> None:
        """Free what this rank holds, once it calls no more operations and nothing that was recorded
        of them is left. May be repeated."""
        ...


@dataclass(frozen=True)
class Place:
    """What a rank needs to meet the others; it can be sent to its process.

    memory: of ranks on the CPUs of one machine; port: of the store at which others find each other.
    num_threads: of all ranks. wait_seconds: how long a rank waits for another one. hosts: addresses
    of the machines of the ranks, where they are several. on_gpus: each rank has a GPU. first: what
    the first of the ranks is called in errors."""

    size: int
    num_threads: int
    wait_seconds: float
    memory: SealedFile | None = None
    port: int = 0
    hosts: tuple[str, ...] = ()
    on_gpus: bool = True
    first: int = 0

    def open(self, rank: int) -> Stoppable:
        """The operations of a rank. Ranks on GPUs meet at the first of them, those on the CPUs of
        several machines here.

        Raises ``RankError`` if rank 0 does not answer or not all ranks come, ``ConfigError`` if
        this build of torch has no NCCL."""
        if self.memory is not None:
            return SharedCollectives(
                *(self.memory, rank, self.size),
                num_threads=self.num_threads,
                wait_seconds=self.wait_seconds,
                first=self.first,
            )
        from engine.parallel.distributed import TorchCollectives, connect
        from engine.parallel.nccl import NcclCollectives

        hosts = self.hosts or [HOST] * self.size
        limit = self.wait_seconds
        store = connect(hosts[0], self.port, self.size, wait_seconds=limit)
        if self.on_gpus:
            return NcclCollectives(store, rank, self.size, wait_seconds=limit)
        return TorchCollectives(store, rank, self.size, host=hosts[rank], wait_seconds=limit)


class Meeting:
    """Keeps what the ranks of a group share. ``place``: for each of them.

    hosts: addresses of the machines of the ranks; (): all are on this one. Raises ``OSError`` if
    processes cannot share memory on this system."""

    def __init__(
        self,
        size: int,
        *,
        num_threads: int,
        wait_seconds: float,
        on_gpus: bool,
        hosts: Sequence[str] = (),
    ) -> None:
        self._kept: Any = None
        self._memory = None if on_gpus or hosts else SharedMemory(size)
        if self._memory is not None:
            self.place = Place(size, num_threads, wait_seconds, memory=self._memory.handle)
            return
        from engine.parallel.distributed import serve

        self._kept = serve(hosts[0] if hosts else HOST, size, wait_seconds=wait_seconds)
        self.place = Place(
            size, num_threads, wait_seconds, None, self._kept.port, tuple(hosts), on_gpus
        )

    def close(self) -> None:
        """Let go of it. Ranks that have opened it keep it. May be repeated."""
        if self._memory is not None:
            self._memory.close()
        self._kept = None
