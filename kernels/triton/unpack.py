"""Sums over packed weights, for the products that read them: of one matrix, of many experts.

Weights are dequantised in registers, once for all rows of a program, and are the left matrix of the
product: tensor cores take that one from registers. A group's scale meets the sums, so what is
multiplied are whole numbers, exact in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.quantized import Packed


class UnpackShape(NamedTuple):
    """What the kernels are compiled for."""

    K: int  # inputs
    WIDTH: int  # bytes of a row of the matrix
    BITS: int
    GROUP: int
    GROUPS: int
    PIECE: int
    STEP: int  # inputs a step: a piece of 8 bits, two of 4
    M: int = 0  # rows of x, a program
    N: int = 0  # outputs, a program


def shape_of(packed: Packed, rows: int, outputs: int) -> UnpackShape:
    return UnpackShape(
        K=packed.num_inputs,
        WIDTH=packed.values.shape[-1],
        BITS=packed.bits,
        GROUP=packed.group_size,
        GROUPS=packed.scales.shape[-2],
        PIECE=packed.piece,
        STEP=packed.piece * (8 // packed.bits),
        M=rows,
        N=outputs,
    )


@triton.jit
def nibble_as_float(nibble, dtype: tl.constexpr):
    """Numbers below 16, of 16 bits plus a power of two: they become bits of the mantissa.

    The power cancels against that of the zero, and nothing is converted, which is slow.
    """
    if dtype == tl.bfloat16:
        return (nibble.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (nibble.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return nibble.to(tl.float32)


@triton.jit
def byte_as_float(byte, dtype: tl.constexpr):
    """Numbers below 256 minus 128, exact; bits of the mantissa likewise.

    bfloat16 has seven: the lowest are 128 too many, and so is what is taken away, or 256 where the
    highest bit is missing.
    """
    if dtype == tl.bfloat16:
        low = ((byte & 0x7F).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return low - ((byte & 0x80).to(tl.int16) ^ 0x4380).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (byte.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        return byte.to(tl.float32) - 128.0


@triton.jit
def piece_of(raw, half: tl.constexpr, zero, dtype: tl.constexpr, S: tl.constexpr):
    """Values minus their zeros [N]: [N, PIECE] of dtype, exact.

    8-bit floats have no zeros.
    """
    if raw.dtype != tl.uint8:
        value = raw.to(tl.float32)
    elif S.BITS == 4:
        value = nibble_as_float((raw >> (4 * half)) & 15, dtype)
        value -= nibble_as_float(zero, dtype)[:, None]
    else:
        value = byte_as_float(raw, dtype) - byte_as_float(zero, dtype)[:, None]
    return value.to(dtype)


@triton.jit
def of_group(tables, k, S: tl.constexpr):
    """(scales [N] float32, zeros [N]) of the group of input k; zeros None: the middle.

    tables: scales and zeros [G, num_outputs], outputs [N], num_outputs.
    """
    scales, zeros, outputs, num_outputs = tables
    place = tl.minimum(k // S.GROUP, S.GROUPS - 1) * num_outputs + outputs
    scale = tl.load(scales + place).to(tl.float32)
    if zeros is None:
        return scale, tl.full([S.N], 1 << (S.BITS - 1), tl.uint8)
    else:
        return scale, tl.load(zeros + place)


@triton.jit
def bytes_of(matrix, step, S: tl.constexpr):
    """matrix: [N, 1] pointers to rows -> a step's bytes [N, PIECE]."""
    byte = step * S.PIECE + tl.arange(0, S.PIECE)[None, :]
    if S.WIDTH % S.PIECE == 0:
        return tl.load(matrix + byte)
    else:
        return tl.load(matrix + byte, mask=byte < S.WIDTH, other=0.0)


@triton.jit
def inputs_of(x, k, S: tl.constexpr):
    """The piece from column k on: [PIECE, M].

    x: pointers to rows [1, M], whether each is one [M], the order of columns. What is no row has
    the address of one; where rows may be many, it is read as such.
    """
    rows, is_row, order = x
    place = k + tl.arange(0, S.PIECE)
    is_in = (place < S.K)[:, None]
    if order is not None:
        place = tl.load(order + place, mask=place < S.K, other=0)
    if S.M < 128:
        return tl.load(rows + place[:, None], mask=is_row[None, :] & is_in, other=0.0)
    elif S.K % S.STEP != 0:
        return tl.load(rows + place[:, None], mask=is_in, other=0.0)
    else:
        return tl.load(rows + place[:, None])


@triton.jit
def add_step(acc, raw, x, step, zero, S: tl.constexpr):
    """acc + the weights of a step, which lies in one group, times x: [N, M], without scales."""
    for half in tl.static_range(8 // S.BITS):
        a = inputs_of(x, step * S.STEP + half * S.PIECE, S)
        acc = tl.dot(piece_of(raw, half, zero, a.dtype, S), a, acc, input_precision="ieee")
    return acc


@triton.jit
def add_pieces(acc, raw, x, tables, step, S: tl.constexpr):
    """acc + the weights of a step, whose pieces have groups of their own, times x: [N, M]."""
    for half in tl.static_range(8 // S.BITS):
        k = step * S.STEP + half * S.PIECE
        a = inputs_of(x, k, S)
        scale, zero = of_group(tables, k, S)
        part = tl.dot(piece_of(raw, half, zero, a.dtype, S), a, input_precision="ieee")
        acc += part * scale[:, None]
    return acc


@triton.jit
def packed_sums(x, matrix, tables, steps, S: tl.constexpr):
    """The weights of steps[0] .. steps[1] - 1 times x: [N, M] float32.

    x: as of inputs_of. matrix: [N, 1] pointers to rows of bytes; tables: as of of_group, of the
    same outputs. Scales and zeros are read once for a step, and requested in the step before.
    """
    first, last = steps
    acc = tl.full([S.N, S.M], 0.0, tl.float32)
    if S.GROUPS == 1:
        scale, zero = of_group(tables, 0, S)
        for step in range(first, last):
            acc = add_step(acc, bytes_of(matrix, step, S), x, step, zero, S)
        acc *= scale[:, None]
    elif S.GROUP % S.STEP == 0:
        scale, zero = of_group(tables, first * S.STEP, S)
        for step in range(first, last):
            raw = bytes_of(matrix, step, S)
            next_scale, next_zero = of_group(tables, (step + 1) * S.STEP, S)
            part = tl.full([S.N, S.M], 0.0, tl.float32)
            acc += add_step(part, raw, x, step, zero, S) * scale[:, None]
            scale = next_scale
            zero = next_zero
    else:
        for step in range(first, last):
            acc = add_pieces(acc, bytes_of(matrix, step, S), x, tables, step, S)
    return acc
