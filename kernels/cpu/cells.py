"""Elements of a KV cache: float32, or bfloat16, which is the upper half of one.

`cell` is an element's bytes, 4 or 2, and a literal wherever it is passed: each of the two gets
machine code of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.native import f32, float_of_bits, i32, u16
from kernels.cpu.softmax import INLINE

DTYPES = (torch.float32, torch.bfloat16)

_HALF = np.int32(16)
_ROUND, _ONE = np.int32(0x7FFF), np.int32(1)
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_NAN = np.int32(0x7FC0)


@njit(**INLINE)
def read_cells(source, target, cell):
    """As many cells from an address as the float32 array `target` holds."""
    if cell == 4:
        floats = f32(source, target.shape)
        for i in range(target.shape[0]):
            target[i] = floats[i]
    else:
        halves = u16(source, target.shape)
        for i in range(target.shape[0]):
            target[i] = float_of_bits(np.int32(halves[i]) << _HALF)


@njit(**INLINE)
def write_cells(target, source, cell):
    """The contiguous float32 array `source` to an address, rounded to the nearest, ties to even."""
    if cell == 4:
        floats = f32(target, source.shape)
        for i in range(source.shape[0]):
            floats[i] = source[i]
    else:
        bits, halves = i32(source.ctypes.data, source.shape), u16(target, source.shape)
        for i in range(source.shape[0]):
            rounded = (bits[i] + (_ROUND + ((bits[i] >> _HALF) & _ONE))) >> _HALF
            is_nan = (bits[i] & _MAGNITUDE) > _INFINITY
            halves[i] = np.uint16(_NAN if is_nan else rounded)
