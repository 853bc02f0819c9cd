"""Converts integer sums of a product to floats: subtracts, scales, adds the bias and rounds."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.vectors import LANES, BFloat, splat

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_ROUNDS = isa.has("avx512bf16")  # one instruction rounds a vector to bfloat16
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


def _vector(builder: Any, address: Any, index: int, kind: Any) -> Any:
    place = builder.add(address, _I64(index * LANES * 4))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=4)


def _store(builder: Any, values: Any, address: Any, index: int, size: int) -> None:
    if size == 2:
        values = rounded(builder, values)
    place = builder.add(address, _I64(index * LANES * size))
    builder.store(values, builder.inttoptr(place, values.type.as_pointer()), align=size)


def rounded(builder: Any, floats: Any) -> Any:
    """Emit the conversion of 16 float32 to bfloat16, rounded to nearest even; NaN stays NaN."""
    if _ROUNDS:
        return builder.fptrunc(floats, ir.VectorType(BFloat(), LANES))

    def all_of(number: int) -> Any:
        return ir.Constant(_WORDS, [number] * LANES)

    bits = builder.bitcast(floats, _WORDS)
    is_odd = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
    nearest = builder.add(bits, builder.add(is_odd, all_of(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, all_of(_MAGNITUDE)), all_of(_INFINITY))
    nearest = builder.select(is_nan, all_of(_NAN), nearest)
    return builder.trunc(builder.lshr(nearest, all_of(16)), ir.VectorType(_I16, LANES))


@intrinsic(prefer_literal=True)
def write_scaled(  # noqa: PLR0913
    typing_context, totals, taken, scales, bias, row_scale, out, vectors, size, has_bias
):
    """Write float(totals - taken) * (row_scale * scales) + bias to `out`, `vectors` times 16
    numbers of `size` bytes: 4 (float32) or 2 (bfloat16). totals, taken: addresses of int32; scales,
    bias: addresses of float32; row_scale: float32. The last three arguments are literals."""
    literals = (vectors, size, has_bias)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    num, num_bytes, adds = (given.literal_value for given in literals)

    def build(context, builder, signature, args):
        totals, taken, scales, bias, row_scale, out = args[:6]
        factor = splat(builder, row_scale, LANES)
        for index in range(num):
            sums = _vector(builder, totals, index, _WORDS)
            sums = builder.sub(sums, _vector(builder, taken, index, _WORDS))
            scale = builder.fmul(factor, _vector(builder, scales, index, _FLOATS))
            values = builder.fmul(builder.sitofp(sums, _FLOATS), scale)
            if adds:
                values = builder.fadd(values, _vector(builder, bias, index, _FLOATS))
            _store(builder, values, out, index, num_bytes)
        return context.get_dummy_value()

    places = (types.intp,) * 4
    return types.void(*places, types.float32, types.intp, *literals), build
