"""Noise for sampling as in `kernels.reference.sampling`, except for the last bits of logarithms."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference import sampling as reference

GOLDEN = tl.constexpr(reference.GOLDEN)
MIX_1 = tl.constexpr(reference.MIX_1)
MIX_2 = tl.constexpr(reference.MIX_2)
UNUSED_BITS = tl.constexpr(64 - reference.UNIFORM_BITS)
STEPS = tl.constexpr(2**reference.UNIFORM_BITS)
STEP = tl.constexpr(2.0**-reference.UNIFORM_BITS)
SERIES_BELOW = tl.constexpr(0.125)


@triton.jit
def mix(z):
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def row_key(seed, position):
    """Returns the hash of a row's seed (all 64 bits) and position."""
    start = mix(seed.to(tl.uint64, bitcast=True) + GOLDEN)
    return mix(start + (position.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def steps_of(key, ids):
    """Returns the uniform random numbers of token ids, as integers below STEPS."""
    return (mix(key + (ids.to(tl.uint64) + 1) * GOLDEN) >> UNUSED_BITS).to(tl.int64)


@triton.jit
def uniform(steps):
    """Convert integers from `steps_of` to float64 inside (0, 1)."""
    return (steps.to(tl.float64) + 0.5) * STEP


@triton.jit
def gumbel(steps):
    """Returns Gumbel noise in float64 for integers from `steps_of`."""
    v = uniform(steps)
    rest = 1.0 - v
    logs = tl.where(rest == 1.0, -v, tl.log(rest) * (v / (1.0 - rest)))
    return -tl.log(-logs)


@triton.jit
def rough_gumbel(steps):
    """Returns Gumbel noise in float32 for integers from `steps_of`, with an error below 1e-5."""
    # A series replaces the device's logarithm near one, where that is inexact.
    v = (steps.to(tl.float32) + 0.5) * STEP
    rest = ((-steps + STEPS).to(tl.float32) - 0.5) * STEP
    series = 1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4 + v * (1.0 / 5 + v * (1.0 / 6)))))
    return -tl.log(tl.where(v < SERIES_BELOW, v * series, -tl.log(rest)))
