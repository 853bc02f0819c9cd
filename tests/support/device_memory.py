"""Memory of a device that is not there, in an arena of the host.

It has what goes wrong with a device's memory: who may touch which bytes is a question of vector
clocks (Lamport 1978, Mattern 1989) of the host and of every stream, so that a race is found by what
orders two accesses, not by luck; and what is freed is handed out again at once, as torch's caching
allocator does for the stream that it was allocated for.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

HOST = "host"
PINNED, POOL = "pinned", "caching allocator"  # pools; each group of graphs has one more
ARENA_BYTES = 1 << 30  # of addresses; pages are taken when they are written
SMALLEST = 512  # bytes of a block, as torch's
POISON = 0xFF  # NaN in every float, -1 in every integer
Home = tuple[str, str]
"""A pool and the stream that its memory is for."""


class Access(NamedTuple):
    """Something that touched memory: when by its thread's clock, and from where in the code."""

    thread: str
    time: int
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} on {self.thread} ({self.where})"


class Clocks:
    """What each thread (the host, every stream) knows to be done of each."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {}

    @property
    def threads(self) -> list[str]:
        return list(self._known)

    def tick(self, thread: str) -> int:
        """The time of what the thread does next."""
        mine = self._known.setdefault(thread, {})
        mine[thread] = mine.get(thread, 0) + 1
        return mine[thread]

    def learn(self, thread: str, known: Mapping[str, int]) -> None:
        """What the thread does from now on comes behind all this."""
        mine = self._known.setdefault(thread, {})
        for other, time in known.items():
            if mine.get(other, 0) < time:
                mine[other] = time

    def known(self, thread: str) -> dict[str, int]:
        return dict(self._known.get(thread, {}))

    def knows(self, thread: str, other: str, time: int) -> bool:
        """Whether what the other did then comes before all that the thread does from now on."""
        return thread == other or self._known.get(thread, {}).get(other, 0) >= time


class Span(NamedTuple):
    """Bytes with the same past: the last write, and the last read of each thread since."""

    begin: int
    end: int
    write: Access | None
    reads: dict[str, Access]


class Block:
    """A piece of the arena, which is handed out whole, again and again, and knows its past."""

    def __init__(self, base: int, size: int, home: Home) -> None:
        self.base, self.size, self.home = base, size, home
        self.num_bytes = 0  # that were asked for
        self.serial = 0  # of the tensor that has it, or had it last
        self.is_live = False
        self.users: set[str] = set()  # other streams, by record_stream
        self.awaited: dict[str, int] = {}  # once freed: what the host must know before it is reused
        self._spans = [Span(base, base + size, None, {})]

    @property
    def end(self) -> int:
        """Behind the last byte that was asked for; tensors of a graph share a block one by one."""
        return self.base + (self.num_bytes if self.home[0] in (POOL, PINNED) else self.size)

    def poison(self) -> None:
        ctypes.memset(self.base, POISON, self.size)

    def touch(self, begin: int, end: int, access: Access, *, is_write: bool) -> Iterator[Access]:
        """Enter an access; yields every earlier one that must come before it."""
        spans: list[Span] = []
        for span in self._spans:
            if span.end <= begin or span.begin >= end:
                spans.append(span)
                continue
            low, high = max(begin, span.begin), min(end, span.end)
            if span.begin < low:
                spans.append(Span(span.begin, low, span.write, dict(span.reads)))
            if not is_write:
                reads = {**span.reads, access.thread: access}
                spans.append(Span(low, high, span.write, reads))
            elif not spans or spans[-1].write is not access:
                spans.append(Span(low, high, access, {}))
            else:
                spans[-1] = spans[-1]._replace(end=high)
            if high < span.end:
                spans.append(Span(high, span.end, span.write, dict(span.reads)))
            if span.write is not None:
                yield span.write
            if is_write:
                yield from span.reads.values()
        self._spans = spans

    def last_times(self) -> dict[str, int]:
        """The last access of each thread."""
        times: dict[str, int] = {}
        for span in self._spans:
            for access in (span.write, *span.reads.values()):
                if access is not None:
                    times[access.thread] = max(times.get(access.thread, 0), access.time)
        return times


Range = tuple[Block, int, int]
"""Addresses within a block."""


class Memory:
    """The allocator. Memory is reused by its own stream alone: at once, or, if other streams use it
    (``Block.users``), when the host knows that they are done."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._arena = mmap.mmap(-1, ARENA_BYTES)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self._end = self._begin
        self._blocks: list[Block] = []
        self._bases: list[int] = []
        self._free: dict[tuple[Home, int], list[Block]] = {}
        self._awaited: list[Block] = []
        self._serial = 0
        self.allocated = self.peak = 0  # bytes on the device

    @property
    def reserved(self) -> int:
        return self._end - self._begin

    def allocate(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, home: Home
    ) -> torch.Tensor:
        """A tensor full of poison. Its memory is free again when the last view of it is gone."""
        last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        num_bytes = 0 if 0 in shape else (last + 1) * dtype.itemsize
        block = self._take(max(SMALLEST, 1 << max(num_bytes - 1, 0).bit_length()), home)
        self._serial += 1
        block.serial, block.num_bytes, block.is_live = self._serial, num_bytes, True
        block.poison()
        if home[0] != PINNED:
            self.allocated += block.size
            self.peak = max(self.peak, self.allocated)
        storage = _storage(block.base, block.size, lambda: self._release(block))
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes, without keeping them."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        storage, offset = _storage(block.base, block.size), tensor.storage_offset()
        shape, stride = tuple(tensor.shape), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, offset, shape, stride)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """None for ordinary memory of the host."""
        base = tensor.untyped_storage().data_ptr()
        return self.block_at(base) if self._begin <= base < self._end else None

    def block_at(self, address: int) -> Block | None:
        if not self._begin <= address < self._end:
            return None
        return self._blocks[bisect.bisect_right(self._bases, address) - 1]

    def free_of(self, pool: str) -> Iterator[Block]:
        """Memory of a pool that belongs to no tensor."""
        return (block for block in self._blocks if block.home[0] == pool and not block.is_live)

    def _take(self, size: int, home: Home) -> Block:
        waiting = []
        for block in self._awaited:
            is_done = all(self._clocks.knows(HOST, *one) for one in block.awaited.items())
            if is_done:
                self._free.setdefault((block.home, block.size), []).append(block)
            else:
                waiting.append(block)
        self._awaited = waiting
        if free := self._free.get((home, size)):
            return free.pop()
        assert self._end + size <= self._begin + ARENA_BYTES, "the arena is full"
        block = Block(self._end, size, home)
        self._blocks.append(block)
        self._bases.append(block.base)
        self._end += size
        return block

    def _release(self, block: Block) -> None:
        block.is_live = False
        if block.home[0] == PINNED:  # whose allocator looks at every copy by itself
            block.awaited = block.last_times()
        else:
            self.allocated -= block.size
            block.awaited = {user: self._clocks.known(user).get(user, 0) for user in block.users}
        block.users.clear()
        self._awaited.append(block)


def _storage(
    base: int, size: int, when_gone: Callable[[], None] | None = None
) -> torch.UntypedStorage:
    memory = (ctypes.c_uint8 * size).from_address(base)
    if when_gone is not None:
        weakref.finalize(memory, when_gone).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
