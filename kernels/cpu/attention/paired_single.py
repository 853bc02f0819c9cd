"""prototype"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu import amx
from kernels.cpu.attention.paired import _TILES
from kernels.cpu.attention.plan import ITEM_FIELDS, KEYS, ROOM
from kernels.cpu.attention.single import NUM_PARAMETERS, _finish
from kernels.cpu.attention.softmax import EMPTY, cap, fill, scale_by
from kernels.cpu.cells import narrow
from kernels.cpu.mathlib import LOG2_E, exp2
from kernels.cpu.native import INLINE, f64, i32, i64, next_item, u16
from kernels.cpu.vectors import DOTS, LANES, SOFT_DOTS, add_rows_product, prefetch

_CELL = 2
_RUN = 16
_ONE, _ZERO = np.float32(1), np.float32(0)
_RUNS = 4


def fits(head_dim: int, block: int) -> bool:
    return head_dim % 32 == 0 and block % _RUN == 0


def paired_single_body(head_dim: int, group: int, how: int):
    soft = int(how != _TILES)
    dots = SOFT_DOTS if soft else DOTS
    vectors, steps = head_dim // LANES, head_dim // 32

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        told = i64(p[8], (ROOM + 3,))
        kv_heads, block, softcap = p[5], p[7], np.float32(real[10])
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        heads, most = kv_heads * group, max(KEYS // block, 1) * block + _RUNS * _RUN
        tiles = (heads + _RUN - 1) // _RUN
        width = tiles * _RUN
        state = np.empty(amx.STATE + 64, np.uint8)
        q = np.zeros(((tiles + kv_heads) * steps + 1, 16, 16), np.int32)
        scores, pairs = np.empty((most + 1, width), np.float32), np.empty((most // 2, width), np.int32)
        acc, sums = np.empty((heads, head_dim), np.float32), np.empty((heads, head_dim), np.float32)
        total, largest = np.empty((width, 1), np.float32), np.empty(width, np.float32)
        places, edge = np.empty(most // _RUN, np.int64), np.zeros((2, head_dim), np.uint16)
        amx.begin((state.ctypes.data + 63) & -64, soft)
        while True:
            index = next_item(row)
            if index >= told[1]:
                break
            item = i32(told[0] + index * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            start = item[3] - item[3] % _RUN
            first, end = item[3] - start, item[4] - start
            runs = (end + _RUN - 1) // _RUN
            table = i32(p[3] + item[0] * p[6] * 4, (p[6],))
            _turn(p, item, group, q, head_dim)
            _place(p, table, start, runs, head_dim * _CELL, places)
            own = (state.ctypes.data + 63) & -64
            _score(own, q, places, scores, (runs, kv_heads, block), group, head_dim, soft)
            _weigh(scores, pairs, (first, end), scale, softcap, (largest, total))
            fill(sums.reshape(-1), _ZERO)
            _add(pairs, places, sums, edge, (first, end, block), group, vectors, dots)
            _order(sums, acc)
            _finish(p, told, item, index, (acc, total, largest), _CELL)
        amx.end(state.ctypes.data, soft)

    return body


@njit(**INLINE)
def _turn(p, item, group, q, head_dim):
    heads, steps = p[5] * group, head_dim // 32
    queries = i32(p[1] + np.int64(item[1]) * (heads * head_dim * _CELL), (heads, head_dim // 2))
    for h in range(heads):
        n = (h // 16 + h // group) * steps
        for d in range(head_dim // 2):
            q[n + d // 16, d % 16, h % 16] = queries[h, d]


@njit(**INLINE)
def _place(p, table, start, runs, size, places):
    kv_heads, block = p[5], p[7]
    for r in range(runs):
        position = start + r * _RUN
        page = p[2] + np.int64(table[position // block]) * (2 * kv_heads * block * size)
        places[r] = page + position % block * size
    for r in range(runs, (runs + _RUNS - 1) // _RUNS * _RUNS):
        places[r] = places[runs - 1]


@njit(inline="always")
def _score(own, q, places, scores, numbers, group, head_dim, soft):
    runs, kv_heads, block = numbers
    width = scores.shape[1] * 4
    size, steps = head_dim * _CELL, head_dim // 32
    last = (runs + _RUNS - 1) // _RUNS * _RUNS - _RUNS
    for r in range(0, runs, _RUNS):
        a, b, c, d = places[r], places[r + 1], places[r + 2], places[r + 3]
        if r == last:
            step = kv_heads * block * size
            aa, ab, ac, ad = places[0]+step, places[1]+step, places[2]+step, places[3]+step
        else:
            aa, ab, ac, ad = places[r+4], places[r + 5], places[r + 6], places[r + 7]
        for t in range(width // 64):
            amx.zero(own, 0, soft)
            amx.zero(own, 1, soft)
            amx.zero(own, 2, soft)
            amx.zero(own, 3, soft)
            for h in range(t * 16 // group, min((t * 16 + 15) // group + 1, kv_heads)):
                offset = h * block * size
                for k in range(steps):
                    amx.load(own, 7, q[(t + h) * steps + k].ctypes.data, 64, soft)
                    at = offset + k * 64
                    amx.load(own, 4, a + at, size, soft)
                    amx.dot(own, 0, 4, 7, soft)
                    amx.load(own, 5, b + at, size, soft)
                    amx.dot(own, 1, 5, 7, soft)
                    amx.load(own, 6, c + at, size, soft)
                    amx.dot(own, 2, 6, 7, soft)
                    amx.load(own, 4, d + at, size, soft)
                    amx.dot(own, 3, 4, 7, soft)
                    at = offset + k * 1024
                    prefetch(aa + at, 16, 16, 4)
                    prefetch(ab + at, 16, 16, 4)
                    prefetch(ac + at, 16, 16, 4)
                    prefetch(ad + at, 16, 16, 4)
            out = scores.ctypes.data + r * 16 * width + t * 64
            amx.store(own, 0, out, width, soft)
            amx.store(own, 1, out + 16 * width, width, soft)
            amx.store(own, 2, out + 32 * width, width, soft)
            amx.store(own, 3, out + 48 * width, width, soft)


@njit(**INLINE)
def _weigh(scores, pairs, span, scale, softcap, sums):
    first, end = span
    largest, total = sums
    fill(largest, EMPTY)
    fill(total.reshape(-1), _ZERO)
    scale_by(scale, scores[first:end].reshape(-1))
    if softcap > 0:
        cap(scores[first:end].reshape(-1), softcap)
    for r in range(first, end):
        row = scores[r]
        for c in range(largest.shape[0]):
            largest[c] = row[c] if row[c] > largest[c] else largest[c]
    fill(scores[:first].reshape(-1), _ZERO)
    fill(scores[end:end + 1].reshape(-1), _ZERO)
    flat = total.reshape(-1)
    for r in range(first, end):
        row = scores[r]
        for c in range(largest.shape[0]):
            w = exp2(row[c] - largest[c])
            row[c] = w
            flat[c] += w
    for r in range(first // 2, (end + 1) // 2):
        even, odd, target = scores[2 * r], scores[2 * r + 1], pairs[r]
        for c in range(largest.shape[0]):
            target[c] = np.int32(narrow(even[c])) | np.int32(narrow(odd[c])) << 16


@njit(inline="always")
def _add(pairs, places, sums, edge, span, group, vectors, how):
    first, end, block = span
    width, size = pairs.shape[1] * 4, sums.shape[1] * _CELL
    kv_heads = sums.shape[0] // group
    for r in range(first // 16, (end + 15) // 16):
        low, high = max(first - r * 16, 0), min(end - r * 16, 16)
        for h in range(kv_heads):
            out = sums[h * group].ctypes.data
            base = places[r] + (kv_heads + h) * block * size
            ahead = places[r+1] + (kv_heads + h) * block * size
            for k in range(vectors):
                prefetch(ahead + k * (64*8), 8, 16, 4)
            a, values, num = pairs[(r * 16 + low) // 2].ctypes.data + h * group * 4, base + low // 2 * 2 * size, high // 2 - low // 2
            add_rows_product(a, width, values, size, out, size * 2, num, group, vectors, how)
            if high % 2:
                row = u16(base + (high - 1) * size, (size // 2,))
                for d in range(row.shape[0]):
                    edge[0, d] = row[d]
                a = pairs[(r * 16 + high) // 2].ctypes.data + h * group * 4
                add_rows_product(a, width, edge.ctypes.data, size, out, size * 2, 1, group, vectors, how)


@njit(**INLINE)
def _order(sums, acc):
    num = sums.size // 32
    a, b = sums.reshape((num, 2, 4, 4)), acc.reshape((num, 4, 2, 4))
    for n in range(num):
        for x in range(4):
            for y in range(2):
                for i in range(4):
                    b[n, x, y, i] = a[n, y, x, i]
