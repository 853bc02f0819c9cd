"""Softmax of attention scores, with bit-identical results in all kernel bodies.

The keys of a token are split into stretches of `STRETCH` positions. Within a stretch, weights are
relative to its largest score and sums start at zero; `fold` then merges the stretches in ascending
order. So a token's outputs depend only on its query and keys, not on the batch or the threads.

This module is compiled without fast math, so each operation is rounded as it is written, in vectors
and in remainders. (Numba applies fast math to intrinsics, too, so an intrinsic that adds floats may
only be called from such functions.)"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.cells import write_scaled
from kernels.cpu.columns import cap_scores, exp2_of_all, fold_factors
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, f32
from kernels.cpu.vectors import LANES, fused
from kernels.cpu.vectors import largest as largest_of

STRETCH = 256  # keys whose sums start at zero
TAIL = 2  # numbers after a row's stored sums: its sum of weights and its largest score

EMPTY = np.float32(-1e30)  # the largest score of no keys; finite, so that differences are finite
_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32("nan")


def padded(rows: int) -> int:
    """The number of rows, rounded up to full vectors."""
    return -(-rows // LANES) * LANES


@njit(**EXACT)
def begin(sums):
    """Reset the softmax sums to those of no keys: (outputs [rows, columns], sum of weights [rows,
    padded], largest score [rows, padded])."""
    outputs, total, largest = sums
    fill(outputs.reshape(-1), _ZERO)
    fill(total, _ZERO)
    fill(largest, EMPTY)


@njit(**EXACT)
def fold(sums, added, factors, num):
    """Merge the softmax sums of another range of keys, `added`, into `sums`, for `num` rows. Both
    are tuples as in `begin`; outputs in `added` may have more columns. factors: two scratch arrays
    with one float32 per row, padded."""
    (outputs, total, largest), (more, more_total, more_largest) = sums, added
    shrink, share = factors
    for r in range(0, num, LANES):
        of = r * 4
        fold_factors(
            largest.ctypes.data + of,
            more_largest.ctypes.data + of,
            shrink.ctypes.data + of,
            share.ctypes.data + of,
        )
    for r in range(num):
        before, now, row, new = shrink[r], share[r], outputs[r], more[r]
        for i in range(row.shape[0]):
            row[i] = fused(new[i], now, row[i] * before)
        total[r] = fused(more_total[r], now, total[r] * before)


@njit(**EXACT)
def settle(values, total, largest, sink, target, size):
    """Divide a row's outputs by its sum of weights, and write them to address `target`, `size`
    bytes each. sink: address of the head's attention sink (logit of a key without value), or 0. If
    all scores were -inf, the outputs are NaN, so that errors show."""
    if sink:
        total += exp2_of_all(fused(f32(sink, (1,))[0], LOG2_E, -largest))
    if largest == EMPTY:
        total = _NAN
    write_scaled(target, values, _ONE / total, size)


@njit(**EXACT)
def largest_between(scores, first, end):
    """The largest of scores[first:end], EMPTY if there are none. Ignores NaN, which shows later in
    the row's sum of weights."""
    return largest_of(scores.ctypes.data + first * 4, end - first, EMPTY)


@njit(**EXACT)
def scale_and_cap(scores, scale, softcap):
    """Scale and softcap an array of scores (its length a multiple of 16) in place; the results are
    exponents of 2 instead of e."""
    scale_by(scale, scores)
    cap_scores(scores.ctypes.data, scores.shape[0] // LANES, softcap, LOG2_E)


@njit(**EXACT)
def scale_by(factor, target):
    for i in range(target.shape[0]):
        target[i] *= factor


@njit(**EXACT)
def copy(source, target):
    for i in range(source.shape[0]):
        target[i] = source[i]


@njit(**EXACT)
def fill(target, value):
    for i in range(target.shape[0]):
        target[i] = value
