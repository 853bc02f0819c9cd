"""Elementary functions that the compiler can vectorise; Numba's are scalar calls."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.cpu.native import FAST, float_of_bits
from kernels.cpu.vectors import BIAS, EXP2_TERMS, LARGEST, MANTISSA, SMALLEST

LOG2_E = np.float32(1 / math.log(2))
_SMALLEST, _LARGEST = np.float32(SMALLEST), np.float32(LARGEST)
_BIAS, _BIAS_INT, _MANTISSA = np.float32(BIAS), np.int32(BIAS), np.int32(MANTISSA)
_ZERO, _HALF = np.float32(0), np.float32(0.5)
_ONE, _TWO = np.float32(1), np.float32(2)
_GELU_INNER = np.float32(math.sqrt(2 / math.pi))
_GELU_CUBE = np.float32(0.044715)
_C = tuple(map(np.float32, EXP2_TERMS))
# Abramowitz and Stegun 7.1.26, with both factors 1 / sqrt(2) and 1 / 2 multiplied in.
_TAIL_STEP = np.float32(0.3275911 / math.sqrt(2))
_TAIL = tuple(
    np.float32(0.5 * term)
    for term in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)


@njit(inline="always", fastmath=FAST, error_model="numpy")
def exp2(x):
    """2 ** x to about one unit in the last place. NaN stays NaN; x is clamped to avoid overflow."""
    bounded = _SMALLEST if x < _SMALLEST else x
    bounded = _LARGEST if bounded > _LARGEST else bounded
    exponent = np.int32(bounded + (_BIAS + _HALF))  # positive, so truncation rounds down
    r = bounded - np.float32(np.int32(exponent - _BIAS_INT))  # integers are not reassociated
    low = ((_C[7] * r + _C[6]) * r + _C[5]) * r + _C[4]
    mantissa = (((low * r + _C[3]) * r + _C[2]) * r + _C[1]) * r + _ONE
    return mantissa * float_of_bits(exponent << _MANTISSA)


@njit(inline="always", fastmath=FAST, error_model="numpy")
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp2(-x * LOG2_E))


@njit(inline="always", fastmath=FAST, error_model="numpy")
def tanh(x):
    """Hyperbolic tangent, with an absolute error of about 1e-7."""
    return _ONE - _TWO / (exp2(x * (_TWO * LOG2_E)) + _ONE)


@njit(inline="always", fastmath=FAST, error_model="numpy")
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@njit(inline="always", fastmath=FAST, error_model="numpy")
def gelu_tanh(x):
    """GELU by the tanh approximation (Hendrycks and Gimpel 2016)."""
    inner = _GELU_INNER * x * (_ONE + _GELU_CUBE * x * x)
    return _HALF * x * (_ONE + tanh(inner))


@njit(inline="always", fastmath=FAST, error_model="numpy")
def gelu(x):
    """x times the probability that a normal variable is below x, to about 1e-7 * x."""
    size = -x if x < _ZERO else x
    t = _ONE / (_ONE + _TAIL_STEP * size)
    terms = (((_TAIL[4] * t + _TAIL[3]) * t + _TAIL[2]) * t + _TAIL[1]) * t + _TAIL[0]
    tail = terms * t * exp2(size * size * (-_HALF * LOG2_E))
    return x * (tail if x < _ZERO else _ONE - tail)
