"""Converts integer sums of a product to floats: subtracts, scales, adds the bias or applies gates.

Floats are rounded to the type of the outputs."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.vectors import LANES, BFloat, fma, splat

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_ROUNDS = isa.has("avx512bf16")  # one instruction rounds a vector to bfloat16
_GELU_INNER, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
_EXP2 = (1.00000259, 0.69300384, 0.24144274, 0.05201149, 0.01353415)
"""Terms of a polynomial that is 2 ** x for 0 <= x < 1, with a relative error of 4e-6."""
_FLOOR = 9  # subtract the largest integer that is not above
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
            values = _scaled(builder, (totals, taken, scales), factor, index)
            if adds:
                values = builder.fadd(values, _vector(builder, bias, index, _FLOATS))
            _store(builder, values, out, index, num_bytes)
        return context.get_dummy_value()

    places = (types.intp,) * 4
    return types.void(*places, types.float32, types.intp, *literals), build


def _scaled(builder: Any, place: tuple[Any, Any, Any], factor: Any, index: int) -> Any:
    """Emit float(totals - taken) * (factor * scales). place: addresses of the three."""
    totals, taken, scales = place
    sums = _vector(builder, totals, index, _WORDS)
    sums = builder.sub(sums, _vector(builder, taken, index, _WORDS))
    scale = builder.fmul(factor, _vector(builder, scales, index, _FLOATS))
    return builder.fmul(builder.sitofp(sums, _FLOATS), scale)


def _intrinsic(builder: Any, name: str, *args: Any) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(_FLOATS, [arg.type for arg in args])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def _sigmoid(builder: Any, power: Any) -> Any:
    """Emit 1 / (1 + 2 ** power) with AVX-512, with a relative error of about 2 ** -13: enough for
    results that are rounded to bfloat16."""
    zero, every, nearest = _all(0.0), ir.IntType(16)(0xFFFF), _I32(4)
    part = _intrinsic(
        builder,
        "llvm.x86.avx512.mask.reduce.ps.512",
        *(power, _I32(_FLOOR), zero, every, nearest),
    )
    mantissa = _all(_EXP2[-1])
    for term in _EXP2[-2::-1]:
        mantissa = fma(builder, mantissa, part, _all(term))
    whole = _intrinsic(
        builder, "llvm.x86.avx512.mask.scalef.ps.512", mantissa, power, zero, every, nearest
    )
    below = builder.fadd(whole, _all(1.0))
    return _intrinsic(builder, "llvm.x86.avx512.rcp14.ps.512", below, zero, every)


def _activated(builder: Any, x: Any, act: int) -> Any:
    """Emit silu (act 0) or GELU by the tanh approximation (act 1): both are x * sigmoid(z)."""
    z = x
    if act:
        cubed = fma(builder, builder.fmul(x, x), _all(_GELU_CUBE), _all(1.0))
        z = builder.fmul(builder.fmul(x, _all(_GELU_INNER)), cubed)
    return builder.fmul(x, _sigmoid(builder, builder.fmul(z, _all(-1 / math.log(2)))))


@intrinsic(prefer_literal=True)
def write_activated(typing_context, gates, ups, out, act):
    """Write activation(gate) * up to `out`, 16 bfloat16, as `write_gated` does. gates, ups:
    addresses of float32; act: a literal."""
    if not isinstance(act, types.Literal):
        return None
    how = act.literal_value

    def build(context, builder, signature, args):
        gate, up = (_vector(builder, args[side], 0, _FLOATS) for side in range(2))
        _store(builder, builder.fmul(_activated(builder, gate, how), up), args[2], 0, 2)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, act), build


def _all(number: float) -> Any:
    return ir.Constant(_FLOATS, [number] * LANES)


@intrinsic(prefer_literal=True)
def write_gated(typing_context, gates, ups, row_scale, out, vectors, act):
    """Write activation(gate) * up to `out`, `vectors` times 16 bfloat16. gates, ups: addresses of
    (sums, what is subtracted from them, scales), as in `write_scaled`; act: 0 (silu) or 1 (GELU by
    tanh). The last two arguments are literals."""
    literals = (vectors, act)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    num, how = (given.literal_value for given in literals)

    def build(context, builder, signature, args):
        sides = [[builder.extract_value(args[side], i) for i in range(3)] for side in range(2)]
        factor = splat(builder, args[2], LANES)
        for index in range(num):
            gate, up = (_scaled(builder, side, factor, index) for side in sides)
            values = builder.fmul(_activated(builder, gate, how), up)
            _store(builder, values, args[3], index, 2)
        return context.get_dummy_value()

    places = types.UniTuple(types.intp, 3)
    return types.void(places, places, types.float32, types.intp, *literals), build
