"""Reads ranges of files into memory, those of large files without the system's file cache.

Reading through the cache needs memory for a second copy of the file. On a virtual machine, memory
that was not used before can take longer to get than the file takes to read."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

PIECE_BYTES = 8 << 20  # read by one thread at a time
NUM_THREADS = 2
LARGE_BYTES = 1 << 30  # smaller models are always read through the cache
# The files of a slow disk are read through the cache, so that the next start is faster.
SLOW_BYTES_PER_SECOND = 400e6
TRIAL_BYTES = 256 << 20  # read without the cache before the disk's speed is judged
_PAGE = mmap.PAGESIZE


class FileReader:
    """Open files, from which several threads read ranges.

    Ranges of large files that are not in the system's cache are read without it ("directly"), if
    the disk is fast and the system supports that."""

    def __init__(self, files: Iterable[Path], *, large_bytes: int = LARGE_BYTES) -> None:
        """large_bytes: total size of files from which they count as large. Raises ``OSError`` for a
        file that cannot be opened."""
        self._files: dict[Path, int] = {}
        self._direct: dict[Path, _DirectFile] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="files")
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        self._num_bytes, self._seconds = 0, 0.0  # of direct reads
        try:
            for file in files:
                self._files[file] = os.open(file, os.O_RDONLY)
        except OSError:
            self.close()
            raise
        sizes = {file: os.fstat(number).st_size for file, number in self._files.items()}
        if sum(sizes.values()) >= large_bytes:
            self._direct = {file: _DirectFile(file) for file, size in sizes.items() if size}
        for _ in range(NUM_THREADS):
            self._buffers.put(np.frombuffer(mmap.mmap(-1, PIECE_BYTES + 2 * _PAGE), np.uint8))

    def close(self) -> None:
        """Wait for reads that have begun, and close the files."""
        self._threads.shutdown()
        for number in self._files.values():
            os.close(number)
        for direct in self._direct.values():
            direct.close()
        self._files.clear()
        self._direct.clear()

    def fill(self, file: Path, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a file from ``offset`` on. Raises ``EOFError`` if the file
        ends before, and ``OSError`` if it cannot be read."""
        if len(out) < PIECE_BYTES:
            self._fill_cached(file, offset, out)
            return
        began = time.perf_counter()
        pieces = [
            self._threads.submit(self._fill_piece, file, offset + at, out[at : at + PIECE_BYTES])
            for at in range(0, len(out), PIECE_BYTES)
        ]
        wait(pieces)  # all of them, since they write to ``out`` even if one has failed
        if sum(piece.result() for piece in pieces) == len(out):
            self._num_bytes += len(out)
            self._seconds += time.perf_counter() - began

    def _fill_piece(self, file: Path, offset: int, out: Bytes) -> int:
        """Read a piece, and return how many bytes of it were read directly."""
        direct, done = self._direct.get(file), 0
        if direct is not None and not self._is_slow and not direct.is_cached(offset, len(out)):
            buffer = self._buffers.get()
            try:
                done = direct.read(offset, out, buffer)
            finally:
                self._buffers.put(buffer)
        self._fill_cached(file, offset + done, out[done:])
        return done

    def _fill_cached(self, file: Path, offset: int, out: Bytes) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self._files[file], [out[done:].data], offset + done)
            if not count:
                raise EOFError(f"{file} ends before byte {offset + len(out)}")
            done += count

    @property
    def _is_slow(self) -> bool:
        is_known = self._num_bytes >= TRIAL_BYTES
        return is_known and self._num_bytes < SLOW_BYTES_PER_SECOND * self._seconds


class _DirectFile:
    """A file that is read without the system's cache, if the system supports that."""

    def __init__(self, file: Path) -> None:
        self._number = -1
        self._mapped: mmap.mmap | None = None
        try:
            self._number = os.open(file, os.O_RDONLY | os.O_DIRECT)
            self._mincore = ctypes.CDLL(None).mincore
            self._mapped = mmap.mmap(self._number, 0, prot=mmap.PROT_READ)
            self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data
        except (AttributeError, OSError):  # not Linux, or a file system without direct reads
            self.close()

    def close(self) -> None:
        if self._number >= 0:
            os.close(self._number)
        if self._mapped is not None:
            self._mapped.close()  # it has a descriptor of its own
        self._number, self._mapped = -1, None

    def is_cached(self, offset: int, size: int) -> bool:
        """True if most of a range is in the system's cache, or if this is unknown, as for files
        that this user may not change."""
        if self._mapped is None:
            return True
        first = offset // _PAGE * _PAGE
        length = max(0, min(offset + size, len(self._mapped)) - first)
        pages = np.zeros(-(-length // _PAGE), np.uint8)
        failed = self._mincore(
            ctypes.c_void_p(self._address + first),
            ctypes.c_size_t(length),
            ctypes.c_void_p(pages.ctypes.data),
        )
        return bool(failed) or 2 * int(np.count_nonzero(pages & 1)) >= len(pages)

    def read(self, offset: int, out: Bytes, buffer: Bytes) -> int:
        """Fill ``out`` as far as possible; returns the number of bytes. buffer: memory that begins
        at a page, at least two pages larger than ``out``."""
        before = offset % _PAGE  # a direct read begins and ends at pages
        size = -(-(before + len(out)) // _PAGE) * _PAGE
        try:
            count = os.preadv(self._number, [buffer[:size].data], offset - before)
        except OSError:
            return 0
        done = min(max(count - before, 0), len(out))
        out[:done] = buffer[before : before + done]
        return done
