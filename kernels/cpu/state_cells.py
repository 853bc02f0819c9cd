"""Loads and stores of recurrent states, generated as LLVM code: states are float32, bfloat16 or
float16 in memory, and float32 in registers."""

from __future__ import annotations

import torch
from llvmlite import ir

from kernels.cpu import isa
from kernels.cpu.block_vectors import load, same
from kernels.cpu.vectors import LANES, BFloat, load_floats

# Types of a state in memory, which generated code takes as literals.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
STATE_TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
if isa.widens_float16():  # otherwise a conversion would be a call for each element
    STATE_TYPES[torch.float16] = FLOAT16
"""Types of states that compiled loops read and write."""

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_ROUNDS = isa.has("avx512bf16")


def state_bytes(kind: int) -> int:
    """Returns the bytes of one element of a state."""
    return 4 if kind == FLOAT32 else 2


def load_state(builder, address, kind, lanes):
    """Emit the load of elements of a state. Returns a vector of float32."""
    if kind == FLOAT16:
        halves = load(builder, address, ir.VectorType(ir.HalfType(), lanes), 2)
        return builder.fpext(halves, ir.VectorType(_F32, lanes))
    return load_floats(builder, address, _I64(0), lanes, state_bytes(kind))


def round_state(builder, value, kind):
    """Emit the rounding of a vector of float32 to the type of a state. Returns the vector to store,
    and the vector of float32 that a later load of it gives."""
    if kind == FLOAT32:
        return value, value
    lanes = value.type.count
    if kind == FLOAT16:
        stored = builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes))
        return stored, builder.fpext(stored, value.type)
    words, halves = ir.VectorType(_I32, lanes), ir.VectorType(_I16, lanes)
    if _ROUNDS and lanes == LANES:
        stored = builder.bitcast(builder.fptrunc(value, ir.VectorType(BFloat(), lanes)), halves)
        upper = builder.shl(builder.zext(stored, words), same(words, 16))
        return stored, builder.bitcast(upper, value.type)
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, same(words, 16)), same(words, 1))
    nearest = builder.lshr(
        builder.add(bits, builder.add(odd, same(words, 0x7FFF))), same(words, 16)
    )
    is_nan = builder.fcmp_unordered("uno", value, value)
    nearest = builder.select(is_nan, same(words, 0x7FC0), nearest)
    upper = builder.shl(nearest, same(words, 16))
    return builder.trunc(nearest, halves), builder.bitcast(upper, value.type)
