"""Attention for prompt chunks, where a sequence has several query tokens. Limited by arithmetic.

A work item is up to `tokens` query tokens times the query heads of one KV head: the rows of two
matrix products. Keys are copied from their blocks and transposed, 64 at a time. Scores of 256 keys
(a stretch) are stored before their values are read, because softmax weights are relative to the
largest score."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.rows import NUM_PARAMETERS, key_address, widen_rows
from kernels.cpu.attention.softmax import (
    EMPTY,
    STRETCH,
    begin,
    fill,
    fold,
    largest_between,
    padded,
    scale_by,
    settle,
)
from kernels.cpu.cells import read_cells
from kernels.cpu.columns import cap_scores, soften_row, transpose16
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, INLINE, f32, f64, i32, i64, keep, next_item, unowned
from kernels.cpu.vectors import LANES, lanes_of, tile_product

KEYS = 64  # keys per product
# Floats per row of scores; the last product of a stretch may write beyond it.
LINE_OF_SCORES = STRETCH + KEYS
_ROWS = 48  # query rows per item
_STEP = 12  # rows are padded to a multiple of both tile heights, 6 and 12
_ZERO, _ONE = np.float32(0), np.float32(1)


def tokens_an_item(group: int) -> int:
    """Query tokens per work item, if `group` query heads share a KV head."""
    return max(1, _ROWS // group)


def chunk_body(head_dim: int, group: int, sizes: tuple[int, int]):
    """Make the kernel body (see `kernels.cpu.native`) for prompt chunks. group: query heads per KV
    head; sizes: bytes of an element of queries and outputs, and bytes of a cache element."""
    token, cell = sizes
    held = 4 if cell == 1 else cell  # bytes of a number that products read
    lanes = lanes_of(head_dim)
    vectors = head_dim // lanes
    rows = -(-tokens_an_item(group) * group // _STEP) * _STEP
    room = padded(rows)

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        planned = i64(p[8], (2,))
        kv_heads, softcap = p[5], np.float32(real[10])
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        floats = (
            np.zeros((3, rows, head_dim), np.float32),
            np.zeros((rows, LINE_OF_SCORES), np.float32),
            np.empty((head_dim, KEYS), np.float32),
            np.empty((2 if cell == 1 else 1, KEYS, head_dim), np.float32),
            np.empty((6, room), np.float32),
        )
        wide, scores, keys, gathered, lines = unowned(floats)
        q, acc, values, copies = wide[0], wide[1], gathered[0], gathered[-1]
        sums, factors = (wide[2], lines[0], lines[1]), (lines[2], lines[3])
        total, largest = lines[4], lines[5]
        while True:
            index = next_item(row)
            if index >= planned[1] * kv_heads:
                break
            item = i32(planned[0] + (index // kv_heads) * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            head, num = index % kv_heads, item[2] * group
            _begin(p, item, head, group, scale, q, token)
            begin(sums)
            start = item[3] - item[3] % STRETCH
            while start < item[4]:
                low, high = max(item[3], start), min(item[4], start + STRETCH)
                base = low
                while base < high:
                    count = min(KEYS - base % KEYS, high - base)
                    place = p, item[0], head
                    gather_keys(place, (base, count), (keys, copies), head_dim, cell, held)
                    _score(q, keys, scores[:, base - start :], num, count)
                    base += count
                span = start, low, high
                _add_distances(p, item, head, span, scores)
                _weigh(p, item, group, span, softcap, scores, (total, largest))
                fill(acc.reshape(-1), _ZERO)
                base = low
                while base < high:
                    count = min(KEYS - base % KEYS, high - base)
                    _gather_values((p, item[0], head), (base, count), values, head_dim, cell)
                    _add(scores[:, base - start :], values, acc, num, count, vectors, lanes)
                    base += count
                fold(sums, (acc, total, largest), factors, num)
                start += STRETCH
            finish(p, item, head, group, sums, token)
        keep(floats)

    return body


@njit(**INLINE)
def _score(q, keys, scores, num, count):
    """scores[:num, :count] = q[:num] @ keys. Later columns, up to a full tile, are undefined."""
    size, width, line = q.shape[1] * 4, KEYS * 4, LINE_OF_SCORES * 4
    a, b, c = q.ctypes.data, keys.ctypes.data, scores.ctypes.data
    if count > LANES:
        for r in range(0, num, 6):
            tile_product(a + r * size, size, b, width, c + r * line, line, q.shape[1], 6, 4, 16, 1)
    else:
        for r in range(0, num, _STEP):
            tile_product(a + r * size, size, b, width, c + r * line, line, q.shape[1], 12, 1, 16, 1)


@njit(inline="always")
def _add(scores, values, acc, num, count, vectors, lanes):
    """acc[:num] += scores[:num, :count] @ values; the last two arguments are literals."""
    size, line = acc.shape[1] * 4, LINE_OF_SCORES * 4
    a, b, c = scores.ctypes.data, values.ctypes.data, acc.ctypes.data
    for r in range(0, num, 6):
        tile_product(a + r * line, line, b, size, c + r * size, size, count, 6, vectors, lanes, 0)


@njit(**INLINE)
def row_address(start, index, head, p, size):
    """Byte offset, in the queries or the output, of a token's query heads that share KV head
    `head`. start: row of the sequence's first token; index: of the token in the sequence; size:
    bytes of these query heads."""
    return ((np.int64(start) + index) * p[5] + head) * size


@njit(**INLINE)
def _begin(p, item, head, group, scale, q, token):
    width = group * q.shape[1]
    flat = q.reshape(-1)
    for i in range(item[2]):
        rows = flat[i * width : (i + 1) * width]
        read_cells(p[1] + row_address(item[1], i, head, p, width * token), rows, token)
        scale_by(scale, rows)


@njit(inline="always")
def gather_keys(place, span, arrays, head_dim, cell, held):
    """Copy keys of a sequence and KV head to the columns of an array [head_dim, KEYS]. place:
    (parameters, sequence, KV head); span: (position of the first key, number of keys); arrays:
    (keys, scratch memory for 8-bit keys); cell: bytes of a cache element; held: 4 if cell is 1,
    else cell. The last three arguments are literals."""
    (p, seq, head), (base, count), (keys, copies) = place, span, arrays
    block, size, done = p[7], head_dim * held, 0
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    aligned = block % LANES == 0 and head_dim % LANES == 0 and base % LANES == 0
    if cell == 1:
        widen_rows(place, 0, span, (copies.ctypes.data, size), head_dim, held)
        aligned = head_dim % LANES == 0
    while done < count:
        source, num = copies.ctypes.data, count
        if cell > 1:
            source = key_address(p, table, head, base + done, size)
            num = min(block - (base + done) % block, count - done)
        if aligned:
            for j in range(0, num, LANES):
                for d in range(0, head_dim, LANES):
                    target = keys[d].ctypes.data + (done + j) * 4
                    transpose16(source + j * size + d * held, size, target, KEYS * 4, held)
        else:
            _turn(source, keys[:, done : done + num], held)
        done += num


@njit(inline="always")
def _gather_values(place, span, values, head_dim, cell):
    """Copy values of a sequence and KV head to the rows of `values` [KEYS, head_dim]. Other
    arguments are those of `gather_keys`."""
    (p, seq, head), (base, count) = place, span
    block, kv_heads, size, done = p[7], p[5], head_dim * cell, 0
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    if cell == 1:
        widen_rows(place, 1, span, (values.ctypes.data, head_dim * 4), head_dim, 4)
        done = count
    while done < count:
        source = key_address(p, table, head, base + done, size)
        num = min(block - (base + done) % block, count - done)
        places = values.reshape(-1)[done * head_dim : (done + num) * head_dim]
        read_cells(source + kv_heads * block * size, places, cell)
        done += num


@njit(**INLINE)
def _turn(source, keys, cell):
    """Copy keys [num, head_dim] at `source` to the columns of `keys`. cell: bytes of a number."""
    k = np.empty(keys.shape[0], np.float32)
    for j in range(keys.shape[1]):
        read_cells(source + j * keys.shape[0] * cell, k, cell)
        for d in range(keys.shape[0]):
            keys[d, j] = k[d]


@njit(**INLINE)
def _add_distances(p, item, head, span, scores):
    """Add the scores by distance, if any, to those of a work item, whose query heads have keys of
    their own. span: as in `_weigh`."""
    if not p[17]:
        return
    (start, low, high), width = span, p[18]
    line = f32(p[17] + head * width * 4, (width,))
    for r in range(item[2]):
        added = line[width // 2 + start - item[6] - r :]
        row = scores[r]
        for j in range(low - start, high - start):
            row[j] += added[j] * LOG2_E


@njit(**INLINE)
def _weigh(p, item, group, span, softcap, scores, sums):
    """Convert the scores of a work item for 256 keys (a stretch) to softmax weights, zero for
    masked keys. Writes each row's sum of weights and largest score to `sums`. span: positions of
    (the stretch, the item's first key in it, the end of its keys)."""
    window, ahead = p[12], p[16]
    (start, low, high), (total, largest) = span, sums
    for r in range(item[2] * group):
        position = item[6] + r // group
        first, end = low - start, min(position + 1 + ahead, high) - start
        if window:
            first = max(position + 1 - window - start, first)
        soften(scores[r], (first, end, high - start), softcap, (total, largest), r)


@njit(**EXACT)
def soften(scores, span, softcap, sums, r):
    """Convert row r of scores to softmax weights. Writes their sum and the largest score to `sums`.
    span: (first and end of the keys that the row attends to, end of all keys)."""
    (first, end, high), (total, largest) = span, sums
    count, address = (high + LANES - 1) // LANES, scores.ctypes.data
    if softcap > 0:
        cap_scores(address, count, softcap, LOG2_E)
    largest[r] = largest_between(scores, first, end) if first < end else EMPTY
    total[r] = soften_row(address, count, largest[r], first, end)


@njit(**INLINE)
def finish(p, item, head, group, sums, token):
    """Divide an item's outputs by their sums of softmax weights, and write them for KV head `head`.
    sums: (outputs, sums of weights, largest scores); token: bytes of an output element."""
    outputs, total, largest = sums
    size = outputs.shape[1] * token
    for i in range(item[2]):
        out = p[4] + row_address(item[1], i, head, p, group * size)
        for g in range(group):
            r, sink = i * group + g, p[11] + (head * group + g) * 4 if p[11] else 0
            settle(outputs[r], total[r], largest[r], sink, out + g * size, token)
