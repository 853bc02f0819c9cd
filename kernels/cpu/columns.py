"""Rows of 16 columns gone through together, written as LLVM vector code.

What runs down columns needs no sum across lanes: a vector's lanes stay apart, whatever the rows
say. As in `kernels.cpu.vectors`, addresses and strides are in bytes.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vectors import LANES, LINE

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_F32, LANES)


def _at(builder, base, offset, kind):
    """The pointer to a `kind` that lies so many bytes behind an address."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def _row(builder, base, offset, kind=_FLOATS):
    return builder.load(_at(builder, base, offset, kind), align=4)


def _put(builder, row, base, offset):
    builder.store(row, _at(builder, base, offset, row.type), align=4)


def _over_rows(builder, rows, carried, step):
    """Run step(offset, values) for each of `rows`, an address, the bytes between them and their
    number; what it returns are the next values. Returns the last ones."""
    _, stride, count = rows
    before = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("rows", "all"))
    builder.cbranch(builder.icmp_signed(">", count, _I64(0)), loop, done)
    builder.position_at_end(loop)
    at, *values = (builder.phi(kind) for kind in [_I64] + [value.type for value in carried])
    following = step(builder.mul(at, stride), values)
    ends, after = builder.block, builder.add(at, _I64(1))
    for phi, initial, last in zip(
        (at, *values), (_I64(0), *carried), (after, *following), strict=True
    ):
        phi.add_incoming(initial, before)
        phi.add_incoming(last, ends)
    builder.cbranch(builder.icmp_signed("<", after, count), loop, done)
    builder.position_at_end(done)
    results = [builder.phi(value.type) for value in carried]
    for phi, initial, last in zip(results, carried, following, strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(last, ends)
    return results


@intrinsic
def lower_to_largest(typing_context, address, stride, count, largest):
    """Of `count` rows of 16 float32: largest[i] = the largest of it and of column i, which it is
    taken from. A NaN is passed over, and stays one."""

    def build(context, builder, signature, args):
        zero = _I64(0)

        def choose(offset, values):
            seen = _row(builder, args[0], offset)
            return [builder.select(builder.fcmp_ordered(">", seen, values[0]), seen, values[0])]

        def lower(offset, values):
            seen = _row(builder, args[0], offset)
            _put(builder, builder.fsub(seen, best), args[0], offset)
            return []

        first = _row(builder, args[3], zero)
        (best,) = _over_rows(builder, args[:3], [first], choose)
        _put(builder, best, args[3], zero)
        _over_rows(builder, args[:3], [], lower)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build


@intrinsic
def pair_rows(typing_context, address, stride, count, target, total):
    """Rows of 16 float32 two by two: target[k] = pairs of bfloat16, rounded to the nearest, ties to
    even, of rows 2 * k and 2 * k + 1. count: of pairs; total[i] += the sum of column i."""

    def build(context, builder, signature, args):
        address, stride, count, target, total = args
        twice = builder.shl(stride, _I64(1))

        def step(offset, values):
            rows = [_row(builder, address, at) for at in (offset, builder.add(offset, stride))]
            even, odd = (_rounded(builder, row) for row in rows)
            sixteen = ir.Constant(even.type, [16] * LANES)
            upper = ir.Constant(even.type, [0xFFFF0000] * LANES)
            pairs = builder.or_(builder.lshr(even, sixteen), builder.and_(odd, upper))
            _put(builder, pairs, values[0], _I64(0))
            return [
                builder.add(values[0], _I64(LINE)),
                builder.fadd(values[1], builder.fadd(*rows)),
            ]

        sums = _row(builder, total, _I64(0))
        _, sums = _over_rows(builder, (address, twice, count), [target, sums], step)
        _put(builder, sums, total, _I64(0))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


def _rounded(builder, floats):
    """The bits of float32, the upper 16 the nearest bfloat16's; the lower are left over."""
    kind = ir.VectorType(_I32, LANES)

    def all_of(number):
        return ir.Constant(kind, [number] * LANES)

    bits = builder.bitcast(floats, kind)
    is_odd = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
    up = builder.add(bits, builder.add(is_odd, all_of(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, all_of(0x7FFFFFFF)), all_of(0x7F800000))
    return builder.select(is_nan, all_of(0x7FC00000), up)


@intrinsic
def interleave16(typing_context, source, ld_source, target, ld_target):
    """16 rows of 32 bfloat16 to the same in pairs, 8 rows of [16 columns, 2] each in two places.

    Of each quarter of the columns the first four go to `target` + 64 * k, the others `ld_target`
    behind them.
    """

    def build(context, builder, signature, args):
        source, ld_source, target, ld_target = args
        halves = ir.VectorType(_I16, 2 * LANES)
        for k in range(LANES // 2):
            rows = [
                _row(builder, source, builder.mul(ld_source, _I64(2 * k + i)), halves)
                for i in range(2)
            ]
            for upper in range(2):
                columns = [quarter * 8 + 4 * upper + i for quarter in range(4) for i in range(4)]
                mask = [row * 2 * LANES + column for column in columns for row in range(2)]
                kind = ir.VectorType(_I32, 2 * LANES)
                pairs = builder.shuffle_vector(*rows, ir.Constant(kind, mask))
                place = builder.add(_I64(LINE * k), builder.mul(ld_target, _I64(upper)))
                _put(builder, pairs, target, place)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build
