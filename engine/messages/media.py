"""The content of pictures and other media, as the model's processor returns it."""

from __future__ import annotations

import msgspec


class PixelArray(msgspec.Struct, array_like=True, frozen=True):
    """An array: its numpy dtype, its shape and its bytes in C order."""

    dtype: str
    shape: list[int]
    data: bytes


Pixels = dict[str, PixelArray]
"""The arrays of one media item, by the names of the encoder's arguments, e.g. ``pixel_values``."""
