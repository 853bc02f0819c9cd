"""prototype"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu import amx
from kernels.cpu.attention.paired import _TILES
from kernels.cpu.attention.plan import ITEM_FIELDS, KEYS, ROOM
from kernels.cpu.attention.single import NUM_PARAMETERS, _finish
from kernels.cpu.attention.softmax import EMPTY, cap, fill, scale_by
from kernels.cpu.mathlib import LOG2_E, exp2
from kernels.cpu.native import INLINE, f32, f64, i32, i64, next_item, u16
from kernels.cpu.vectors import interleave16, lower_to_largest, pair_rows, prefetch, transpose16

_CELL = 2
_RUN = 16
_ONE, _ZERO = np.float32(1), np.float32(0)
_RUNS = 4


def fits(head_dim: int, block: int) -> bool:
    return head_dim % 32 == 0 and block % _RUN == 0


def paired_single_body(head_dim: int, group: int, how: int):
    soft, steps = int(how != _TILES), head_dim // 32

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
        scores = np.empty((most, width), np.float32)
        weights = np.zeros((most // 32 * width + 16, 16), np.int32)
        acc, total = np.empty((heads, head_dim), np.float32), np.empty((width, 1), np.float32)
        largest, places = np.empty(width, np.float32), np.empty(most // _RUN, np.int64)
        scratch, edge = np.zeros((10, 16, 16), np.int32), np.zeros((_RUN, head_dim), np.uint16)
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
            _weigh(scores, scratch, weights, (first, end), scale, softcap, (largest, total))
            _add(own, weights, places, acc, (scratch, edge), (first, end, kv_heads, block, width), group, head_dim, soft)
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
def _weigh(scores, scratch, weights, span, scale, softcap, sums):
    first, end = span
    largest, total = sums
    width = scores.shape[1]
    fill(largest, EMPTY)
    fill(total.reshape(-1), _ZERO)
    seen = scores[first:end].reshape(-1)
    scale_by(scale, seen)
    if softcap > 0:
        cap(seen, softcap)
    for c in range(0, width, 16):
        lower_to_largest(scores[first].ctypes.data + c * 4, width * 4, end - first, largest.ctypes.data + c * 4)
    for i in range(seen.shape[0]):
        seen[i] = exp2(seen[i])
    units = (end + 31) // 32
    fill(scores[:first].reshape(-1), _ZERO)
    fill(scores[end:units * 32].reshape(-1), _ZERO)
    for u in range(units):
        for c in range(0, width, 16):
            pair_rows(scores[u * 32].ctypes.data + c * 4, width * 4, 16, scratch.ctypes.data, total.ctypes.data + c * 4)
            transpose16(scratch.ctypes.data, 64, weights[u * width + c].ctypes.data, 64, 4)


@njit(inline="always")
def _add(own, weights, places, acc, room, span, group, head_dim, soft):
    first, end, kv_heads, block, width = span
    scratch, edge = room
    size = head_dim * _CELL
    units = (end + 31) // 32
    for h in range(kv_heads):
        offset = (kv_heads + h) * block * size
        for g in range(0, group, 16):
            for d in range(0, head_dim, 64):
                amx.zero(own, 0, soft)
                amx.zero(own, 1, soft)
                amx.zero(own, 2, soft)
                amx.zero(own, 3, soft)
                for u in range(units):
                    base = scratch.ctypes.data + (u % 2) * 4096
                    for i in range(2):
                        r = u * 2 + i
                        low, high = max(first - r * 16, 0), min(end - r * 16, 16)
                        if low > 0 or high < 16:
                            _tidy(places[r] + offset, max(low, 0), max(high, 0), edge)
                            source = edge.ctypes.data
                        else:
                            source = places[r] + offset
                            prefetch(source + block * size + d * 32, 32, 16, 4)
                        interleave16(source + d * 2, size, base + i * 512, 1024)
                        interleave16(source + d * 2 + 64, size, base + i * 512 + 2048, 1024)
                    amx.load(own, 4, weights[u * width + h * group + g].ctypes.data, 64, soft)
                    amx.load(own, 5, base, 64, soft)
                    amx.dot(own, 0, 4, 5, soft)
                    amx.load(own, 6, base + 1024, 64, soft)
                    amx.dot(own, 1, 4, 6, soft)
                    amx.load(own, 7, base + 2048, 64, soft)
                    amx.dot(own, 2, 4, 7, soft)
                    amx.load(own, 5, base + 3072, 64, soft)
                    amx.dot(own, 3, 4, 5, soft)
                base = scratch.ctypes.data
                amx.store(own, 0, base, 256, soft)
                amx.store(own, 1, base + 64, 256, soft)
                amx.store(own, 2, base + 128, 256, soft)
                amx.store(own, 3, base + 192, 256, soft)
                for i in range(min(16, group - g)):
                    _order(f32(base + i * 256, (2, 2, 4, 4)), f32(acc[h * group + g + i].ctypes.data + d * 4, (2, 4, 2, 4)))


@njit(**INLINE)
def _tidy(source, low, high, edge):
    size = edge.shape[1]
    fill(edge.reshape(-1), 0)
    if low < high:
        values = u16(source, (16, size))
        for i in range(low, high):
            for d in range(size):
                edge[i, d] = values[i, d]


@njit(**INLINE)
def _order(a, b):
    for n in range(2):
        for x in range(4):
            for y in range(2):
                for i in range(4):
                    b[n, x, y, i] = a[n, y, x, i]
