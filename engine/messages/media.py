"""The content of pictures and other media, as the model's processor returns it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    Data = bytes | memoryview
else:
    Data = memoryview  # what is decoded is a view of the message; both can be encoded


class PixelArray(msgspec.Struct, array_like=True, frozen=True):
    """An array: its numpy dtype, its shape and its bytes in C order."""

    dtype: str
    shape: list[int]
    data: Data


Pixels = dict[str, PixelArray]
"""The arrays of one media item, by the names of the encoder's arguments, e.g. ``pixel_values``."""


Kinds = Mapping[str, tuple[str, int]]
"""Dtype and number of dimensions of each array of pixels, by name."""


def kinds_of(pixels: Pixels) -> Kinds:
    """Dtype and number of dimensions of each array."""
    return {name: (array.dtype, len(array.shape)) for name, array in pixels.items()}


def num_bytes_of(pixels: Pixels) -> int:
    """Bytes of the arrays of a media item."""
    return sum(len(array.data) for array in pixels.values())


class SharedArray(msgspec.Struct, array_like=True, frozen=True):
    """An array in shared memory. ``offset``: where its bytes begin, a multiple of 64."""

    dtype: str
    shape: list[int]
    offset: int


class SharedPixels(msgspec.Struct, array_like=True, frozen=True):
    """The handle of the arrays of one media item in shared memory of another process.

    The memory is the open file ``fd`` of process ``pid``, which numbers are of one ``namespace``
    (see ``engine.ipc.sealed_files``). ``inode`` tells it from later files with these numbers."""

    namespace: str
    pid: int
    fd: int
    inode: int
    size: int  # bytes
    arrays: dict[str, SharedArray]


class DevicePixels(msgspec.Struct, array_like=True, frozen=True):
    """The handle of the arrays of one media item in a device's memory.

    The reader returns it by writing ``ticket``, which is never used again, to place ``slot`` of the
    file ``returns``; the sender then uses the memory for other pixels."""

    device: str  # the same name in all processes
    memory: bytes  # handle of the memory, of the device's driver
    size: int  # bytes of this memory
    stays: bool  # it will be sent again, with other pixels
    arrays: dict[str, SharedArray]  # offsets are from the beginning of the memory
    slot: int
    ticket: int
    returns: SharedPixels  # without arrays


class MediaContent(msgspec.Struct, array_like=True, frozen=True):
    """The content of the media items with the hash ``key``: ``pixels``, or a handle of them, or the
    ``error`` that is why there is no content. ``code``: the error code of requests that need it.

    ``device``: a copy of these pixels in the memory of the core's device, for the first encoding.
    The core returns it, even if it does not use it."""

    key: str
    pixels: Pixels | None = None
    shared: SharedPixels | None = None
    error: str = ""
    code: str = "invalid_media"
    device: DevicePixels | None = None
