"""Vectorised passes over logits, and integer keys that are ordered like floats.

A row of logits is divided into blocks of `BLOCK`; `block_max` has the largest logit of each block.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.cpu.native import INNER

BLOCK = 64
SPAN = 512  # logits per step of argmax

INFINITY = np.float32(np.inf)
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY_BITS = np.int32(0x7F800000)
SIGN = np.int32(31)
LOWEST = np.int32(-(2**31))
LOWEST_FINITE = np.float32(np.finfo(np.float32).min)

LOG2_E = 1.0 / math.log(2.0)
MIN_EXPONENT = np.float32(-126.0)
HALF = np.float32(0.5)
BIAS, MANTISSA = np.int32(127), np.int32(23)
C = tuple(np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(8))


@njit(inline="always")
def _key(bits):
    """Returns an int32 that is ordered like the float32 with these bits."""
    # The casts to int32 let the compiler use full vectors.
    return np.int32(bits ^ np.int32(np.int32(bits >> SIGN) & MAGNITUDE))


@njit(**INNER)
def block_maxima(x):
    """Returns the largest logit of each block of `BLOCK` logits of x, [ceil(len(x) / BLOCK)]."""
    # Integer keys are compared, since the compiler does not vectorise float maxima.
    bits = x.view(np.int32)
    maxima = np.empty((len(x) + BLOCK - 1) // BLOCK, dtype=np.float32)
    for block in range(len(maxima)):
        highest = LOWEST
        part = bits[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(part)):
            highest = max(highest, _key(part[i]))
        maxima[block] = from_key(highest)
    return maxima


@njit(**INNER)
def argmax(x):
    """Returns the index of the largest value, the first of equal ones; -1 if x has NaN or +inf, or
    only -inf."""
    bits = x.view(np.int32)
    best, where, magnitude = LOWEST, 0, np.int32(0)
    for first in range(0, len(x), SPAN):
        part, highest = bits[first : first + SPAN], LOWEST
        for i in range(len(part)):
            highest = max(highest, _key(part[i]))
            magnitude = max(magnitude, np.int32(part[i] & MAGNITUDE))
        # Compared as floats, since 0 and -0 have different keys.
        if first == 0 or from_key(highest) > from_key(best):
            best, where = highest, first
    peak = from_key(best)
    if magnitude > INFINITY_BITS or not LOWEST_FINITE <= peak < INFINITY:
        return -1
    while x[where] != peak:
        where += 1
    return where


@njit(**INNER)
def is_lowest(x):
    """True if all values are -inf."""
    count = 0
    for i in range(len(x)):
        count += x[i] == -INFINITY
    return count == len(x)


@njit(**INNER)
def largest(values):
    largest = values[0]
    for i in range(1, len(values)):
        largest = max(largest, values[i])
    return largest


@njit(**INNER)
def has_nan(x):
    highest = np.int32(0)
    bits = x.view(np.int32)
    for i in range(len(bits)):
        highest = max(highest, np.int32(bits[i] & MAGNITUDE))
    return highest > INFINITY_BITS


@njit(**INNER)
def first_at(x, block_max, value):
    """Returns the index of the first element of x that equals `value`, one of the maxima in
    block_max."""
    for block in range(len(block_max)):
        if block_max[block] == value:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(x))):
                if x[i] == value:
                    return i
    return -1


@njit(**INNER)
def count_from(values, floor):
    """Returns the number of values that are at least `floor`."""
    count = 0
    for i in range(len(values)):
        count += values[i] >= floor
    return count


@njit(**INNER, fastmath={"reassoc"})
def weight_from(values, weights, floor):
    """Returns the sum of the weights whose values are at least `floor`."""
    total = 0.0
    for i in range(len(values)):
        total += np.float64(weights[i]) if values[i] >= floor else 0.0
    return total


@njit(**INNER, fastmath={"reassoc"})
def weight(x, floor, peak, temperature):
    scale = np.float32(LOG2_E / temperature)
    total = 0.0
    for i in range(len(x)):
        weight = _exp2((x[i] - peak) * scale)
        total += np.float64(weight) if x[i] >= floor else 0.0
    return total


@njit(**INNER)
def weights(values, peak, temperature):
    """Returns exp((value - peak) / temperature) for each value."""
    scale = np.float32(LOG2_E / temperature)
    weights = np.empty(len(values), dtype=np.float32)
    for i in range(len(values)):
        weights[i] = _exp2((values[i] - peak) * scale)
    return weights


@njit(**INNER)
def _exp2(y):
    """2 ** y for y <= 0 in float32 precision; exact for integers; clamped to 2 ** -126."""
    y = max(y, MIN_EXPONENT)
    whole = np.float32(math.floor(y + HALF))
    f = y - whole
    series = C[6] + f * C[7]
    for c in (C[5], C[4], C[3], C[2], C[1], C[0]):
        series = c + f * series
    bits = (np.int32(whole) + BIAS) << MANTISSA
    return series * np.int32(bits).view(np.float32)


@njit(**INNER)
def to_key(value):
    bits = np.float32(value).view(np.int32)
    return np.int64(bits ^ ((bits >> SIGN) & MAGNITUDE))


@njit(**INNER)
def from_key(key):
    bits = np.int32(key)
    return np.int32(bits ^ ((bits >> SIGN) & MAGNITUDE)).view(np.float32)


@njit(**INNER)
def above(value):
    """The next larger float32."""
    return from_key(to_key(value) + 1)


@njit(**INNER)
def at_least(limit):
    """Returns the smallest finite float32 that is at least the float64 `limit`."""
    if limit < LOWEST_FINITE:
        return LOWEST_FINITE
    rounded = np.float32(limit)
    return rounded if rounded >= limit else above(rounded)
