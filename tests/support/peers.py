"""Producers and consumers of KV blocks: a reader over a dict, and engines in other processes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from engine.ipc.address import tcp_address
from engine.kv_transfer.peers.mooncake import MooncakeTransport
from engine.kv_transfer.peers.server import BlockServer
from engine.kv_transfer.stores import Rows, StoreIdentity
from support.patience import WAIT_SECONDS

SECRET = "a secret of the test's engines"
BLOCK_BYTES = 4096


def identity_of(namespace: str = "a", block_bytes: int = BLOCK_BYTES) -> StoreIdentity:
    return StoreIdentity(namespace, block_bytes)


def keys_of(count: int, of: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{of}{index}".encode()).digest() for index in range(count)]


def block_of(key: bytes, block_bytes: int = BLOCK_BYTES) -> Rows:
    """The content of the block with this key, in all processes."""
    return np.random.default_rng(list(key)).integers(0, 256, block_bytes, dtype=np.uint8)


class Blocks:
    """A reader of the blocks whose keys are in ``present``; all, if it is ``None``. ``on_read`` is
    called with the number of a block, counted over all reads, before it is copied."""

    def __init__(
        self,
        present: set[bytes] | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
        on_read: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.present = present
        self.num_read = 0
        self._block_bytes = block_bytes
        self._on_read = on_read

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.present is None or key in self.present for key in keys]

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        found = self.contains(keys)
        for key, row, one in zip(keys, rows, found, strict=True):
            row[: self._block_bytes // 2] = 77  # what is not found has arbitrary content
            self._on_read(self.num_read)
            if one:
                row[:] = block_of(key, self._block_bytes)
            self.num_read += 1
        return found


def empty_rows(count: int, block_bytes: int = BLOCK_BYTES) -> Rows:
    return np.zeros((count, block_bytes), np.uint8)


def wrong(keys: Sequence[bytes], rows: Rows, found: Sequence[bool]) -> list[int]:
    """Places of blocks that were found with other content than they must have."""
    return [
        place
        for place, key in enumerate(keys)
        if found[place] and not np.array_equal(rows[place], block_of(key, rows.shape[1]))
    ]


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something becomes true."""
    give_up_at = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def another_process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs ``main`` of this file, and the first line that it writes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.peers", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def main(address: str, act: str, at: str, transport: str = "") -> None:
    """Serve all blocks at an address, or at a socket file if it is "". act: what is done to this
    process when block ``at`` is read. transport: "mooncake" or none."""

    def on_read(number: int) -> None:
        if act and number == int(at):
            os.kill(os.getpid(), getattr(signal, act))
            time.sleep(1.0)  # this thread may run for a moment until it is stopped

    server = BlockServer(
        Blocks(on_read=on_read),
        identity_of(),
        tcp_address(address, SECRET) if address else None,
        transport=MooncakeTransport("127.0.0.1") if transport else None,
    )
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
