"""Pixels in shared memory, which another process of this machine maps without a copy.

    sender    segment = share(pixels); sends segment.handle; close() when nobody will open it again
    reader    pixels = read(handle)
    between   segment = adopt(handle): holds the same memory, under a handle of its own

A segment is a sealed anonymous file (``memfd_create``): its size and content are fixed, so what was
checked stays true. The reader opens it as ``/proc/PID/fd/N``. It has no name, needs no space in
``/dev/shm``, and its memory is freed when the last process that holds or maps it closes it or ends.

Handles are valid where ``namespace()`` has the same value: in processes of one user, and of one
namespace of processes, of one running system.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import stat
import sys
import weakref
from math import prod
from pathlib import Path

from engine.errors import WireError, reason_of
from engine.messages.media import PixelArray, Pixels, SharedArray, SharedPixels

if sys.platform == "linux":
    import fcntl

    SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

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
        """Invalidate the handle; who has read it keeps the content. May be repeated."""
        self._close()


def namespace() -> str:
    """Where this process's handles are valid; "" on systems without segments."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} user:{os.geteuid()}"
    except OSError:
        return ""


def share(pixels: Pixels) -> Segment:
    """Copy pixels into shared memory.

    Raises ``WireError`` for arrays that ``check`` refuses, ``OSError`` if the system has no
    segments or no memory, or half of the files that this process may open are open."""
    check(pixels)
    arrays, size = _layout(pixels)
    if not (here := namespace()):
        raise OSError("this system has no anonymous shared memory")
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _keep_numbers(fd)
        os.ftruncate(fd, size)
        for name, array in arrays.items():
            _write(fd, pixels[name].data, array.offset)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        inode = os.fstat(fd).st_ino
    except BaseException:
        os.close(fd)
        raise
    return Segment(fd, SharedPixels(here, os.getpid(), fd, inode, size, arrays))


def adopt(handle: SharedPixels) -> Segment:
    """Hold a segment of another process, so that it outlives that process.

    Raises ``WireError`` for an invalid handle, ``OSError`` if too many files are open."""
    fd = _open(handle)
    try:
        _keep_numbers(fd)
    except OSError:
        os.close(fd)
        raise
    own = SharedPixels(handle.namespace, os.getpid(), fd, handle.inode, handle.size, handle.arrays)
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


# -- helpers


def _layout(pixels: Pixels) -> tuple[dict[str, SharedArray], int]:
    """Where each array lies in a segment, and the segment's size in bytes."""
    arrays: dict[str, SharedArray] = {}
    end = 0
    for name, array in pixels.items():
        arrays[name] = SharedArray(array.dtype, array.shape, end)
        end += -(-len(array.data) // ALIGNMENT) * ALIGNMENT
    if end > MAX_BYTES:
        raise WireError(f"{end} bytes of pixels in one media item, the limit is {MAX_BYTES}")
    return arrays, max(end, ALIGNMENT)  # nothing can be mapped of an empty file


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        num_written = os.pwrite(fd, left, offset)
        left, offset = left[num_written:], offset + num_written


def _keep_numbers(fd: int) -> None:
    """Leave half of the files that this process may open to others. New files get the lowest free
    number. Raises ``OSError``."""
    if not _has_numbers(fd):
        raise OSError(f"file {fd} is open: half of this process's limit (ulimit -n) is in use")


def _has_numbers(fd: int) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or fd < limit // 2


def _open(handle: SharedPixels) -> int:
    """A descriptor of a segment, all of whose properties are checked. Raises ``WireError``."""
    if not handle.namespace or handle.namespace != namespace():
        raise WireError(
            f"pixels are in shared memory of {handle.namespace!r:.80}, this process is in "
            f"{namespace()!r}"
        )
    _check_places(handle)
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        # An open file could be a device or a pipe, which must not even be opened.
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            raise WireError(f"file {handle.fd} of process {handle.pid} does not have pixels")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, OverflowError) as error:
        raise WireError(
            f"pixels in shared memory (file {handle.fd} of process {handle.pid}) cannot be opened: "
            f"{reason_of(error)}"
        ) from error
    try:
        _check_file(fd, handle)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_file(fd: int, handle: SharedPixels) -> None:
    found = os.fstat(fd)
    what = f"file {handle.fd} of process {handle.pid}"
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        raise WireError(f"{what} is not shared memory of this user")
    if (found.st_ino, found.st_size) != (handle.inode, handle.size):
        raise WireError(
            f"{what} is number {found.st_ino} of {found.st_size} bytes, must be number "
            f"{handle.inode} of {handle.size} bytes: the pixels were closed before they were read"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & SEALS != SEALS:
        raise WireError(f"{what} is not sealed, so its content could change")


def _check_places(handle: SharedPixels) -> None:
    """Check that a foreign handle's arrays lie within the segment and do not overlap."""
    if min(handle.pid - 1, handle.fd, handle.inode) < 0 or not 0 < handle.size <= MAX_BYTES:
        raise WireError(
            f"pixels in file {handle.fd} of process {handle.pid} with {handle.size} bytes, must "
            f"have 1 to {MAX_BYTES}"
        )
    _check_number(handle.arrays)
    end = 0
    for name, array in sorted(handle.arrays.items(), key=lambda each: each[1].offset):
        size = _num_bytes(name, array)
        if array.offset < end or array.offset % ALIGNMENT or array.offset + size > handle.size:
            raise WireError(
                f"array {name!r:.80} of {size} bytes at {array.offset} must begin at a multiple of "
                f"{ALIGNMENT}, from {end} on, and end within {handle.size} bytes"
            )
        end = array.offset + size


def _check_number(arrays: Pixels | dict[str, SharedArray]) -> None:
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
    if _has_numbers(fd):
        with contextlib.suppress(OSError):
            return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
    return memoryview(os.pread(fd, size, 0))
