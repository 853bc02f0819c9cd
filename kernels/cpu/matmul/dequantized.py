"""Packed weights in blocks as floats: panels for products that keep activations, and single rows.

A kernel reads a packed weight through a table of 64-bit numbers, the addresses of its tensors and
its sizes. An element becomes (value - zero) * scale + offset, each operation rounded to float32, as
``kernels.reference.quant.dequantize`` computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.cells import elements, put
from kernels.cpu.matmul.blocks import PANEL, UNIT, BlockWeight
from kernels.cpu.matmul.rows import id_at
from kernels.cpu.native import (
    EXACT,
    INNER,
    Kernel,
    bits_of_float,
    f32,
    float_of_bits,
    i32,
    i64,
    next_item,
    u8,
    u16,
    u32,
)
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import LANES, BFloat, splat

FLOATS, PAIRS = 0, 1  # forms of a dequantised panel: float32, or pairs of bfloat16

# Positions in a weight's table.
_VALUES, _SCALES, _OFFSETS, _OUTER_SCALES, _OUTER_OFFSETS, _CODEBOOK, _ORDER = range(7)
_BITS, _GROUPS, _SUPERS, _GROUP_SIZE, _OUTER_SIZE, _ZERO, _UNITS = range(7, 14)
_SCALE_KIND, _OFFSET_KIND, _IS_FLOAT, _NUM_IN = range(14, 18)
_TABLE = 18

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # of scales
_ROW = 128  # bytes of a row of packed values, and of an unpacked quad of a panel
_QUADS = UNIT // 4
_ENOUGH = 16  # with fewer rows, one thread is faster

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_NO_OFFSET = np.float32(-0.0)  # leaves every number that it is added to unchanged, 0 and -0 too
_HALF, _INFINITY = np.int32(16), np.int32(0x7F800000)
_HALF_INFINITY, _HALF_DENORMAL = np.int32(0x7C00), np.float32(2.0**-24)
_FP8_DENORMAL = np.float32(2.0**-9)
_ONES = np.uint32(0x01010101)
_CELLS = {torch.float32: 4, torch.bfloat16: 2}


def table_of(weight: BlockWeight, *, is_float: bool = False) -> np.ndarray:
    """Make the table through which kernels read a packed weight, which must outlive it.

    is_float: values of 8 bits are floats of type e4m3fn, without a zero point."""
    table = np.zeros(_TABLE, np.int64)

    def place(where: int, tensor: torch.Tensor | None) -> None:
        table[where] = 0 if tensor is None else tensor.data_ptr()

    place(_VALUES, weight.values)
    place(_SCALES, weight.scales)
    place(_OFFSETS, weight.offsets)
    place(_OUTER_SCALES, weight.outer_scales)
    place(_OUTER_OFFSETS, weight.outer_offsets)
    place(_CODEBOOK, weight.codebook)
    place(_ORDER, weight.order)
    outer = weight.outer_scales if weight.outer_scales is not None else weight.outer_offsets
    table[_BITS], table[_UNITS] = weight.bits, weight.units
    table[_GROUPS], table[_GROUP_SIZE] = weight.scales.shape[1], weight.group_size
    table[_SUPERS] = 0 if outer is None else outer.shape[1]
    table[_OUTER_SIZE] = weight.outer_size or weight.group_size
    table[_ZERO] = 0 if is_float else weight.zero
    table[_SCALE_KIND] = _KINDS[weight.scales.dtype]
    table[_OFFSET_KIND] = 0 if weight.offsets is None else _KINDS[weight.offsets.dtype]
    table[_IS_FLOAT], table[_NUM_IN] = is_float, weight.num_inputs
    return table


def dequantized_rows(
    table: np.ndarray, ids: torch.Tensor, num_in: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise rows ``ids`` [I] int32 or int64 of a weight [N, num_in] to float32 or bfloat16."""
    ids = ids.contiguous()
    out = torch.empty((len(ids), num_in), dtype=dtype)
    addresses = table.ctypes.data, ids.data_ptr(), out.data_ptr()
    threads = num_threads() if len(ids) >= _ENOUGH else 1
    ROWS[_CELLS[dtype]].run(threads, *addresses, len(ids), ids.element_size())
    return out


def in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns x[:, order], computed by a kernel: x [N, K] contiguous, order [K] int32."""
    out = torch.empty_like(x)
    sizes = len(x), x.shape[1]
    GATHER[x.element_size()].run(1, x.data_ptr(), order.data_ptr(), out.data_ptr(), *sizes)
    return out


@intrinsic(prefer_literal=True)
def _widen_quad(  # noqa: PLR0913
    typing_context, words, scales, offsets, zero, target, stride, how, is_float
):
    """Dequantise four inputs of 16 outputs. words: address of a 32-bit word for each output, with
    a byte for each input; scales, offsets: addresses of 16 float32; target: address of the first
    input's outputs, with `stride` bytes to the next input (the next pair of inputs with PAIRS).
    how, is_float: literals."""
    if not isinstance(how, types.Literal) or not isinstance(is_float, types.Literal):
        return None

    def build(context, builder, signature, args):
        words, scales, offsets, zero, target, stride = args[:6]
        integers, floats = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)

        def at(address, kind):
            return builder.inttoptr(address, kind.as_pointer())

        word = builder.load(at(words, integers), align=4)
        scale, offset = (builder.load(at(one, floats), align=4) for one in (scales, offsets))
        zeros = splat(builder, zero, LANES)
        made = []
        for i in range(4):
            byte = builder.lshr(word, ir.Constant(integers, [8 * i] * LANES)) if i else word
            byte = builder.and_(byte, ir.Constant(integers, [255] * LANES))
            if is_float.literal_value:
                value = _emit_fp8(builder, byte, floats)
            else:
                value = builder.fsub(builder.sitofp(byte, floats), zeros)
            made.append(builder.fadd(builder.fmul(value, scale), offset))
        if how.literal_value == PAIRS:
            made = [_emit_pair(builder, made[i], made[i + 1]) for i in (0, 2)]
        for i, each in enumerate(made):
            place = builder.add(target, builder.mul(stride, _I64(i)))
            builder.store(each, at(place, each.type), align=4)
        return context.get_dummy_value()

    given = (*[types.intp] * 3, types.float32, types.intp, types.intp, how, is_float)
    return types.void(*given), build


def _emit_fp8(builder: Any, byte: Any, floats: Any) -> Any:
    """Emit the conversion of bytes of type e4m3fn, in vectors of int32, to float32."""
    count, kind = byte.type.count, byte.type

    def all_of(value):
        return ir.Constant(kind, [value] * count)

    size = builder.and_(byte, all_of(0x7F))
    normal = builder.add(builder.shl(size, all_of(20)), all_of(120 << 23))
    small = builder.fmul(
        builder.sitofp(size, floats), ir.Constant(floats, [float(_FP8_DENORMAL)] * count)
    )
    is_small = builder.icmp_signed("<", size, all_of(8))
    found = builder.select(is_small, builder.bitcast(small, kind), normal)
    is_nan = builder.icmp_signed("==", size, all_of(0x7F))
    found = builder.select(is_nan, all_of(0x7FC00000), found)
    sign = builder.shl(builder.and_(byte, all_of(0x80)), all_of(24))
    return builder.bitcast(builder.or_(found, sign), floats)


def _emit_pair(builder: Any, first: Any, second: Any) -> Any:
    """Emit the rounding of two vectors of float32 to bfloat16 (to nearest even), joined in words
    with `first` in the low halves."""
    kind = ir.VectorType(_I32, first.type.count)

    def all_of(value):
        return ir.Constant(kind, [value] * kind.count)

    def word(value):
        """The rounded number in the high half of a word; the low half is undefined."""
        bits = builder.bitcast(value, kind)
        last = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
        near = builder.add(bits, builder.add(last, all_of(0x7FFF)))
        return builder.select(builder.fcmp_unordered("uno", value, value), all_of(0x7FC00000), near)

    def half(value):
        narrow = builder.fptrunc(value, ir.VectorType(BFloat(), kind.count))
        halves = builder.bitcast(narrow, ir.VectorType(ir.IntType(16), kind.count))
        return builder.zext(halves, kind)

    # One instruction, which makes zeros of the smallest numbers, as products that use it do.
    if isa.has("avx512bf16"):
        return builder.or_(half(first), builder.shl(half(second), all_of(16)))
    low = builder.lshr(word(first), all_of(16))
    return builder.or_(low, builder.and_(word(second), all_of(0xFFFF0000)))


@njit(**EXACT)
def _add_plane(source, target, strides, num, plane):
    """Add one plane of bits of a unit to the unpacked quads, `num` words of 32 bits for each.
    strides: bytes from a row of `source` to the next, and from a quad of `target` to the next;
    plane: (bits, position of the lowest bit in a value); a plane at position 0 overwrites."""
    width, shift = plane
    count, mask = 8 // width, np.uint32(_ONES * np.uint32((1 << width) - 1))
    up = np.uint32(shift)
    for row in range(width):
        packed = u32(source + row * strides[0], (num,))
        for part in range(count):
            quad = row + part * width if width == 4 else row * count + part
            words = u32(target + quad * strides[1], (num,))
            down = np.uint32(part * width)
            if shift == 0:
                for i in range(num):
                    words[i] = np.uint32(packed[i] >> down) & mask
            else:
                for i in range(num):
                    bits = np.uint32(np.uint32(packed[i] >> down) & mask)
                    words[i] = words[i] | np.uint32(bits << up)


@njit(**INNER, fastmath=False)
def _unpack(d, source, target, strides, num):
    """Unpack one unit to a byte for each element; the arguments are those of `_add_plane`."""
    bits = d[_BITS]
    high = source + 4 * strides[0]  # the rows after a plane of 4 bits
    if bits == 8:
        _add_plane(source, target, strides, num, (8, 0))
    elif bits == 2 or bits == 3:
        _add_plane(source, target, strides, num, (2, 0))
        if bits == 3:
            _add_plane(source + 2 * strides[0], target, strides, num, (1, 2))
    else:
        _add_plane(source, target, strides, num, (4, 0))
        if bits == 5:
            _add_plane(high, target, strides, num, (1, 4))
        elif bits == 6:
            _add_plane(high, target, strides, num, (2, 4))
    if d[_CODEBOOK]:
        codes = u8(d[_CODEBOOK], (16,))
        for quad in range(_QUADS):
            values = u8(target + quad * strides[1], (num * 4,))
            for i in range(num * 4):
                values[i] = codes[values[i] & np.uint8(15)]


@njit(**EXACT)
def _half(bits):
    """Convert the bits of a float16 to float32."""
    size = np.int32(bits & np.int32(0x7FFF))
    sign = np.int32(np.int32(bits & np.int32(0x8000)) << _HALF)
    small = np.float32(size) * _HALF_DENORMAL
    normal = np.int32(np.int32(size << np.int32(13)) + np.int32(112 << 23))
    if size >= _HALF_INFINITY:
        normal = np.int32(np.int32(size << np.int32(13)) | _INFINITY)
    found = bits_of_float(small) if size < np.int32(0x400) else normal
    return float_of_bits(np.int32(found | sign))


@njit(**EXACT)
def _read_scales(source, kind, outer, target):
    """Fill the float32 array `target` with scales of a kind (see `_KINDS`), multiplied by those at
    address `outer` if it is not 0."""
    num = len(target)
    if kind == 0:
        floats = f32(source, (num,))
        for i in range(num):
            target[i] = floats[i]
    elif kind == 3:
        small = u8(source, (num,))
        for i in range(num):
            value = np.int32(small[i])
            target[i] = np.float32(value - np.int32(256) if value > np.int32(127) else value)
    else:
        halves = u16(source, (num,))
        if kind == 1:
            for i in range(num):
                target[i] = _half(np.int32(halves[i]))
        else:
            for i in range(num):
                target[i] = float_of_bits(np.int32(np.int32(halves[i]) << _HALF))
    if outer:
        factors = f32(outer, (num,))
        for i in range(num):
            target[i] *= factors[i]


@njit(**EXACT)
def _scale_bytes(kind):
    return 4 if kind == 0 else 1 if kind == 3 else 2


@njit(**INNER, fastmath=False)
def _read_group(d, place, scales, offsets):
    """Fill `scales` and `offsets` with those of some outputs of one group. place: (panel, group,
    number of the first output in the panel)."""
    panel, group, first = place
    at = (panel * d[_GROUPS] + group) * PANEL + first
    above = (panel * d[_SUPERS] + group * d[_GROUP_SIZE] // d[_OUTER_SIZE]) * PANEL + first
    kind, outer = d[_SCALE_KIND], d[_OUTER_SCALES]
    _read_scales(
        d[_SCALES] + at * _scale_bytes(kind), kind, outer + above * 4 if outer else 0, scales
    )
    if d[_OFFSETS]:
        kind, outer = d[_OFFSET_KIND], d[_OUTER_OFFSETS]
        _read_scales(
            d[_OFFSETS] + at * _scale_bytes(kind), kind, outer + above * 4 if outer else 0, offsets
        )
    else:
        offsets[:] = _NO_OFFSET


def _piece_filler(how: int):
    @njit(**INNER, fastmath=False, error_model="numpy")
    def fill(table, panel, span, target, stride):
        d = i64(table, (_TABLE,))
        first, count = span
        bits, end = d[_BITS], min(first + count, d[_UNITS])
        bytes_of_unit = bits * _ROW
        unpacked = np.empty(_QUADS * _ROW, np.uint8)
        scales, offsets = np.empty(PANEL, np.float32), np.empty(PANEL, np.float32)
        zero, last = np.float32(d[_ZERO]), -1
        down = 4 * stride if how == FLOATS else 2 * stride
        for unit in range(first, end):
            source = d[_VALUES] + (panel * d[_UNITS] + unit) * bytes_of_unit
            _unpack(d, source, unpacked.ctypes.data, (_ROW, _ROW), 32)
            for quad in range(_QUADS):
                group = (unit * UNIT + quad * 4) // d[_GROUP_SIZE]
                if group != last:
                    # Columns of padding may be past the last group; their values are not used.
                    last = min(group, d[_GROUPS] - 1)
                    _read_group(d, (panel, last, 0), scales, offsets)
                for half in range(2):
                    words = unpacked.ctypes.data + quad * _ROW + half * 64
                    a, b, to = (
                        scales[16 * half :].ctypes.data,
                        offsets[16 * half :].ctypes.data,
                        target + half * 64,
                    )
                    if d[_IS_FLOAT]:
                        _widen_quad(words, a, b, zero, to, stride, how, 1)
                    else:
                        _widen_quad(words, a, b, zero, to, stride, how, 0)
                target += down

    return fill


# fill(table, panel, span, target, stride): dequantise `span` (first, number) units of a panel of 32
# outputs. `target`: the address of the first input's outputs, `stride` bytes from the next's.
fill_floats, fill_pairs = _piece_filler(FLOATS), _piece_filler(PAIRS)


@njit(**EXACT)
def _fp8(byte):
    """Convert a byte of type e4m3fn to float32."""
    size = np.int32(byte & np.int32(0x7F))
    sign = np.int32(np.int32(byte & np.int32(0x80)) << np.int32(24))
    small = np.float32(size) * _FP8_DENORMAL
    normal = np.int32(np.int32(size << np.int32(20)) + np.int32(120 << 23))
    found = bits_of_float(small) if size < np.int32(8) else normal
    if size == np.int32(0x7F):
        found = np.int32(0x7FC00000)
    return float_of_bits(np.int32(found | sign))


def _rows_body(cell: int):
    """Make the body that dequantises single rows to elements of `cell` bytes."""

    def body(row):
        p = i64(row, (6,))
        d = i64(p[1], (_TABLE,))
        num_in, bits, zero = d[_NUM_IN], d[_BITS], np.float32(d[_ZERO])
        unpacked = np.empty(UNIT, np.uint8)
        scale, offset = np.empty(1, np.float32), np.empty(1, np.float32)
        order = i32(d[_ORDER], (num_in,))
        while True:
            n = next_item(row)
            if n >= p[4]:
                break
            index = id_at(p[2], n, p[5])
            panel, where = index // PANEL, index % PANEL
            out = elements(p[3] + n * num_in * cell, (num_in,), cell)
            last = -1
            for k in range(num_in):
                if k % UNIT == 0:
                    unit = panel * d[_UNITS] + k // UNIT
                    source = d[_VALUES] + unit * bits * _ROW + where * 4
                    _unpack(d, source, unpacked.ctypes.data, (_ROW, 4), 1)
                group = k // d[_GROUP_SIZE]
                if group != last:
                    last = group
                    _read_group(d, (panel, group, where), scale, offset)
                byte = unpacked[k % UNIT]
                value = _fp8(byte) if d[_IS_FLOAT] else np.float32(byte) - zero
                value = scaled(value, scale[0], offset[0])
                put(out, order[k] if d[_ORDER] else k, value)

    return body


@njit(**EXACT)
def scaled(value, scale, offset):
    """Returns value * scale + offset, both operations rounded."""
    return np.float32(value * scale) + offset


def _gather_body(cell: int):
    """Make the body that copies columns of rows in a given order; elements have `cell` bytes."""

    def body(row):
        p = i64(row, (6,))
        num, width = p[4], p[5]
        order = i32(p[2], (width,))
        while True:
            n = next_item(row)
            if n >= num:
                break
            if cell == 4:
                wide, to = f32(p[1] + n * width * 4, (width,)), f32(p[3] + n * width * 4, (width,))
                for i in range(width):
                    to[i] = wide[order[i]]
            else:
                halves = u16(p[1] + n * width * 2, (width,))
                copies = u16(p[3] + n * width * 2, (width,))
                for i in range(width):
                    copies[i] = halves[order[i]]

    return body


# By bytes of an element.
ROWS = {cell: Kernel(_rows_body(cell)) for cell in (4, 2)}
GATHER = {cell: Kernel(_gather_body(cell)) for cell in (4, 2)}
