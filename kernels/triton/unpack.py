"""Sums of products with packed weights, for one matrix or for many experts.

Weights are dequantised in registers, once for all rows of a program, and are the left operand of
the product, which tensor cores read from registers. Scales are applied to the sums of a group, so
the multiplied weights are integers, exact in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.quantized import Packed


class UnpackShape(NamedTuple):
    """Compile-time parameters of the kernels that unpack weights."""

    K: int  # inputs
    WIDTH: int  # bytes of a row of the matrix
    BITS: int
    GROUP: int
    GROUPS: int
    PIECE: int
    STEP: int  # inputs per step: one piece with 8 bits, two with 4 bits
    M: int = 0  # rows of x per program
    N: int = 0  # outputs per program


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
    """Convert integers below 16 to floats, plus a constant. Subtract a zero point converted the
    same way to remove the constant."""
    # Setting bits of the mantissa is faster than a conversion.
    if dtype == tl.bfloat16:
        return (nibble.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (nibble.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return nibble.to(tl.float32)


@triton.jit
def byte_as_float(byte, dtype: tl.constexpr):
    """Returns byte - 128, exactly, as floats of `dtype`; byte: integers below 256."""
    # bfloat16's mantissa has seven bits, so the highest bit changes what is subtracted.
    if dtype == tl.bfloat16:
        low = ((byte & 0x7F).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return low - ((byte & 0x80).to(tl.int16) ^ 0x4380).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (byte.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        return byte.to(tl.float32) - 128.0


@triton.jit
def piece_of(raw, half: tl.constexpr, zero, dtype: tl.constexpr, S: tl.constexpr):
    """Returns a piece of the weights, [N, PIECE] of dtype: values minus zero points [N], not
    scaled. half: which half of each byte to use (4 bits only). 8-bit floats have no zero points."""
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
    """Returns (scales [N] float32, zero points [N]) of the group of input k. tables: (scales [G,
    num_outputs], zeros [G, num_outputs] or None, indices of the N outputs, num_outputs)."""
    scales, zeros, outputs, num_outputs = tables
    place = tl.minimum(k // S.GROUP, S.GROUPS - 1) * num_outputs + outputs
    scale = tl.load(scales + place).to(tl.float32)
    if zeros is None:
        return scale, tl.full([S.N], 1 << (S.BITS - 1), tl.uint8)
    else:
        return scale, tl.load(zeros + place)


@triton.jit
def bytes_of(matrix, step, S: tl.constexpr):
    """Load the packed bytes of a step, [N, PIECE]. matrix: [N, 1] pointers to rows of bytes."""
    byte = step * S.PIECE + tl.arange(0, S.PIECE)[None, :]
    if S.WIDTH % S.PIECE == 0:
        return tl.load(matrix + byte)
    else:
        return tl.load(matrix + byte, mask=byte < S.WIDTH, other=0.0)


@triton.jit
def inputs_of(x, k, S: tl.constexpr):
    """Load columns k .. k + PIECE - 1 of the M input rows: [PIECE, M]. x: (pointers [1, M], all
    valid; whether each points to a real row [M]; order of the columns or None)."""
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
    """Returns acc [N, M] + the product of x with a step's weights, not scaled. The step's inputs
    must all be in one group."""
    for half in tl.static_range(8 // S.BITS):
        a = inputs_of(x, step * S.STEP + half * S.PIECE, S)
        acc = tl.dot(piece_of(raw, half, zero, a.dtype, S), a, acc, input_precision="ieee")
    return acc


@triton.jit
def add_pieces(acc, raw, x, tables, step, S: tl.constexpr):
    """Returns acc [N, M] + the product of x with a step's scaled weights. Pieces of the step may be
    in different groups of scales."""
    for half in tl.static_range(8 // S.BITS):
        k = step * S.STEP + half * S.PIECE
        a = inputs_of(x, k, S)
        scale, zero = of_group(tables, k, S)
        part = tl.dot(piece_of(raw, half, zero, a.dtype, S), a, input_precision="ieee")
        acc += part * scale[:, None]
    return acc


@triton.jit
def packed_sums(x, matrix, tables, steps, S: tl.constexpr):
    """Returns the product of x with the weights of steps steps[0] .. steps[1] - 1: [N, M] float32.

    x: as for inputs_of; matrix: [N, 1] pointers to rows of bytes; tables: as for of_group.
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
