"""Pixels in shared memory, which another process of this machine maps without a copy.

    sender    segment = share(pixels); sends segment.handle; close() when nobody will open it again
    reader    pixels = read(handle)
    between   segment = adopt(handle): holds the same memory, under a handle of its own

A segment is a sealed file (``engine.ipc.sealed_files``) whose content is fixed, too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Mapping
from math import prod

from engine.errors import WireError, reason_of
from engine.ipc.sealed_files import (
    SealedFile,
    create,
    has_numbers,
    leave_numbers,
    namespace,
    open_sealed,
    seal,
)
from engine.messages.media import PixelArray, Pixels, SharedArray, SharedPixels

NAME = "metronome-pixels"
ALIGNMENT = 64  # bytes
MAX_BYTES = 1 << 30  # of a segment
MAX_ARRAYS = 64
MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "|b1": 1, "|i1": 1, "|u1": 1, "<i2": 2, "<u2": 2, "<f2": 2, "<i4": 4, "<u4": 4, "<f4": 4,
    "<i8": 8, "<u8": 8, "<f8": 8,
}  # fmt: skip
"""Size of the elements of each dtype that pixels may have."""


class Segment:
    """Pixels in shared memory, held open by this process."""

    def __init__(self, fd: int, handle: SharedPixels) -> None:
        self.handle = handle
        self._close = weakref.finalize(self, os.close, fd)

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self.handle.size

    @property
    def is_open(self) -> bool:
        return self._close.alive

    def close(self) -> None:
        """Invalidate the handle. Processes that have read it keep the content. May be repeated."""
        self._close()


def share(pixels: Pixels) -> Segment:
    """Copy pixels into shared memory.

    Raises ``WireError`` for arrays that ``check`` refuses, ``OSError`` if the system has no
    segments or no memory, or half of the files that this process may open are open."""
    check(pixels)
    arrays, size = layout(pixels)
    fd = create(NAME, max(size, ALIGNMENT))  # nothing can be mapped of an empty file
    try:
        for name, array in arrays.items():
            _write(fd, pixels[name].data, array.offset)
        return Segment(fd, SharedPixels(*seal(fd), arrays))
    except BaseException:
        os.close(fd)
        raise


def adopt(handle: SharedPixels) -> Segment:
    """Hold a segment of another process, so that it outlives that process.

    Raises ``WireError`` for an invalid handle, ``OSError`` if too many files are open."""
    fd = _open(handle)
    try:
        leave_numbers(fd)
    except OSError:
        os.close(fd)
        raise
    own = SharedPixels(namespace(), os.getpid(), fd, handle.inode, handle.size, handle.arrays)
    return Segment(fd, own)


def read(handle: SharedPixels) -> Pixels:
    """The arrays of a segment, as read-only views of its memory.

    The memory stays mapped as long as one of them exists. If too many files are open for another
    mapping, the arrays are copied. Raises ``WireError`` for an invalid handle."""
    fd = _open(handle)
    try:
        memory = _content(fd, handle.size)
    except OSError as error:
        raise WireError(f"pixels in shared memory cannot be read: {reason_of(error)}") from error
    finally:
        os.close(fd)
    return {
        name: PixelArray(array.dtype, array.shape, memory[array.offset : array.offset + size])
        for name, array in handle.arrays.items()
        for size in [_num_bytes(name, array)]
    }


def check(pixels: Pixels) -> None:
    """Check arrays from another process. Raises ``WireError`` for a dtype or shape that pixels
    cannot have, or a shape that differs from the number of bytes."""
    _check_number(pixels)
    for name, array in pixels.items():
        if (size := _num_bytes(name, array)) != len(array.data):
            raise WireError(
                f"array {name!r:.80} of dtype {array.dtype} and shape {array.shape} must have "
                f"{size} bytes, has {len(array.data)}"
            )


def check_places(arrays: Mapping[str, SharedArray], size: int) -> None:
    """Check that a foreign handle's arrays lie within ``size`` bytes and do not overlap. Raises
    ``WireError``."""
    _check_number(arrays)
    end = 0
    for name, array in sorted(arrays.items(), key=lambda each: each[1].offset):
        num_bytes = _num_bytes(name, array)
        if array.offset < end or array.offset % ALIGNMENT or array.offset + num_bytes > size:
            raise WireError(
                f"array {name!r:.80} of {num_bytes} bytes at {array.offset} must begin at a "
                f"multiple of {ALIGNMENT}, from {end} on, and end within {size} bytes"
            )
        end = array.offset + num_bytes


def layout(pixels: Pixels) -> tuple[dict[str, SharedArray], int]:
    """Where each array lies in shared memory, and the bytes of all. Raises ``WireError`` for too
    many."""
    arrays: dict[str, SharedArray] = {}
    end = 0
    for name, array in pixels.items():
        arrays[name] = SharedArray(array.dtype, array.shape, end)
        end += -(-len(array.data) // ALIGNMENT) * ALIGNMENT
    if end > MAX_BYTES:
        raise WireError(f"{end} bytes of pixels in one media item, the limit is {MAX_BYTES}")
    return arrays, end


# -- helpers


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        num_written = os.pwrite(fd, left, offset)
        left, offset = left[num_written:], offset + num_written


def _open(handle: SharedPixels) -> int:
    """A descriptor of a segment, all of whose properties are checked. Raises ``WireError``."""
    if not 0 < handle.size <= MAX_BYTES:
        raise WireError(f"pixels in {handle.size} bytes of shared memory, must be 1 to {MAX_BYTES}")
    check_places(handle.arrays, handle.size)
    file = SealedFile(handle.namespace, handle.pid, handle.fd, handle.inode, handle.size)
    return open_sealed(file, NAME)


def _check_number(arrays: Mapping[str, object]) -> None:
    if len(arrays) > MAX_ARRAYS:
        raise WireError(f"{len(arrays)} arrays of pixels, the limit is {MAX_ARRAYS}")


def _num_bytes(name: str, array: PixelArray | SharedArray) -> int:
    """Bytes of an array. Raises ``WireError`` for a dtype or shape that pixels cannot have."""
    if array.dtype not in ITEM_BYTES:
        raise WireError(
            f"array {name!r:.80} has dtype {array.dtype!r:.80}, must have one of "
            f"{', '.join(ITEM_BYTES)}"
        )
    if len(array.shape) > MAX_DIMENSIONS or min(array.shape, default=0) < 0:
        raise WireError(
            f"array {name!r:.80} has shape {array.shape!r:.80}, must have at most {MAX_DIMENSIONS} "
            "dimensions, none of them negative"
        )
    return ITEM_BYTES[array.dtype] * prod(array.shape)


def _content(fd: int, size: int) -> memoryview:
    """The bytes of a file: mapped, which takes a file of this process's, or else copied."""
    if has_numbers(fd):
        with contextlib.suppress(OSError):
            return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
    return memoryview(os.pread(fd, size, 0))
