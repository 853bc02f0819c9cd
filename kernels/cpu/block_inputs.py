"""Quantises inputs of products with packed weights to 8 bits, in units of 32, as LLVM code.

A row for vector code has the layout of ``kernels.cpu.block_vectors``. Rows for tiles are in blocks
of 16, of which each unit is a record."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.block_vectors import (
    BFLOAT16,
    FLOAT32,
    HALF_SPAN,
    LARGEST,
    SCALES_AT,
    STARTS_AT,
    call,
    same,
    shares_at,
    store,
    wide,
)
from kernels.cpu.matmul.blocks import QUAD, UNIT
from kernels.cpu.vectors import splat

_F32 = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000
_LEAST = 0x0D800000  # 2 ** -100 as bits of a float32
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000  # 1.5 * 2 ** 23: adding it rounds to an integer

# A record has the integers of 16 rows as bfloat16 [16, 32], their scales [16], and the shares of
# each group [16]. Of four adjacent inputs, the second and the third are swapped. If the number of
# units is odd, a record of zeros follows.
TILE_ROWS = 16
RECORD_SCALES = TILE_ROWS * UNIT * 2
RECORD_SHARES = RECORD_SCALES + TILE_ROWS * 4


def record_bytes(halves: int) -> int:
    """Returns the bytes of a record, a unit of 16 rows for tiles."""
    return RECORD_SHARES + halves * TILE_ROWS * 4


@intrinsic(prefer_literal=True)
def quantize_unit(typing_context, source, target, units, unit, zero, halves, cell):  # noqa: PLR0913
    """Quantise the 32 inputs at `source` as unit number `unit` of a row of `units` at `target`.
    zero: the zero point of the weights; halves and cell (bytes of an input) are literals."""
    literals = (halves, cell)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    numbers = [one.literal_value for one in literals]

    def build(context, builder, signature, args):
        _emit_quantized(builder, args[:5], *numbers)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5, *literals), build


@intrinsic(prefer_literal=True)
def quantize_for_tiles(typing_context, source, target, row, halves, cell):
    """Quantise the 32 inputs at `source` as a row, 0 to 15, of the record at `target`. halves and
    cell (bytes of an input) are literals."""
    literals = (halves, cell)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    numbers = [one.literal_value for one in literals]

    def build(context, builder, signature, args):
        _emit_record(builder, args[:3], *numbers)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3, *literals), build


def _quantized(builder, source, cell):
    """Emit the integers of 32 inputs, in two vectors, and their scale."""
    floats, words = (ir.VectorType(one, HALF_SPAN) for one in (_F32, _I32))
    kind = FLOAT32 if cell == 4 else BFLOAT16
    places = (builder.add(source, _I64(first * cell)) for first in (0, HALF_SPAN))
    inputs = [wide(builder, place, kind) for place in places]
    # Without the sign bit, floats are ordered like their bits, and NaN is the largest.
    bits = [builder.and_(builder.bitcast(one, words), same(words, _MAGNITUDE)) for one in inputs]
    larger = builder.select(builder.icmp_signed(">", *bits), *bits)
    most = call(builder, f"llvm.vector.reduce.smax.v{HALF_SPAN}i32", _I32, larger)
    is_used = builder.and_(
        builder.icmp_signed(">=", most, _I32(_LEAST)),
        builder.icmp_signed("<", most, _I32(_INFINITY)),
    )
    largest = builder.bitcast(most, _F32)
    inverse = builder.fdiv(ir.Constant(_F32, LARGEST), largest)
    integers = []
    for one in inputs:
        scaled = builder.fmul(one, splat(builder, inverse, HALF_SPAN))
        rounded = builder.bitcast(builder.fadd(scaled, same(floats, _ROUND)), words)
        value = builder.sub(rounded, same(words, _ROUND_BITS))
        integers.append(builder.select(is_used, value, same(words, 0)))
    return integers, builder.fdiv(largest, ir.Constant(_F32, LARGEST))


def _group_sums(builder, integers, halves):
    """Emit the sums of the integers of each group of a unit."""
    if halves == 1:
        integers = [builder.add(*integers)]
    return [call(builder, f"llvm.vector.reduce.add.v{HALF_SPAN}i32", _I32, n) for n in integers]


def _emit_quantized(builder, args, halves, cell):
    source, target, units, unit, zero = args
    integers, scale = _quantized(builder, source, cell)
    for number, values in enumerate(integers):
        place = builder.add(builder.mul(unit, _I64(UNIT)), _I64(number * HALF_SPAN))
        bytes_ = builder.trunc(values, ir.VectorType(_I8, HALF_SPAN))
        store(builder, bytes_, builder.add(target, place), 1)

    def put(value, at, index):
        start = builder.add(target, builder.mul(units, _I64(at)))
        store(builder, value, builder.add(start, builder.mul(index, _I64(4))))

    put(scale, SCALES_AT, unit)
    minus = builder.sub(_I32(0), builder.trunc(zero, _I32))
    for half, total in enumerate(_group_sums(builder, integers, halves)):
        index = builder.add(builder.mul(unit, _I64(halves)), _I64(half))
        put(builder.mul(total, minus), STARTS_AT, index)
        put(builder.fmul(scale, builder.sitofp(total, _F32)), shares_at(halves), index)


def _emit_record(builder, args, halves, cell):
    source, target, row = args
    integers, scale = _quantized(builder, source, cell)
    line = builder.add(target, builder.mul(row, _I64(UNIT * 2)))
    order = [first + i for first in range(0, HALF_SPAN, QUAD) for i in (0, 2, 1, 3)]
    swapped = ir.Constant(ir.VectorType(_I32, HALF_SPAN), order)
    for number, values in enumerate(integers):
        floats = builder.sitofp(values, ir.VectorType(_F32, HALF_SPAN))
        words = builder.lshr(builder.bitcast(floats, values.type), same(values.type, 16))
        words = builder.shuffle_vector(words, words, swapped)
        halves_ = builder.trunc(words, ir.VectorType(_I16, HALF_SPAN))
        store(builder, halves_, builder.add(line, _I64(number * HALF_SPAN * 2)))
    place = builder.add(target, builder.mul(row, _I64(4)))
    store(builder, scale, builder.add(place, _I64(RECORD_SCALES)))
    for half, total in enumerate(_group_sums(builder, integers, halves)):
        share = builder.fmul(scale, builder.sitofp(total, _F32))
        store(builder, share, builder.add(place, _I64(RECORD_SHARES + half * TILE_ROWS * 4)))
