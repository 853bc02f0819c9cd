"""Converts KV cache rows of 8-bit numbers. A row is the key or the value of one token in one head.

Two formats, distinguished by the bytes of a row of D numbers:

    integers   D int8, then their scale as float32: D + 4 bytes. A number is code * scale.
    floats     D float8_e4m3fn: D bytes. A number is code * factor, a factor of its layer and head.

Compiled code reads rows into float32 or bfloat16 memory, from which products take them."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.cells import write_cells
from kernels.cpu.native import EXACT, bits_of_float, f32, float_of_bits, u8
from kernels.cpu.vectors import LANES, LINE, BFloat, emit_prefetch, fence, splat
from kernels.reference.kv_rows import LARGEST_CODE, SMALLEST_ROW

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), *(ir.IntType(size) for size in (8, 16, 32, 64))
_SIGN, _CODE = 0x80, 0x7F
_NORMAL = 8  # smallest code of a normal 8-bit float, 2 ** -6
_SHIFT = 20  # bits of float32's mantissa that an 8-bit float lacks
_BIAS = 120 << 23  # difference of the exponents' biases
_SHRUNK = 8  # difference of the exponents' biases of float16 and 8-bit floats
_LARGEST, _SMALLEST_NORMAL = np.float32(448), np.float32(2**-6)
_GRID = np.float32(2**14)  # a float32 from here to 2 ** 15 is a multiple of 2 ** -9
_ROUNDER = np.float32(1.5 * 2**23)  # numbers of up to 22 bits are rounded when this is added
_MOST, _TINY = np.float32(LARGEST_CODE), np.float32(SMALLEST_ROW)
_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32("nan")
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@njit(**EXACT)
def write_row(target, row, size, cell, factor):
    """Write a row of float32 to the cache at address `target`. size: bytes of the stored row; cell:
    bytes of a number, 4, 2 or 1; factor: 8-bit floats are stored divided by it."""
    if cell > 1:
        write_cells(target, row, cell)
    elif size > row.shape[0]:
        _write_integers(target, row)
    else:
        _write_floats(target, row, factor)


@njit(**EXACT)
def _write_integers(target, row):
    """Write a row as integers and their scale, which is NaN if a number is not finite."""
    codes, num = u8(target, row.shape), row.shape[0]
    most = np.int32(0)
    for i in range(num):
        most = max(most, bits_of_float(row[i]) & _MAGNITUDE)
    largest = float_of_bits(most)
    inverse = _MOST / largest if largest > _TINY else _ZERO
    for i in range(num):
        codes[i] = np.uint8(bits_of_float(row[i] * inverse + _ROUNDER) & np.int32(0xFF))
    f32(target + num, (1,))[0] = largest / _MOST if most < _INFINITY else _NAN


@njit(**EXACT)
def _write_floats(target, row, factor):
    """Write a row as 8-bit floats, rounded to nearest even and clamped to 448."""
    codes = u8(target, row.shape)
    for i in range(row.shape[0]):
        number = row[i] / factor
        word = bits_of_float(number)
        size = float_of_bits(word & _MAGNITUDE)
        held = min(size, _LARGEST)
        bits = bits_of_float(held)
        is_odd = (bits >> np.int32(_SHIFT)) & np.int32(1)
        normal = ((bits + (np.int32(0x7FFFF) + is_odd)) >> np.int32(_SHIFT)) - np.int32(960)
        small = bits_of_float(held + _GRID) - bits_of_float(_GRID)
        code = small if held < _SMALLEST_NORMAL else normal
        code = np.int32(_CODE) if (word & _MAGNITUDE) > _INFINITY else code
        codes[i] = np.uint8(code | ((word >> np.int32(24)) & np.int32(_SIGN)))


@njit(inline="always")
def factor_of(scales, half, kv_heads, head):
    """The factor of 8-bit floats of a KV head's keys (half 0) or values (half 1). scales: address
    of [2, KV heads] float32, or 0 if all factors are 1."""
    return f32(scales + (half * kv_heads + head) * 4, (1,))[0] if scales else _ONE


@njit(inline="always")
def widen(source, rows, target, factor, width, held):
    """Convert rows of the cache, or some columns of them, to numbers of `held` bytes (4: float32,
    2: bfloat16). source: address of the first number; rows: (bytes of a row, address of the first
    row's scale or 0 for 8-bit floats, number of rows); target: (address, row stride in bytes,
    address of the rows to prefetch); width: columns. width and held are literals."""
    (size, scale, num), (to, stride, ahead) = rows, target
    if scale:
        widen_integers(source, size, scale, num, to, stride, ahead, width, held)
    else:
        widen_floats(source, size, factor, num, to, stride, ahead, width, held)


@intrinsic(prefer_literal=True)
def widen_integers(typing_context, source, size, scale, num, target, stride, ahead, width, held):  # noqa: PLR0913
    """Convert `num` rows of integers. scale: address of the first row's scale; size, stride: bytes
    between rows of source and target; ahead: address of rows to prefetch, with source's stride;
    width (columns) and held (bytes of a result): literals."""
    if not isinstance(width, types.Literal) or not isinstance(held, types.Literal):
        return None

    def build(context, builder, signature, args):
        source, size, scale, num, target, stride, ahead = args[:7]

        def numbers(row, codes):
            place = builder.add(scale, builder.mul(row, size))
            factor = builder.load(builder.inttoptr(place, _F32.as_pointer()), align=1)
            return builder.sitofp(codes, _floats(codes)), factor

        places = (source, size, target, stride, ahead)
        _convert(builder, places, num, (width.literal_value, held.literal_value), numbers)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, width, held), build


@intrinsic(prefer_literal=True)
def widen_floats(typing_context, source, size, factor, num, target, stride, ahead, width, held):  # noqa: PLR0913
    """Convert `num` rows of 8-bit floats and multiply them by `factor`. Other arguments are those
    of `widen_integers`."""
    if not isinstance(width, types.Literal) or not isinstance(held, types.Literal):
        return None

    def build(context, builder, signature, args):
        source, size, factor, num, target, stride, ahead = args[:7]
        shrunk = builder.fmul(factor, _F32(2.0**_SHRUNK))

        def numbers(row, codes):
            return _decoded(builder, codes), shrunk if _uses_halves(codes) else factor

        places = (source, size, target, stride, ahead)
        _convert(builder, places, num, (width.literal_value, held.literal_value), numbers)
        return context.get_dummy_value()

    kinds = (types.intp, types.intp, types.float32, *[types.intp] * 4)
    return types.void(*kinds, width, held), build


def _floats(codes):
    return ir.VectorType(_F32, codes.type.count)


def _convert(builder, places, num, shape, numbers):
    """Emit a loop over `num` rows that stores numbers(row, codes), a pair of float32 codes and
    their factor, multiplied. places: (source, its stride, target, its stride, what to prefetch);
    shape: (columns, bytes of a result)."""
    source, size, target, stride, ahead = places
    width, held = shape
    # Loads of what was just stored are fast only if they are not larger than the stores.
    lanes = min(LINE // held, width & -width)
    before = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("rows", "all"))
    builder.cbranch(builder.icmp_signed(">", num, _I64(0)), loop, done)
    builder.position_at_end(loop)
    row = builder.phi(_I64)
    first = builder.add(source, builder.mul(row, size))
    out = builder.add(target, builder.mul(row, stride))
    next_row = builder.add(ahead, builder.mul(row, size))
    for line in range(0, width, LINE):
        emit_prefetch(builder, builder.add(next_row, _I64(line)))
    for column in range(0, width, lanes):
        kind = ir.VectorType(_I8, lanes)
        place = builder.inttoptr(builder.add(first, _I64(column)), kind.as_pointer())
        values, factor = numbers(row, builder.load(place, align=1))
        # The fence keeps the product apart from the sums in which it is used.
        found = fence(builder, builder.fmul(values, splat(builder, factor, lanes)))
        _store(builder, found, builder.add(out, _I64(column * held)), held)
    following = builder.add(row, _I64(1))
    row.add_incoming(_I64(0), before)
    row.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, num), loop, done)
    builder.position_at_end(done)


def _store(builder, floats, address, held):
    """Emit the store of a vector of float32, rounded to bfloat16 if `held` is 2."""
    if held == 2:
        floats = _rounded(builder, floats)
    builder.store(floats, builder.inttoptr(address, floats.type.as_pointer()), align=held)


def _rounded(builder, floats):
    """Emit the rounding of a vector of float32 to bfloat16, to nearest even."""
    lanes = floats.type.count
    if isa.has("avx512bf16") and lanes == 2 * LANES:
        return _rounded_pair(builder, floats)
    if isa.has("avx512bf16") and lanes > 1:
        return builder.fptrunc(floats, ir.VectorType(BFloat(), lanes))
    words = ir.VectorType(_I32, lanes)

    def of(number):
        return ir.Constant(words, [number] * lanes)

    bits = builder.bitcast(floats, words)
    is_odd = builder.and_(builder.lshr(bits, of(16)), of(1))
    up = builder.add(bits, builder.add(is_odd, of(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, of(0x7FFFFFFF)), of(0x7F800000))
    kept = builder.select(is_nan, of(0x7FC00000), up)
    return builder.trunc(builder.lshr(kept, of(16)), ir.VectorType(_I16, lanes))


def _rounded_pair(builder, floats):
    """Emit the rounding of 32 float32 to bfloat16 in one instruction."""
    halves = [
        builder.shuffle_vector(floats, floats, ir.Constant(ir.VectorType(_I32, LANES), lanes))
        for lanes in (list(range(LANES, 2 * LANES)), list(range(LANES)))
    ]
    name, result = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFloat(), 2 * LANES)
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [half.type for half in halves])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, halves)


def _decoded(builder, codes):
    """Emit the conversion of a vector of 8-bit floats to float32."""
    lanes = codes.type.count
    if _uses_halves(codes):
        return _decoded_by_halves(builder, codes)
    words = ir.VectorType(_I32, lanes)

    def of(number):
        return ir.Constant(words, [number] * lanes)

    whole = builder.zext(codes, words)
    code = builder.and_(whole, of(_CODE))
    bits = builder.add(builder.shl(code, of(_SHIFT)), of(_BIAS))
    next_power = builder.bitcast(builder.add(bits, of(1 << 23)), _floats(codes))
    smallest = ir.Constant(_floats(codes), [float(_SMALLEST_NORMAL)] * lanes)
    small = builder.bitcast(builder.fsub(next_power, smallest), words)
    found = builder.select(builder.icmp_unsigned("<", code, of(_NORMAL)), small, bits)
    found = builder.select(builder.icmp_signed("==", code, of(_CODE)), of(0x7FC00000), found)
    sign = builder.shl(builder.and_(whole, of(_SIGN)), of(24))
    return builder.bitcast(builder.or_(found, sign), _floats(codes))


def _uses_halves(codes):
    return isa.widens_float16() and codes.type.count > 1


def _decoded_by_halves(builder, codes):
    """Emit the conversion of a vector of 8-bit floats to float32 by way of float16, whose smallest
    normal number is smaller. The results are to be multiplied by 2 ** _SHRUNK."""
    lanes = codes.type.count
    words = ir.VectorType(_I16, lanes)

    def of(number):
        return ir.Constant(words, [number] * lanes)

    moved = builder.and_(builder.shl(builder.sext(codes, words), of(7)), of(0xBF80))
    is_nan = builder.icmp_signed("==", builder.and_(moved, of(0x3F80)), of(0x3F80))
    halves = builder.select(is_nan, of(0x7E00), moved)
    return builder.fpext(
        builder.bitcast(halves, ir.VectorType(ir.HalfType(), lanes)), _floats(codes)
    )
