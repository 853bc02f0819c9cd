"""Online softmax of attention scores: pieces shared by its bodies."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.mathlib import LOG2_E, exp2, tanh
from kernels.cpu.native import INLINE
from kernels.cpu.vectors import largest as largest_of

EMPTY = np.float32(-1e30)  # the largest score of no keys: finite, so that differences are too
_ZERO, _NAN = np.float32(0), np.float32("nan")


@njit(**INLINE)
def soften(scores, first, end, largest, total, acc):
    """Scores [first, end) become weights relative to the largest so far, which is returned.

    What was summed before, total[0] and acc, is rescaled to it. Scores are in units of log 2.
    """
    # A NaN may be missed here: its own weight still becomes one, and so does the sum.
    best = largest_of(scores.ctypes.data + first * 4, end - first, largest)
    if best > largest:
        shrink = exp2(largest - best)
        total[0] *= shrink
        for d in range(acc.shape[0]):
            acc[d] *= shrink
    weights, added = scores[first:end], _ZERO
    for i in range(weights.shape[0]):
        weight = exp2(weights[i] - best)
        weights[i] = weight
        added += weight
    total[0] += added
    return best


@njit(**INLINE)
def cap(scores, softcap):
    """cap * tanh(score / cap), from natural units to units of log 2."""
    for i in range(scores.shape[0]):
        scores[i] = tanh(scores[i] / softcap) * (softcap * LOG2_E)


@njit(**INLINE)
def divisor(total, sinks, head, largest):
    """A head's sum of weights, with that of the key without a value if there are sinks.

    NaN where every score was -inf: what is not finite must come out not finite.
    """
    if largest == EMPTY:
        return _NAN
    return total + (exp2(sinks[head] * LOG2_E - largest) if sinks.shape[0] else _ZERO)


@njit(**INLINE)
def scale_by(factor, target):
    for i in range(target.shape[0]):
        target[i] *= factor


@njit(**INLINE)
def copy(source, target):
    for i in range(source.shape[0]):
        target[i] = source[i]


@njit(**INLINE)
def fill(target, value):
    for i in range(target.shape[0]):
        target[i] = value
