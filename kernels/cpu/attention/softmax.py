"""Softmax of attention scores, the same to the last bit whichever body computes it.

The keys of a token are cut at multiples of `STRETCH` positions. Within a stretch weights are
relative to its own largest score, and sums start at zero; stretches are then added in ascending
order by `fold`. What a token's outputs are depends on nothing but its query and its keys: not on
the other tokens of an item, nor on which stretches another thread computed.

All that follows is compiled without fast math: each operation is rounded as it is written, in
vectors and in what is left over, wherever the compiler puts it. (Numba marks what an intrinsic
emits, too: one that adds floats may be called from such functions only.)
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.cells import write_cells
from kernels.cpu.columns import cap_scores, exp2_of_all, fold_factors
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, f32
from kernels.cpu.vectors import LANES, fused
from kernels.cpu.vectors import largest as largest_of

STRETCH = 256  # keys whose sums start at zero, and that a thread computes
TAIL = 2  # what lies after a row's sums that are left: the sum of its weights, the largest score

EMPTY = np.float32(-1e30)  # the largest score of no keys: finite, so that differences are too
_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32("nan")


def padded(rows: int) -> int:
    """Rows that sums have room for: a whole number of vectors."""
    return -(-rows // LANES) * LANES


@njit(**EXACT)
def begin(sums):
    """Sums of no keys: outputs [rows, columns], and of all rows, padded, the sum of weights and the
    largest score."""
    outputs, total, largest = sums
    fill(outputs.reshape(-1), _ZERO)
    fill(total, _ZERO)
    fill(largest, EMPTY)


@njit(**EXACT)
def fold(sums, added, factors, num):
    """Add the sums of one more stretch to `num` rows. sums, added: as of `begin`, added with more
    columns if need be; factors: room for two numbers a row, padded."""
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
    """A row's outputs, of `size` bytes each, to an address. sink: address of the log-weight of a
    key without a value, or 0.

    Outputs are NaN where every score was -inf: what is not finite must come out not finite.
    """
    if sink:
        total += exp2_of_all(fused(f32(sink, (1,))[0], LOG2_E, -largest))
    if largest == EMPTY:
        total = _NAN
    scale_by(_ONE / total, values)
    write_cells(target, values, size)


@njit(**EXACT)
def largest_between(scores, first, end):
    """The largest of scores [first, end), EMPTY if there are none; a NaN is passed over: its own
    weight still becomes one, and so does the sum."""
    return largest_of(scores.ctypes.data + first * 4, end - first, EMPTY)


@njit(**EXACT)
def scale_and_cap(scores, scale, softcap):
    """Scores, a whole number of vectors of 16, are scaled and capped, and are then in units of log
    2."""
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
