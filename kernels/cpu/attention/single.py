"""Attention of single query tokens: bound by reading the cache.

An item is one token against a range of its sequence's keys. It walks the blocks in order and,
within one, the keys of all heads and then their values, as they lie in memory: that keeps the
hardware's prefetching alive, which scattered pieces of one head do not.

A long sequence is cut into several items. Each stores partial sums; the last to finish merges them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention.plan import ARRIVALS, FIRST_ITEMS, ITEM_FIELDS, ROOM
from kernels.cpu.attention.softmax import EMPTY, cap, copy, divisor, fill, scale_by, soften
from kernels.cpu.cells import read_cells, write_cells
from kernels.cpu.mathlib import LOG2_E, exp2
from kernels.cpu.native import INLINE, f32, f64, i32, i64, next_item
from kernels.cpu.vectors import LANES, LINE, add_tile_product, dots, lanes_of, prefetch

NUM_PARAMETERS = 11
_ZERO, _ONE = np.float32(0), np.float32(1)


def single_body(head_dim: int, group: int, sizes: tuple[int, int]):
    """A body for one head size, number of query heads per key head, and bytes of an element of
    queries and outputs, and of the cache. All else is parameters.
    """
    token, cell = sizes
    lanes = lanes_of(head_dim)
    vectors = head_dim // lanes

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        told = i64(p[8], (ROOM + 3,))
        kv_heads, block, softcap = p[5], p[7], np.float32(real[10])
        heads, page_size = kv_heads * group, 2 * kv_heads * block * head_dim * cell
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        q, acc = np.empty((heads, head_dim), np.float32), np.empty((heads, head_dim), np.float32)
        scores = np.empty((heads, block), np.float32)
        total, largest = np.empty((heads, 1), np.float32), np.empty(heads, np.float32)
        while True:
            index = next_item(row)
            if index >= told[1]:
                break
            item = i32(told[0] + index * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            read_cells(p[1] + np.int64(item[1]) * (heads * head_dim * token), q.reshape(-1), token)
            scale_by(scale, q.reshape(-1))
            fill(acc.reshape(-1), _ZERO)
            fill(total.reshape(-1), _ZERO)
            fill(largest, EMPTY)
            table = i32(p[3] + item[0] * p[6] * 4, (p[6],))
            for i in range(item[3] // block, (item[4] + block - 1) // block):
                first, end = max(item[3] - i * block, 0), min(item[4] - i * block, block)
                page = p[2] + np.int64(table[i]) * page_size
                # Of the next block, keys are fetched ahead during these keys, values thereafter.
                ahead = p[2] + np.int64(table[min(i + 1, (item[4] - 1) // block)]) * page_size
                _score((q, scores), (page, ahead), (first, end), group, vectors, lanes, cell)
                ahead += page_size // 2
                for h in range(heads):
                    for offset in range(0, page_size // 2 // heads, LINE):
                        prefetch(ahead + offset, 1, LANES, 4)
                    ahead += page_size // 2 // heads
                    if softcap > 0:
                        cap(scores[h, first:end], softcap)
                    largest[h] = soften(scores[h], first, end, largest[h], total[h], acc[h])
                _add((scores, acc), page, (first, end), group, vectors, lanes, cell)
            finish(p, told, item, index, (acc, total, largest), token)

    return body


@njit(inline="always")
def _score(arrays, pages, span, group, vectors, lanes, cell):
    """scores[h, t] = q[h] . key t of the page; arrays: q, scores. The last four are literals."""
    q, scores = arrays
    size, key_size, block = q.shape[1] * 4, q.shape[1] * cell, scores.shape[1]
    for head in range(q.shape[0] // group):
        offset = (head * block + span[0]) * key_size
        key, next_key = pages[0] + offset, pages[1] + offset
        rows, out = q[head * group].ctypes.data, scores[head * group].ctypes.data
        for t in range(span[0], span[1]):
            dots(rows, size, key, out + t * 4, block * 4, group, vectors, lanes, cell)
            prefetch(next_key, vectors, lanes, cell)
            key += key_size
            next_key += key_size


@njit(inline="always")
def _add(arrays, page, span, group, vectors, lanes, cell):
    """acc[h] += scores[h] @ values of the page; arrays: scores, acc. The last four are literals."""
    scores, acc = arrays
    size, value_size, block = acc.shape[1] * 4, acc.shape[1] * cell, scores.shape[1]
    kv_heads, num = acc.shape[0] // group, span[1] - span[0]
    for head in range(kv_heads):
        values = page + ((kv_heads + head) * block + span[0]) * value_size
        weights, out = scores[head * group].ctypes.data + span[0] * 4, acc[head * group].ctypes.data
        add_tile_product(
            weights, block * 4, values, value_size, out, size, num, group, vectors, lanes, cell
        )


@njit(**INLINE)
def finish(p, told, item, index, sums, token):
    """Write the row, or leave partial sums and merge them if this item is the last of its row.

    told: the plan's header; sums: acc, total, largest.
    """
    acc, total, largest = sums
    seq, shared = item[0], item[5]
    heads, head_dim = acc.shape
    sinks = f32(p[11], (heads if p[11] else 0,))
    out = p[4] + np.int64(item[1]) * (heads * head_dim * token)
    if shared == 1:
        for h in range(heads):
            below = divisor(total[h, 0], sinks, h, largest[h])
            scale_by(_ONE / below, acc[h])
        write_cells(out, acc.reshape(-1), token)
        return
    size = heads * (head_dim + 2)
    mine = f32(told[ROOM] + index * (size * 4), (heads, head_dim + 2))
    for h in range(heads):
        copy(acc[h], mine[h])
        mine[h, head_dim] = total[h, 0]
        mine[h, head_dim + 1] = largest[h]
    arrived = told[ARRIVALS] + np.int64(seq) * 8
    if next_item(arrived) + 1 == shared:
        i64(arrived, (1,))[0] = 0
        first = i64(told[FIRST_ITEMS], (seq + 1,))[seq]
        _merge(f32(told[ROOM] + first * (size * 4), (shared, heads, head_dim + 2)), sinks, acc)
        write_cells(out, acc.reshape(-1), token)


@njit(**INLINE)
def _merge(partials, sinks, out):
    """partials: [items, heads, head_dim + 2], the last two the sum of weights and the largest."""
    for h in range(out.shape[0]):
        head_dim, best, below = out.shape[1], EMPTY, _ZERO
        for part in range(partials.shape[0]):
            best = max(best, partials[part, h, head_dim + 1])
        fill(out[h], _ZERO)
        for part in range(partials.shape[0]):
            shrink = exp2(partials[part, h, head_dim + 1] - best)
            below += partials[part, h, head_dim] * shrink
            for d in range(head_dim):
                out[h, d] += partials[part, h, d] * shrink
        scale_by(_ONE / divisor(below, sinks, h, best), out[h])
