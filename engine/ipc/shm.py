"""Shared memory without a name: it dies with the last process that holds its descriptor.

    create ─> Arena (owner: lends ranges)   ── Place(offset, length, generation) ──>   ArenaReader
                 ▲                                                                         │
                 └────────────── release(generation), the receiver's acknowledgement ──────┘

Each range begins with its generation, a number that is never used twice; a reader compares it, so
that an outdated place is an error and never gives the bytes of another message.
"""

from __future__ import annotations

import bisect
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterable

import msgspec

from engine.errors import WireError

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<Q")  # the generation of a range, in front of its bytes
ALIGNMENT = 64  # bytes; a cache line, and what tensors want


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where bytes lie in their sender's arena. ``offset`` is that of the range, header included."""

    offset: int
    length: int  # bytes, without the header
    generation: int


class Ranges:
    """Which parts of ``size`` bytes are free: best fit, neighbours merge. Touches no memory."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)] if size else []  # (offset, length), by offset

    @property
    def num_free(self) -> int:
        """Bytes that are free, in however many pieces."""
        return sum(length for _, length in self._free)

    def take(self, length: int) -> int | None:
        """The offset of ``length`` bytes (rounded up to ``ALIGNMENT``); None if none fit."""
        wanted = aligned(length)
        fitting = [(size, at) for at, (_, size) in enumerate(self._free) if size >= wanted]
        if not fitting:
            return None
        size, at = min(fitting)
        offset = self._free[at][0]
        self._free[at : at + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
        return offset

    def give(self, offset: int, length: int) -> None:
        """Give back what was taken."""
        size = aligned(length)
        at = bisect.bisect(self._free, (offset, 0))
        if at < len(self._free) and offset + size == self._free[at][0]:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            at -= 1
            before, length_before = self._free.pop(at)
            offset, size = before, size + length_before
        self._free.insert(at, (offset, size))


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory its owner writes into and lends in ranges. ``name`` is for the log only."""

    def __init__(self, fd: int, name: str) -> None:
        self.size = os.fstat(fd).st_size
        self.name = name
        self._memory = mmap.mmap(fd, self.size)
        self._ranges = Ranges(self.size)
        self._lent: dict[int, tuple[int, int]] = {}  # generation -> offset, length with header
        self._generation = 0
        self._has_said_full = False

    @property
    def num_lent(self) -> int:
        """Ranges that no receiver has acknowledged yet."""
        return len(self._lent)

    @property
    def num_free_bytes(self) -> int:
        return self._ranges.num_free

    def put(self, data: bytes | memoryview) -> Place | None:
        """Copy ``data`` in. ``None``: there is no room, and it has to travel another way."""
        length = HEADER.size + len(data)
        offset = self._ranges.take(length)
        if offset is None:
            self._say_full(len(data))
            return None
        self._generation += 1
        self._lent[self._generation] = offset, length
        HEADER.pack_into(self._memory, offset, self._generation)
        self._memory[offset + HEADER.size : offset + length] = data
        return Place(offset, len(data), self._generation)

    def release(self, generations: Iterable[int]) -> None:
        """Take ranges back. Raises ``WireError`` for one that is not lent."""
        for generation in generations:
            if generation not in self._lent:
                raise WireError(f"range {generation} of the {self.name} is not lent")
            offset, length = self._lent.pop(generation)
            HEADER.pack_into(self._memory, offset, 0)
            self._ranges.give(offset, length)

    def close(self) -> None:
        self._memory.close()

    def _say_full(self, num_bytes: int) -> None:
        if not self._has_said_full:
            self._has_said_full = True
            logger.warning(
                "%d bytes do not fit the %s (%d of %d bytes are lent); such messages go through "
                "the socket, which is slower. This is said once",
                num_bytes,
                self.name,
                self.size - self.num_free_bytes,
                self.size,
            )


class ArenaReader:
    """The receiver's side of an arena, which cannot write to it."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)

    def read(self, place: Place) -> bytes:
        """A copy of the bytes at ``place``. Raises ``WireError`` if they are not there (any
        more)."""
        start = place.offset + HEADER.size
        end = start + place.length
        if not 0 <= place.offset <= start <= end <= len(self._memory):
            raise WireError(f"{place} is not within an arena of {len(self._memory)} bytes")
        self._check(place)
        data = self._memory[start:end]
        self._check(place)  # the range was not reused during the copy
        return data

    def _check(self, place: Place) -> None:
        (found,) = HEADER.unpack_from(self._memory, place.offset)
        if found != place.generation:
            raise WireError(f"{place} is no longer what it was: generation {found} lies there")

    def close(self) -> None:
        self._memory.close()


def create_memory(size: int) -> int:
    """A descriptor of ``size`` bytes of memory that has no name and cannot change its size.

    Pages are taken when they are first written.
    """
    fd = os.memfd_create("metronome-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    # Sealed: a process that holds it cannot shrink it, which would make reads of others fault.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd
