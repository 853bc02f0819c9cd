"""Small blocks for tests of the disk tier, whose contents follow from their keys."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.kv_transfer.disk import DiskStore, open_disk_store
from engine.kv_transfer.stores import StoreIdentity

BLOCK_BYTES = 500
IDENTITY = StoreIdentity("ab" * 32, BLOCK_BYTES)
PLENTY = 8 << 20
NEVER = 1e6
"""Seconds between refreshes, in tests that call ``refresh`` themselves."""


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def rows_of(keys: Sequence[bytes], version: int = 0) -> NDArray[np.uint8]:
    texts = [hashlib.shake_128(key + b"%d" % version).digest(BLOCK_BYTES) for key in keys]
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(keys), BLOCK_BYTES)


def opened(
    path: Path,
    most_bytes: int = PLENTY,
    identity: StoreIdentity = IDENTITY,
    refresh_seconds: float = NEVER,
) -> DiskStore:
    return open_disk_store(path, most_bytes, identity, refresh_seconds=refresh_seconds)


def put(store: DiskStore, numbers: Iterable[int], version: int = 0) -> list[bool]:
    keys = [key_of(number) for number in numbers]
    return store.write(keys, rows_of(keys, version))


def has(store: DiskStore, numbers: Iterable[int]) -> list[bool]:
    return store.contains([key_of(number) for number in numbers])


def get(store: DiskStore, numbers: Iterable[int], version: int = 0) -> list[bool]:
    """Which blocks the store supplies. Fails if one has other bytes than those of its key."""
    keys = [key_of(number) for number in numbers]
    rows = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
    found = store.read(keys, rows)
    assert (rows[found] == rows_of(keys, version)[found]).all()
    return found


def segments_in(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.suffix == ".kv")


def bytes_in(path: Path) -> int:
    """Bytes of all files. Files may vanish meanwhile."""
    total = 0
    with os.scandir(path) as found:
        for each in found:
            try:
                total += each.stat().st_size
            except FileNotFoundError:
                continue
    return total
