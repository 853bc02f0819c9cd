"""Attention for single query tokens in bfloat16, on processors with bfloat16 dot products. Results
equal those of `kernels.cpu.attention.paired` bit for bit.

A work item is one token with up to 256 keys of its sequence (a stretch), computed head by head.
Vectors hold several keys, transposed in pairs:

    scores [query heads, 256 keys] = queries @ keys [head size / 2, 64, 2], 64 at a time"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention.chunk import KEYS, LINE_OF_SCORES, soften
from kernels.cpu.attention.paired import (
    HOW,
    add_dots,
    gather_pairs,
    keys_address,
    whole_units,
)
from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.rows import NUM_PARAMETERS
from kernels.cpu.attention.single import fetch, leave
from kernels.cpu.attention.softmax import STRETCH, scale_by
from kernels.cpu.cells import write_cells
from kernels.cpu.columns import transpose16
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, INLINE, f64, i32, i64, keep, next_item, unowned
from kernels.cpu.vectors import LANES, copy_bytes, pair_tile_product

_CELL = 2  # bytes of an element of queries and outputs, and of what products read
_MOST = 6  # rows per product with values
_ONE = np.float32(1)


def fits_dots(how: str | None) -> bool:
    """True if ``how``, a key of ``paired.HOW``, selects bfloat16 dot products."""
    return how in ("dots", "soft dots")


def dotted_single_body(head_dim: int, group: int, how: int, cell: int):
    """Make the kernel body (see `kernels.cpu.native`) for single query tokens. group: query heads
    per KV head; how: `paired.HOW["dots"]`, or "soft dots" to emulate the instruction; cell: bytes
    of a cache element, 2 or 1."""
    depth = -(-head_dim // 32) * 32  # inputs of the first product, padded with zeros
    width = -(-head_dim // LANES) * LANES  # outputs of the second
    vectors, height = width // LANES, min(_MOST, group)
    more = -group % height  # padding rows of the last product
    assert how in (HOW["dots"], HOW["soft dots"])

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        planned, heads = i64(p[8], (2,)), p[5] * group
        room = (heads + LANES - 1) // LANES * LANES
        halves = (
            np.zeros((heads, depth), np.uint16),
            np.zeros((LANES, depth), np.uint16),
            np.zeros((group + more, STRETCH), np.uint16),
        )
        words = np.zeros((depth // 2, KEYS), np.int32), np.zeros((STRETCH // 2, width), np.int32)
        floats = (
            np.zeros((group, LINE_OF_SCORES), np.float32),
            np.empty((heads + more, width), np.float32),
            np.empty((heads, head_dim), np.float32),
            np.empty((6, room), np.float32),
        )
        (q, copies, weights), (keys, values) = unowned(halves), unowned(words)
        scores, acc, outputs, lines = unowned(floats)
        total, largest, factors = lines[0], lines[1], (lines[2], lines[3])
        sums, added = (outputs, lines[4], lines[5]), (acc[:heads, :head_dim], total, largest)
        while True:
            index = next_item(row)
            if index >= planned[1]:
                break
            item = i32(planned[0] + index * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            start = item[3] - item[3] % STRETCH
            _copy(p[1] + np.int64(item[1]) * (heads * head_dim * _CELL), q, head_dim)
            span = start, np.int64(item[3] - start), np.int64(item[4] - start)
            for head in range(p[5]):
                of = head * group
                for base in range(span[1] // KEYS * KEYS, span[2], KEYS):
                    _turn((p, item, head), span, base, (keys, copies), head_dim, cell)
                    _score(q[of:], keys, scores, base, span[2], group, how)
                _weigh(row, span, scores, weights, (total[of:], largest[of:]))
                gather_pairs((p, item[0], head), span, (values, copies), head_dim, cell)
                add_dots((weights, values, acc[of:]), group, span, vectors, height, how)
            leave(p, (item, index), sums, added, factors, _CELL)
        keep((halves, words, floats))

    return body


@njit(**INLINE)
def _copy(source, q, head_dim):
    """Copy queries [heads, head_dim] at address `source` to the rows of q."""
    size = head_dim * _CELL
    for g in range(q.shape[0]):
        copy_bytes(source + g * size, q[g].ctypes.data, size)


@njit(inline="always")
def _turn(place, span, base, arrays, head_dim, cell):
    """Transpose up to 64 keys in pairs, from index `base` of a stretch of 256 keys, and prefetch
    their values. place: (parameters of the kernel body, item, KV head); span: (position of the
    stretch, first and end of the item's keys in it); arrays: (transposed keys, scratch memory)."""
    (p, item, head), (keys, copies), (start, low, high) = place, arrays, span
    for first in range(max(base, low // LANES * LANES), min(base + KEYS, high), LANES):
        places = start + first, start + low, start + high
        a, lda = keys_address((p, item[0], head), places, copies, head_dim, cell)
        for k in range(0, keys.shape[0], LANES):
            target = keys[k].ctypes.data + (first - base) * 4
            transpose16(a + k * 4, lda, target, KEYS * 4, 4)
    begins = max(base, low)
    count = min(base + KEYS, high) - begins
    fetch(p, item, head, (start + begins, count), p[14])


@njit(inline="always")
def _score(q, keys, scores, base, high, group, how):
    """Compute the scores of 64 keys: scores[:group, base : base + 64] = q @ keys. base: index of
    the first key; high: end of the item's keys; group, how: literals."""
    a, lda, b = q.ctypes.data, q.shape[1] * _CELL, keys.ctypes.data
    c, line = scores.ctypes.data + base * 4, LINE_OF_SCORES * 4
    if high - base > LANES:
        pair_tile_product(a, lda, b, KEYS * 4, c, line, keys.shape[0], group, 4, 16, 1, how)
    else:
        pair_tile_product(a, lda, b, KEYS * 4, c, line, keys.shape[0], group, 1, 16, 1, how)


@njit(**EXACT)
def _weigh(row, span, scores, weights, sums):
    """Convert all rows of scores to bfloat16 softmax weights. Writes each row's sum of weights and
    largest score to `sums`. row: address of the kernel body's parameters; span: (position of the
    stretch, first and end of the item's keys in it)."""
    real, (before, after) = f64(row, (NUM_PARAMETERS + 1,)), whole_units(span)
    softcap = np.float32(real[10])
    scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
    for g in range(scores.shape[0]):
        scale_by(scale, scores[g, before:after])
        soften(scores[g], (span[1], span[2], after), softcap, sums, g)
        write_cells(weights[g].ctypes.data + before * _CELL, scores[g, before:after], _CELL)
