"""Attention of several query tokens of a sequence: bound by arithmetic.

An item is up to `tokens` of them, times the query heads of one key head: the rows of two matrix
products against 64 keys at a time, which are copied together from their blocks, keys turned so that
they lie side by side. The keys are cut at multiples of 64, whatever the chunk: a token computes the
same numbers however its prompt was cut.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.softmax import EMPTY, cap, divisor, fill, scale_by, soften
from kernels.cpu.cells import read_cells, write_cells
from kernels.cpu.columns import transpose16
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import INLINE, f32, f64, i32, i64, next_item
from kernels.cpu.vectors import LANES, lanes_of, tile_product

NUM_PARAMETERS = 12

KEYS = 64  # keys at a time
_ROWS = 48  # query rows an item
_STEP = 12  # rows are a multiple of this: of both tiles' rows
_ZERO, _ONE = np.float32(0), np.float32(1)


def tokens_an_item(group: int) -> int:
    """Query tokens an item takes if `group` query heads share a key head."""
    return max(1, _ROWS // group)


def chunk_body(head_dim: int, group: int, sizes: tuple[int, int]):
    """A body for one head size, number of query heads per key head, and bytes of an element of
    queries and outputs, and of the cache. All else is parameters.
    """
    token, cell = sizes
    lanes = lanes_of(head_dim)
    vectors = head_dim // lanes
    rows = -(-tokens_an_item(group) * group // _STEP) * _STEP

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        told = i64(p[8], (2,))
        kv_heads, softcap = p[5], np.float32(real[10])
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        q, acc = np.zeros((rows, head_dim), np.float32), np.empty((rows, head_dim), np.float32)
        scores = np.zeros((rows, KEYS), np.float32)
        total, largest = np.empty((rows, 1), np.float32), np.empty(rows, np.float32)
        keys = np.empty((head_dim, KEYS), np.float32)
        values = np.empty((KEYS, head_dim), np.float32)
        while True:
            index = next_item(row)
            if index >= told[1] * kv_heads:
                break
            item = i32(told[0] + (index // kv_heads) * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            head, num = index % kv_heads, item[2] * group
            _begin(p, item, head, group, scale, q, token)
            fill(acc.reshape(-1), _ZERO)
            fill(total.reshape(-1), _ZERO)
            fill(largest, EMPTY)
            base = item[3]
            while base < item[4]:
                count = min(KEYS - base % KEYS, item[4] - base)
                _gather(p, item[0], head, (base, count), (keys, values), cell)
                _score(q, keys, scores, num, count)
                weigh(p, item, group, (base, count), softcap, scores, (largest, total, acc))
                _add(scores, values, acc, num, count, vectors, lanes)
                base += count
            finish(p, item, head, group, (acc, total, largest), head_dim, token)

    return body


@njit(**INLINE)
def _score(q, keys, scores, num, count):
    """scores[num, count] = q[num] @ keys; whole tiles, whatever count."""
    size, width = q.shape[1] * 4, KEYS * 4
    a, b, c = q.ctypes.data, keys.ctypes.data, scores.ctypes.data
    if count > LANES:
        for r in range(0, num, 6):
            tile_product(
                a + r * size, size, b, width, c + r * width, width, q.shape[1], 6, 4, 16, 1
            )
    else:
        for r in range(0, num, _STEP):
            tile_product(
                a + r * size, size, b, width, c + r * width, width, q.shape[1], 12, 1, 16, 1
            )


@njit(inline="always")
def _add(scores, values, acc, num, count, vectors, lanes):
    """acc[num] += scores[num, count] @ values; the last two are literals."""
    size, width = acc.shape[1] * 4, KEYS * 4
    a, b, c = scores.ctypes.data, values.ctypes.data, acc.ctypes.data
    for r in range(0, num, 6):
        tile_product(a + r * width, width, b, size, c + r * size, size, count, 6, vectors, lanes, 0)


@njit(**INLINE)
def row_address(start, index, head, p, size):
    """Bytes from the start of q, or of the output, to the first query head of `head`; size: bytes
    of the query heads of one key head."""
    return ((np.int64(start) + index) * p[5] + head) * size


@njit(**INLINE)
def key_address(p, table, head, position, size):
    """Of the key at a position; size: bytes of one. The next of its block follow it, and its value
    lies a half page behind it."""
    block, kv_heads = p[7], p[5]
    page = p[2] + np.int64(table[position // block]) * (2 * kv_heads * block * size)
    return page + (head * block + position % block) * size


@njit(**INLINE)
def _begin(p, item, head, group, scale, q, token):
    width = group * q.shape[1]
    flat = q.reshape(-1)
    for i in range(item[2]):
        rows = flat[i * width : (i + 1) * width]
        read_cells(p[1] + row_address(item[1], i, head, p, width * token), rows, token)
        scale_by(scale, rows)


@njit(inline="always")
def _gather(p, seq, head, span, targets, cell):
    """Keys [head_dim, KEYS] and values [KEYS, head_dim] of one head from position span[0] on."""
    keys, values = targets
    head_dim, block, kv_heads = keys.shape[0], p[7], p[5]
    base, count = span
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    size = head_dim * cell
    aligned = block % LANES == 0 and head_dim % LANES == 0 and base % LANES == 0
    done = 0
    while done < count:
        source = key_address(p, table, head, base + done, size)
        num = min(block - (base + done) % block, count - done)
        if aligned:
            for j in range(0, num, LANES):
                for d in range(0, head_dim, LANES):
                    target = keys[d].ctypes.data + (done + j) * 4
                    transpose16(source + j * size + d * cell, size, target, KEYS * 4, cell)
        else:
            _turn(source, keys[:, done : done + num], cell)
        places = values.reshape(-1)[done * head_dim : (done + num) * head_dim]
        read_cells(source + kv_heads * block * size, places, cell)
        done += num


@njit(**INLINE)
def _turn(source, keys, cell):
    """Keys [num, head_dim] at an address to the columns of `keys`."""
    k = np.empty(keys.shape[0], np.float32)
    for j in range(keys.shape[1]):
        read_cells(source + j * keys.shape[0] * cell, k, cell)
        for d in range(keys.shape[0]):
            keys[d, j] = k[d]


@njit(**INLINE)
def weigh(p, item, group, keys, softcap, scores, sums):
    """Scores become weights, zero where the row's token does not see the key."""
    window, before = p[12], item[4] - item[2]
    base, count = keys
    largest, total, acc = sums
    for r in range(item[2] * group):
        position = before + r // group
        first, end = 0, min(position + 1 - base, count)
        if window:
            first = max(position + 1 - window - base, 0)
        row = scores[r]
        if first < end:
            if softcap > 0:
                cap(row[first:end], softcap)
            largest[r] = soften(row, first, end, largest[r], total[r], acc[r])
        fill(row[: min(first, count)], _ZERO)
        fill(row[max(end, 0) : count], _ZERO)


@njit(**INLINE)
def finish(p, item, head, group, sums, head_dim, token):
    """Sums become outputs; acc has `head_dim` columns or more."""
    acc, total, largest = sums
    sinks = f32(p[11], (p[5] * group if p[11] else 0,))
    for i in range(item[2]):
        out = p[4] + row_address(item[1], i, head, p, group * head_dim * token)
        for g in range(group):
            r = i * group + g
            below = divisor(total[r, 0], sinks, head * group + g, largest[r])
            values = acc[r][:head_dim]
            scale_by(_ONE / below, values)
            write_cells(out + g * head_dim * token, values, token)
