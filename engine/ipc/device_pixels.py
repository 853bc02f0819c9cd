"""Pixels in a device's memory, which another process reads without a copy.

    sender    lend(pixels) ──> DevicePixels ──message──> reader   open(handle), view
              collect() <────────── ticket in shared memory ───── give_back(handle)

The sender's memory is a pool of chunks, or an allocation for each picture. A handle is sent when
the copy to the device is complete, and returned when the device has read it: both sides first wait
for a mark in the device's queue of work. What is returned is found when memory is needed next.

A reader that dies returns nothing: the sender then closes, and with it ends every loan.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

from engine.errors import WireError
from engine.ipc.chunks import Chunk, Chunks
from engine.ipc.pixel_segments import check, check_places, layout
from engine.ipc.returns import Loan, Returns, ReturnsOfOwner
from engine.messages.media import DevicePixels, Pixels, SharedArray, SharedPixels

NUM_SLOTS = 4096  # pictures that are lent at the same time
MAX_SENDERS = 64  # whose memory a reader keeps open
Block = Any  # of a device's memory, allocated or opened


class Mark(Protocol):
    """A point in the device's queue of work."""

    def synchronize(self) -> None:
        """Block until the device has reached the mark."""
        ...


class DeviceMemory(Protocol):
    """The memory of one device, as one process uses it. Blocks are its own objects."""

    name: str
    """Identifies the device in all processes."""

    def allocate(self, num_bytes: int) -> Block:
        """Raises ``MemoryError``."""
        ...

    def free(self, block: Block) -> None:
        """Free a block that this process has allocated."""
        ...

    def export(self, block: Block) -> bytes:
        """A handle with which other processes open the block. Raises ``OSError``."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> Block:
        """Open a block of another process. Raises ``OSError``, also if it has fewer bytes."""
        ...

    def close(self, block: Block) -> None:
        """Close a block that ``open`` returned."""
        ...

    def write(self, block: Block, offset: int, data: bytes | memoryview) -> None:
        """Queue a copy to a block."""
        ...

    def view(self, block: Block, array: SharedArray) -> Any:
        """An array of a block, as a tensor on the device."""
        ...

    def mark(self) -> Mark:
        """A mark after all work queued so far."""
        ...


class NoRoom(Exception):
    """Pixels could not be put on the device. ``cause``: a name for metrics."""

    def __init__(self, cause: str, why: str) -> None:
        super().__init__(why)
        self.cause = cause


class Lent(NamedTuple):
    """What a loan holds: a chunk of the pool, or a block of its own."""

    loan: Loan
    chunk: Chunk | None
    block: Block


class DeviceSender:
    """Puts pixels into a device's memory for one reader. Thread-safe."""

    def __init__(
        self, memory: DeviceMemory, *, pool_bytes: int = 0, num_slots: int = NUM_SLOTS
    ) -> None:
        """pool_bytes: size of the pool; 0: each picture has an allocation of its own. Raises
        ``MemoryError`` or ``OSError`` if there is no pool of this size."""
        self._memory = memory
        self._lock = Lock()
        self._returns: Returns | None = Returns(num_slots)
        self._lent: dict[int, Lent] = {}  # by ticket
        self._chunks = Chunks(pool_bytes)
        self._pool: Block = None
        self._pool_handle = b""
        try:
            if pool_bytes:
                self._pool = memory.allocate(self._chunks.size)
                self._pool_handle = memory.export(self._pool)
        except BaseException:
            self.close()
            raise

    @property
    def num_lent(self) -> int:
        """Pictures that the reader had not returned when memory was last needed."""
        return len(self._lent)

    @property
    def free_chunks(self) -> list[Chunk]:
        """Free parts of the pool."""
        return self._chunks.free

    def lend(self, pixels: Pixels, *, in_pool: bool = True) -> DevicePixels:
        """Copy pixels to the device, and wait until they are there. in_pool: take a chunk of the
        pool, otherwise allocate memory.

        Raises ``NoRoom`` if there is no such memory, ``WireError`` for invalid arrays."""
        check(pixels)
        arrays, size = layout(pixels)
        size = max(size, 1)
        with self._lock:
            self._collect()
            if self._returns is None:
                raise NoRoom("closed", "the sender is closed")
            lent = self._take(size, self._returns, in_pool=in_pool)
            try:
                handle = self._pool_handle if lent.chunk else self._memory.export(lent.block)
                begin = lent.chunk.offset if lent.chunk else 0
                for name, array in arrays.items():
                    self._memory.write(lent.block, begin + array.offset, pixels[name].data)
                self._memory.mark().synchronize()
            except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError
                self._end(lent)
                raise NoRoom("copy", f"pixels cannot be copied to the device: {error}") from error
            self._lent[lent.loan.ticket] = lent
            placed = {
                name: SharedArray(array.dtype, array.shape, begin + array.offset)
                for name, array in arrays.items()
            }
            return DevicePixels(
                device=self._memory.name,
                memory=handle,
                size=self._chunks.size if lent.chunk else size,
                stays=lent.chunk is not None,
                arrays=placed,
                slot=lent.loan.slot,
                ticket=lent.loan.ticket,
                returns=self._returns.handle,
            )

    def collect(self) -> None:
        """Free what the reader has returned."""
        with self._lock:
            self._collect()

    def is_lent(self, handle: DevicePixels) -> bool:
        """True if the reader had not returned these pixels at the last ``collect``."""
        return handle.ticket in self._lent

    def close(self) -> None:
        """End all loans and free the memory, when the reader has ended or is to forget it. A
        second call does nothing."""
        with self._lock:
            if self._returns is None:
                return
            self._returns.close()  # first, since the reader then reads no more memory
            for lent in self._lent.values():
                self._end(lent)
            self._lent.clear()
            self._returns = None
            if self._pool is not None:
                self._memory.free(self._pool)
                self._pool = None

    # -- helpers

    def _take(self, size: int, returns: Returns, *, in_pool: bool) -> Lent:
        loan = returns.lend()
        if loan is None:
            raise NoRoom("slots", f"all {len(self._lent)} slots for pictures are in use")
        try:
            if not in_pool:
                return Lent(loan, None, self._memory.allocate(size))
            if (chunk := self._chunks.take(size)) is not None:
                return Lent(loan, chunk, self._pool)
        except (OSError, MemoryError) as error:
            returns.end(loan)
            raise NoRoom("memory", f"the device has no {size} bytes: {error}") from error
        returns.end(loan)
        raise NoRoom("pool_full", f"the pool of {self._chunks.size} bytes has no free {size}")

    def _collect(self) -> None:
        if self._returns is None or not self._lent:
            return
        for ticket, lent in list(self._lent.items()):
            if self._returns.is_returned(lent.loan):
                del self._lent[ticket]
                self._end(lent)

    def _end(self, lent: Lent) -> None:
        assert self._returns is not None
        self._returns.end(lent.loan)
        if lent.chunk is None:
            self._memory.free(lent.block)
        else:
            self._chunks.give_back(lent.chunk)


@dataclass(eq=False)
class _Sender:
    """What a reader has open of one sender."""

    returns: ReturnsOfOwner
    pools: dict[bytes, Block]


class DeviceReader:
    """Reads pixels that other processes have put into a device's memory. Only one thread uses
    it. Pools stay open until they end and pixels of a new sender come."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._senders: dict[tuple[int, int, int], _Sender] = {}  # by pid, fd and inode of returns
        self._own: dict[tuple[int, int, int, int], Block] = {}  # by these and ticket
        self._marks: dict[tuple[int, int, int, int], Mark] = {}

    def __len__(self) -> int:
        """Number of blocks that are open."""
        return len(self._own) + sum(len(sender.pools) for sender in self._senders.values())

    @property
    def name(self) -> str:
        """The name of the device."""
        return self._memory.name

    def open(self, handle: DevicePixels) -> Mapping[str, Any]:
        """The arrays of a handle as tensors on the device. They are valid until ``give_back``.

        Raises ``WireError`` if the handle is invalid, its sender has ended, or the device cannot
        open it."""
        if handle.device != self._memory.name:
            raise WireError(f"pixels are on {handle.device!r:.80}, this is {self._memory.name!r}")
        check_places(handle.arrays, handle.size)
        sender = self._sender(handle.returns)
        if not sender.returns.has_owner:  # what is still open here may be free there
            raise WireError("the sender of the pixels has ended")
        try:
            if handle.stays:
                block = sender.pools.get(handle.memory)
                if block is None:
                    block = sender.pools[handle.memory] = self._open(handle)
            else:
                block = self._own.get(_key(handle))
                if block is None:
                    block = self._own[_key(handle)] = self._open(handle)
            return {name: self._memory.view(block, each) for name, each in handle.arrays.items()}
        except (OSError, MemoryError) as error:
            raise WireError(f"pixels on the device cannot be opened: {error}") from error

    def has_read(self, handle: DevicePixels) -> None:
        """Note that all work that reads a handle's arrays has been queued."""
        self._marks[_key(handle)] = self._memory.mark()

    def give_back(self, handle: DevicePixels) -> None:
        """Return a handle's memory to the sender, when the device has read it. An invalid handle is
        ignored."""
        if (mark := self._marks.pop(_key(handle), None)) is not None:
            mark.synchronize()
        if (block := self._own.pop(_key(handle), None)) is not None:
            self._memory.close(block)
        with suppress(WireError):  # the sender has ended, so there is nothing to return
            self._sender(handle.returns).returns.give_back(Loan(handle.slot, handle.ticket))

    def forget_ended(self) -> None:
        """Close memory of senders that have ended."""
        for key, sender in list(self._senders.items()):
            if not sender.returns.has_owner:
                self._forget(key)

    # -- helpers

    def _sender(self, returns: SharedPixels) -> _Sender:
        key = (returns.pid, returns.fd, returns.inode)
        sender = self._senders.get(key)
        if sender is None:
            self.forget_ended()
            if len(self._senders) >= MAX_SENDERS:
                raise WireError(f"pixels of more than {MAX_SENDERS} senders")
            sender = self._senders[key] = _Sender(ReturnsOfOwner(returns), {})
        return sender

    def _open(self, handle: DevicePixels) -> Block:
        return self._memory.open(handle.memory, handle.size)

    def _forget(self, key: tuple[int, int, int]) -> None:
        sender = self._senders.pop(key)
        for read in [each for each in self._marks if each[:3] == key]:
            self._marks.pop(read).synchronize()
        for block in sender.pools.values():
            self._memory.close(block)
        for own in [each for each in self._own if each[:3] == key]:
            self._memory.close(self._own.pop(own))
        sender.returns.close()


def _key(handle: DevicePixels) -> tuple[int, int, int, int]:
    returns = handle.returns
    return (returns.pid, returns.fd, returns.inode, handle.ticket)
