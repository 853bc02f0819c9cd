"""MooncakeTransport: KV blocks travel with Mooncake's transfer engine.

Mooncake neither encrypts nor asks for a secret: whoever reaches its port can read and write the
memory that is lent to it. Use it in a network that only trusted machines can reach. What it
delivers is checked: checksums come over the encrypted connection.

It has no time limits that suit a request, so each transfer runs in a thread that can be left alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.kv_transfer.peers.transports import Lent

MAX_THREADS = 16  # transfers at the same time, with those that were left alone
POLL_SECONDS = 0.05  # between two looks whether a transfer is over
PACKAGES = (
    "pip install mooncake-transfer-engine-non-cuda, and on Debian apt install libibverbs1 "
    "libnl-3-200 libnl-route-3-200"
)


class MooncakeTransport:
    """A ``Transport`` between processes that have Mooncake."""

    name = "mooncake"

    def __init__(self, host: str, *, protocol: str = "tcp", device: str = "") -> None:
        """host: this machine's address, as other processes reach it. protocol, device: as Mooncake
        names them. Raises ``ConfigError`` if Mooncake is not installed or does not start."""
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(f"Mooncake cannot be imported ({error}); {PACKAGES}") from error
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise ConfigError(
                f"Mooncake does not start with host {host!r}, protocol {protocol!r} and device "
                f"{device!r}; its log on standard error says why"
            )
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Job | None]] = []
        self._num_threads = 0
        self._is_closed = False

    @property
    def session(self) -> str:
        return self._session

    def lend(self, num_bytes: int) -> Lent:
        """Memory that other processes can read, until nothing refers to ``data``."""
        data = np.zeros(num_bytes, np.uint8)
        address = data.ctypes.data
        if self._engine.register_memory(address, num_bytes) != 0:
            raise OSError(f"Mooncake refused {num_bytes} bytes of memory")
        freed = weakref.finalize(data, self._engine.unregister_memory, address)
        freed.atexit = False
        return Lent(data, address)

    def read(
        self, session: str, address: int, into: NDArray[np.uint8], is_over: Callable[[], bool]
    ) -> bool:
        """``into``: a part of memory that was lent."""
        job = Job(session, address, into, threading.Event(), [])
        with self._lock:
            if self._is_closed:
                return False
            queue = self._idle.pop() if self._idle else self._start()
        if queue is None:
            return False
        queue.put(job)
        while not job.is_done.wait(POLL_SECONDS):
            if is_over():
                return False
        return job.status == [0]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for queue in self._idle:
                queue.put(None)
            self._idle.clear()

    def _start(self) -> SimpleQueue[Job | None] | None:
        """A further thread; ``None`` if there are too many."""
        if self._num_threads == MAX_THREADS:
            return None
        self._num_threads += 1
        queue: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(queue,), name="mooncake", daemon=True).start()
        return queue

    def _run(self, queue: SimpleQueue[Job | None]) -> None:
        while (job := queue.get()) is not None:
            size = job.into.nbytes
            job.status.append(
                self._engine.transfer_sync_read(
                    job.session, job.into.ctypes.data, job.address, size
                )
            )
            with self._lock:
                if self._is_closed:
                    queue.put(None)
                self._idle.append(queue)
            job.is_done.set()
            del job  # its memory may be freed


class Job(NamedTuple):
    """A transfer. ``status``: empty, then what Mooncake returned."""

    session: str
    address: int
    into: NDArray[np.uint8]
    is_done: threading.Event
    status: list[int]
