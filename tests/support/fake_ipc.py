"""A made-up device whose memory processes pass to one another: files of a directory, mapped.

Copies are queued, and done when the host waits for a later mark, as late as a device may do
them. What is freed is overwritten first, so a late reader reads nonsense.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from engine.messages.media import SharedArray

GARBAGE = b"\xab"


@dataclass(eq=False)
class FakeBlock:
    path: Path
    memory: mmap.mmap


@dataclass(eq=False)
class FakeDevice:
    """The device as one process sees it. ``num_bytes``: what this process may allocate."""

    directory: Path
    num_bytes: int = 1 << 30
    name: str = "fake-0"
    has_tensors: bool = False
    """``view`` returns tensors, otherwise numpy's arrays."""
    num_allocated: int = 0
    num_written: int = 0
    num_opened: int = 0
    """These count calls; ``blocks`` and ``opened`` are what there is now."""
    blocks: set[FakeBlock] = field(default_factory=set)
    opened: set[FakeBlock] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    queue: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0

    def allocate(self, num_bytes: int) -> FakeBlock:
        if sum(len(block.memory) for block in self.blocks) + num_bytes > self.num_bytes:
            raise MemoryError(f"{num_bytes} of {self.num_bytes} bytes")
        path = self.directory / uuid4().hex
        path.write_bytes(GARBAGE * num_bytes)
        block = FakeBlock(path, self._map(path))
        self.blocks.add(block)
        self.num_allocated += 1
        return block

    def free(self, block: FakeBlock) -> None:
        self.blocks.remove(block)
        block.path.write_bytes(GARBAGE * len(block.memory))
        block.path.unlink()
        self._unmap(block)

    def export(self, block: FakeBlock) -> bytes:
        return block.path.name.encode()

    def open(self, handle: bytes, num_bytes: int) -> FakeBlock:
        path = self.directory / handle.decode()
        if path.stat().st_size < num_bytes:
            raise OSError(errno.EINVAL, f"a block of {path.stat().st_size} bytes, not {num_bytes}")
        block = FakeBlock(path, self._map(path))
        self.opened.add(block)
        self.num_opened += 1
        return block

    def close(self, block: FakeBlock) -> None:
        self.opened.remove(block)
        self._unmap(block)

    def write(self, block: FakeBlock, offset: int, data: bytes | memoryview) -> None:
        def copy() -> None:
            block.memory[offset : offset + len(data)] = bytes(data)

        self.num_written += 1
        self.later(copy)

    def view(self, block: FakeBlock, array: SharedArray) -> Any:
        count = prod(array.shape)
        flat = np.frombuffer(block.memory, array.dtype, count, array.offset) if count else ()
        values = np.asarray(flat, array.dtype).reshape(array.shape)
        if not self.has_tensors:
            return values
        import torch  # takes seconds, and most tests do without

        return torch.from_numpy(values)

    def mark(self) -> FakeMark:
        return FakeMark(self, self.num_done + len(self.queue))

    def later(self, work: Callable[[], object]) -> None:
        """Queue work of the device."""
        self.queue.append(work)

    def _map(self, path: Path) -> mmap.mmap:
        fd = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def _unmap(self, block: FakeBlock) -> None:
        try:
            block.memory.close()
        except BufferError:
            self.faults.append("memory was closed while a tensor of it was in use")


@dataclass
class FakeMark:
    device: FakeDevice
    upto: int

    def synchronize(self) -> None:
        while self.device.num_done < self.upto:
            self.device.num_done += 1
            self.device.queue.pop(0)()
