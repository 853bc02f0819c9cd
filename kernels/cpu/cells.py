"""Reads and writes elements of activations, weights and KV cache: float32 or bfloat16.

`cell` is the number of bytes of an element, 4 or 2, always passed as a literal, so that each gets
its own machine code. Arithmetic is in float32; stored values are rounded to nearest.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from kernels.cpu import isa
from kernels.cpu.native import INLINE, bits_of_float, f32, float_of_bits, u16
from kernels.cpu.vectors import LANES, round16

DTYPES = (torch.float32, torch.bfloat16)

_HALF = np.int32(16)
_ROUND, _ONE = np.int32(0x7FFF), np.int32(1)
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_NAN = np.int32(0x7FC0)
_ONE_FLOAT = np.float32(1)
_ROUNDS = isa.has("avx512bf16")  # whole vectors in one instruction


@njit(**INLINE)
def widen(half):
    """Convert the bits of a bfloat16 to float32."""
    return float_of_bits(np.int32(half) << _HALF)


@njit(**INLINE)
def narrow(value):
    """Convert a float32 to the bits of a bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = bits_of_float(value)
    rounded = (bits + (_ROUND + ((bits >> _HALF) & _ONE))) >> _HALF
    return np.uint16(_NAN if (bits & _MAGNITUDE) > _INFINITY else rounded)


@njit(**INLINE)
def read_cells(source, target, cell):
    """Fill the float32 array `target` with elements from an address."""
    if cell == 4:
        floats = f32(source, target.shape)
        for i in range(target.shape[0]):
            target[i] = floats[i]
    else:
        halves = u16(source, target.shape)
        for i in range(target.shape[0]):
            target[i] = widen(halves[i])


@njit(**INLINE)
def write_cells(target, source, cell):
    """Write the contiguous float32 array `source` to an address, rounded to nearest even."""
    write_scaled(target, source, _ONE_FLOAT, cell)


@njit(**INLINE)
def write_scaled(target, source, factor, cell):
    """Write the contiguous float32 array `source`, times a factor, to an address, rounded to
    nearest even."""
    if cell == 4:
        floats = f32(target, source.shape)
        for i in range(source.shape[0]):
            floats[i] = source[i] * factor
    else:
        done, num = 0, source.shape[0]
        if _ROUNDS:
            while done + LANES <= num:
                round16(source.ctypes.data + done * 4, factor, target + done * 2)
                done += LANES
        halves = u16(target, source.shape)
        for i in range(done, num):
            halves[i] = narrow(source[i] * factor)


def elements(address, shape, cell):
    """The array of `shape` at an address: float32 if `cell` is 4, or bfloat16 as uint16 if it is
    2."""


def get(array, i):
    """Element i of an array that `elements` returned, as float32."""


def put(array, i, value):
    """Store a float32 as element i of an array that `elements` returned."""


# Selected by a literal and not passed as functions: the disk cache identifies a body by the values
# it closes over, and functions differ between processes.
@overload(elements, inline="always", prefer_literal=True)
def _elements(address, shape, cell):
    if not isinstance(cell, types.IntegerLiteral):
        return None
    if cell.literal_value == 4:
        return lambda address, shape, cell: f32(address, shape)
    return lambda address, shape, cell: u16(address, shape)


@overload(get, inline="always")
def _get(array, i):
    if array.dtype == types.uint16:
        return lambda array, i: widen(array[i])
    return lambda array, i: array[i]


@overload(put, inline="always")
def _put(array, i, value):
    if array.dtype == types.uint16:

        def store(array, i, value):
            array[i] = narrow(value)
    else:

        def store(array, i, value):
            array[i] = value

    return store
