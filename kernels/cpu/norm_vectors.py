"""Gated norms of rows of whole vectors of 16 elements, generated as LLVM code. Addresses are in
bytes; size: bytes of an element, a literal 4 or 2."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.columns import over_rows, row_at, silu_rows, store_floats
from kernels.cpu.vectors import LANES, LINE, fma, load_floats, splat, sum_lanes

_F32, _I64 = ir.FloatType(), ir.IntType(64)


@intrinsic(prefer_literal=True)
def widen_row(typing_context, x, gate, target, count, size, opens):
    """Write x, or x * silu(gate) if ``opens``, a literal, is 1, to ``target`` as float32, and
    return the sum of their squares. x, gate, target: addresses; count: number of vectors."""
    if not all(isinstance(given, types.Literal) for given in (size, opens)):
        return None
    num_bytes, is_gated = size.literal_value, opens.literal_value == 1

    def build(context, builder, signature, args):
        x, gate, target, count = args[:4]
        rows = x, _I64(LANES * num_bytes), count

        def step(offset, values):
            place, total = values
            value = load_floats(builder, x, offset, LANES, num_bytes)
            if is_gated:
                opened = silu_rows(builder, load_floats(builder, gate, offset, LANES, num_bytes))
                value = builder.fmul(value, opened)
            store_floats(builder, value, place, 4)
            return [builder.add(place, _I64(LINE)), fma(builder, value, value, total)]

        zero = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
        _, total = over_rows(builder, rows, [target, zero], step)
        return sum_lanes(builder, total)

    return types.float32(*[types.intp] * 4, size, opens), build


@intrinsic(prefer_literal=True)
def scale_row(typing_context, x, places, count, scale, size, opens):
    """Write x * scale * weight to the target, times silu(gate) if ``opens``, a literal, is 1. x:
    address of float32; places: addresses of weight, gate and target; count: number of vectors."""
    if not all(isinstance(given, types.Literal) for given in (size, opens)):
        return None
    num_bytes, is_gated = size.literal_value, opens.literal_value == 1

    def build(context, builder, signature, args):
        x, places, count, scale = args[:4]
        weight, gate, target = (builder.extract_value(places, i) for i in range(3))
        factor = splat(builder, scale, LANES)

        def step(offset, values):
            (place,) = values
            value = builder.fmul(row_at(builder, place, _I64(0)), factor)
            value = builder.fmul(value, load_floats(builder, weight, offset, LANES, num_bytes))
            if is_gated:
                opened = silu_rows(builder, load_floats(builder, gate, offset, LANES, num_bytes))
                value = builder.fmul(value, opened)
            store_floats(builder, value, builder.add(target, offset), num_bytes)
            return [builder.add(place, _I64(LINE))]

        over_rows(builder, (x, _I64(LANES * num_bytes), count), [x], step)
        return context.get_dummy_value()

    three = types.UniTuple(types.intp, 3)
    return types.void(types.intp, three, types.intp, types.float32, size, opens), build
