"""Rows of a KV cache in plain torch: the key or the value of one token in one head.

An int8 row has the codes of D numbers, then their scale as float32: D + 4 bytes. Rows of other
types are D numbers of that type."""

from __future__ import annotations

import torch

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
LARGEST_CODE = 127
SCALE_BYTES = 4
SMALLEST_ROW = 1e-30  # rows without larger numbers are stored as zeros: 127 / x could overflow


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scale in a row of a cache of this type."""
    return SCALE_BYTES if dtype is torch.int8 else 0


def encode_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert keys or values [..., D] to rows of a cache of type ``dtype``. Numbers too large for
    8-bit floats are clamped; int8 rows with numbers that are not finite are NaN when read."""
    if dtype is torch.int8:
        return _encode_integers(x.float())
    if dtype is torch.float8_e4m3fn:  # the cast would turn larger values into NaN
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def decode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., D] of rows of a cache; float32 if they are int8."""
    if rows.dtype is not torch.int8:
        return rows
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].float() * scales


def _encode_integers(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, LARGEST_CODE)  # torch divides a number by way of 1 / largest
    inverse = torch.where(largest > SMALLEST_ROW, most / largest, 0.0)
    codes = (x * inverse).nan_to_num(0).round().to(torch.int8)
    scales = torch.where(largest.isfinite(), largest / LARGEST_CODE, float("nan"))
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)
