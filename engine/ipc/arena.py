"""Arena: memory that the cores of one machine share, in regions with one writer each.

    page 0     format, number of regions
    regions    one for each rank of each core: only its process writes there, all processes read

It is an anonymous file that the launcher of the cores holds open (``ArenaFile``), so its memory is
freed when these processes have ended, however they ended. A core takes a region by a lock of the
kernel on a byte of the file, which the kernel drops with the process; whatever is in the region is
then the next process's. Without other cores the arena is private memory with one region.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
from contextlib import suppress

import numpy as np

from engine.config.cache import CacheConfig
from engine.config.gpu_memory import GIB
from engine.errors import ConfigError, WireError, reason_of
from engine.ipc.host_memory import free_host_bytes
from engine.ipc.sealed_files import SealedFile, SharedFile, open_sealed

NAME = "metronome-kv"
FORMAT = int.from_bytes(b"kvarena1", "little")
PAGE = 4096
CLAIM_SECONDS = 5.0  # wait so long for a region whose process is ending

logger = logging.getLogger("engine.core")


def check_room(num_bytes: int) -> None:
    """Raise ``ConfigError`` if the machine lacks memory for an arena of this size."""
    if num_bytes > (free := free_host_bytes()):
        raise ConfigError(
            f"kv_offloading_size is {num_bytes / GIB:.4g} GiB, but only {free / GIB:.4g} GiB of "
            "memory are free: lower kv_offloading_size, or end other processes or raise the limit "
            "of the container"
        )


class ArenaFile(SharedFile):
    """The memory of an arena, which the launcher of several cores holds for them.

    ``handle``: what a core's process needs to open it. Raises ``ConfigError`` if the machine lacks
    the memory, ``OSError`` if there is no anonymous memory that other processes can open."""

    def __init__(self, num_bytes: int, num_regions: int) -> None:
        check_room(num_bytes)
        super().__init__(NAME, num_bytes, struct.pack("<qq", FORMAT, num_regions))


class NoArenaFile:
    """In place of an ``ArenaFile`` if cores share no memory."""

    handle = None

    def close(self) -> None:
        """Do nothing."""


def share_arena(cache: CacheConfig, num_cores: int, num_ranks: int = 1) -> ArenaFile | NoArenaFile:
    """Make the memory that ``num_cores`` cores of ``num_ranks`` ranks share, if the options want
    any and the system can.

    Raises ``ConfigError`` if the machine lacks the memory."""
    if cache.kv_offloading_size is None:
        return NoArenaFile()
    try:
        return ArenaFile(int(cache.kv_offloading_size * GIB), num_cores * num_ranks)
    except OSError as error:
        logger.warning(
            "kv_offloading_size: each core has its own share of the memory, since they cannot "
            "share it: %s",
            reason_of(error),
        )
        return NoArenaFile()


class Arena:
    """An arena that this process has opened. ``regions``: the bytes of each region; ``own``: the
    index of the one that this process writes."""

    def __init__(
        self, memory: mmap.mmap, num_regions: int, own: int = 0, fd: int | None = None
    ) -> None:
        self.own = own
        self._fd = fd
        self._memory = np.frombuffer(memory, np.uint8)
        size = (len(memory) - PAGE) // num_regions // PAGE * PAGE
        begins = [PAGE + index * size for index in range(num_regions)]
        self.regions = [self._memory[begin : begin + size] for begin in begins]

    @staticmethod
    def private(num_bytes: int) -> Arena:
        """Open an arena of this process alone. Raises ``ConfigError`` if the machine lacks the
        memory."""
        check_room(num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return Arena(_mapped(-1, max(num_bytes, 2 * PAGE), flags), 1)

    @staticmethod
    def shared(
        handle: SealedFile, first: int = 0, *, claim_seconds: float = CLAIM_SECONDS
    ) -> Arena:
        """Open the arena of the cores of this machine and take a region of it, number ``first`` if
        that is free.

        Raises ``WireError`` if it cannot be opened, or if other processes use all regions."""
        fd = open_sealed(handle, NAME, to_write=True)
        try:
            found, num_regions = struct.unpack("<qq", os.pread(fd, 16, 0))
            if found != FORMAT:
                raise WireError(f"{handle} is no arena for KV blocks of this version")
            own = _claim(fd, num_regions, claim_seconds, first)
            return Arena(_mapped(fd, handle.size, mmap.MAP_SHARED), num_regions, own, fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Release the region. Nothing may write into it any more. May be repeated."""
        if self._fd is not None:
            _lock(self._fd, self.own, fcntl.F_UNLCK)  # the mapping may outlive this call
            os.close(self._fd)
            self._fd = None
        self.regions = []


def _mapped(fd: int, num_bytes: int, flags: int) -> mmap.mmap:
    """Map memory. All memory for blocks is made here. A page takes memory once it is written."""
    try:
        memory = mmap.mmap(fd, num_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"{num_bytes / GIB:.4g} GiB for KV blocks (kv_offloading_size) cannot be mapped: "
            f"{error}; lower kv_offloading_size, or raise the limit of the process's memory "
            "(ulimit -v)"
        ) from error
    # No huge pages: copies of whole blocks gain nothing from them, and where memory is fragmented
    # the first write to one may take 10 times as long.
    with suppress(AttributeError, OSError):  # not on every system
        memory.madvise(mmap.MADV_DONTDUMP)
    return memory


def _claim(fd: int, num_regions: int, seconds: float, first: int) -> int:
    """Lock a region for this process. A process that was killed may still be ending."""
    until = time.monotonic() + seconds
    while True:
        for index in sorted(range(num_regions), key=lambda index: index != first):
            with suppress(BlockingIOError):
                _lock(fd, index, fcntl.F_WRLCK)
                return index
        if time.monotonic() >= until:
            raise WireError(f"other processes use all {num_regions} regions of the arena")
        time.sleep(0.01)


def _lock(fd: int, index: int, kind: int) -> None:
    """Lock or unlock a byte of the file for whoever holds this opening of it."""
    lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, index, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
