"""Attention for single query tokens, whose speed is limited by reading the cache.

An item is one token and a stretch of its sequence's keys. Products and sums have the order of
`kernels.cpu.attention.chunk`, so the results are bit-identical. If a sequence has several
stretches, each item stores its sums, and the last one to finish adds all sums in order."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention.chunk import (
    KEYS,
    LINE_OF_SCORES,
    gather_keys,
    soften,
)
from kernels.cpu.attention.plan import ARRIVALS, FIRST_ITEMS, ITEM_FIELDS, ROOM
from kernels.cpu.attention.rows import NUM_PARAMETERS, key_address, widen_rows
from kernels.cpu.attention.softmax import (
    STRETCH,
    TAIL,
    begin,
    copy,
    fill,
    fold,
    scale_by,
    settle,
)
from kernels.cpu.cells import read_cells
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, INLINE, f32, f64, i32, i64, keep, next_item, unowned
from kernels.cpu.vectors import LANES, LINE, add_tile_product, lanes_of, prefetch, tile_product

_ZERO, _ONE = np.float32(0), np.float32(1)


def single_body(head_dim: int, group: int, sizes: tuple[int, int]):
    """Make the body (see `kernels.cpu.native`) for a head size and `group` query heads per KV head.
    sizes: bytes of an element of queries and outputs, and bytes of a cache element."""
    token, cell = sizes
    held = 4 if cell == 1 else cell  # bytes of a number that products read
    lanes = lanes_of(head_dim)
    vectors = head_dim // lanes

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        planned = i64(p[8], (2,))
        kv_heads, softcap = p[5], np.float32(real[10])
        heads = kv_heads * group
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        floats = (
            np.empty((3, heads, head_dim), np.float32),
            np.zeros((group, LINE_OF_SCORES), np.float32),
            np.empty((head_dim, KEYS), np.float32),
            np.empty((KEYS if cell == 1 else 0, head_dim), np.float32),
            np.empty((6, (heads + LANES - 1) // LANES * LANES), np.float32),
        )
        wide, scores, keys, copies, lines = unowned(floats)
        q, acc, sums = wide[0], wide[1], (wide[2], lines[0], lines[1])
        factors, total, largest = (lines[2], lines[3]), lines[4], lines[5]
        while True:
            index = next_item(row)
            if index >= planned[1]:
                break
            item = i32(planned[0] + index * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            read_cells(p[1] + np.int64(item[1]) * (heads * head_dim * token), q.reshape(-1), token)
            scale_by(scale, q.reshape(-1))
            fill(acc.reshape(-1), _ZERO)
            start = item[3] - item[3] % STRETCH
            for head in range(kv_heads):
                of = head * group
                base = item[3]
                while base < item[4]:
                    count = min(KEYS - base % KEYS, item[4] - base)
                    place, span = (p, item[0], head), (base, count)
                    gather_keys(place, span, (keys, copies), head_dim, cell, held)
                    _score(q[of:], keys, scores[:, base - start :], count, group)
                    fetch(p, item, head, span, p[14])
                    base += count
                span = item[3] - start, item[4] - start, item[4] - start
                for g in range(group):
                    soften(scores[g], span, softcap, (total[of:], largest[of:]), g)
                arrays = scores, acc[of:]
                if cell == 1:
                    _add_widened(
                        (p, item, head), (*arrays, copies), head_dim, group, vectors, lanes
                    )
                else:
                    _add((p, item), arrays, head, group, vectors, lanes, held)
            leave(p, (item, index), sums, (acc, total, largest), factors, token)
        keep(floats)

    return body


@njit(inline="always")
def _score(q, keys, scores, count, group):
    """scores[:group, :count] = q[:group] @ keys; `group` is a literal."""
    size, line = q.shape[1] * 4, LINE_OF_SCORES * 4
    a, b, c = q.ctypes.data, keys.ctypes.data, scores.ctypes.data
    if count > LANES:
        tile_product(a, size, b, KEYS * 4, c, line, q.shape[1], group, 4, 16, 1)
    else:
        tile_product(a, size, b, KEYS * 4, c, line, q.shape[1], group, 1, 16, 1)


@njit(inline="always")
def fetch(p, item, head, span, size):
    """Prefetch what is read after the keys of `span` (position, number): first their values, then
    the item's next keys, in this head or the next. size: bytes of a key."""
    table, half = i32(p[3] + item[0] * p[6] * 4, (p[6],)), p[5] * p[7] * size
    _fetch_span(p, (table, head), span, size, half)
    base = span[0] + span[1]
    if base < item[4]:
        count = min(KEYS, item[4] - base)
        _fetch_span(p, (table, head), (base, count), size, 0)
    elif head + 1 < p[5]:
        count = min(KEYS, item[4] - item[3])
        _fetch_span(p, (table, head + 1), (np.int64(item[3]), count), size, 0)


@njit(**INLINE)
def _fetch_span(p, place, span, size, offset):
    """Prefetch the memory ``offset`` bytes after each key of `span` (first position, number of
    keys). place: (block table, KV head); size: bytes of a key."""
    (table, head), (base, count) = place, span
    block, done = p[7], 0
    while done < count:
        num = min(block - (base + done) % block, count - done)
        source = key_address(p, table, head, base + done, size) + offset
        for line in range(0, num * size, LINE):
            prefetch(source + line, 1, LANES, 4)
        done += num


@njit(inline="always")
def _add(place, arrays, head, group, vectors, lanes, cell):
    """Add the attention output of a work item's keys: acc[g] += scores[g] @ values, for each query
    head g of KV head `head`. place: (the body's parameters, item); arrays: (scores, acc). `group`
    (query heads per KV head), `vectors`, `lanes` and `cell` are compile-time constants."""
    (p, item), (scores, acc) = place, arrays
    block, kv_heads, size = p[7], p[5], acc.shape[1] * 4
    table, value_size = i32(p[3] + item[0] * p[6] * 4, (p[6],)), acc.shape[1] * cell
    first, line = scores.ctypes.data - item[3] // STRETCH * (STRETCH * 4), LINE_OF_SCORES * 4
    base, out = np.int64(item[3]), acc.ctypes.data
    while base < item[4]:
        num = min(block - base % block, item[4] - base)
        values = key_address(p, table, head, base, value_size) + kv_heads * block * value_size
        weights = first + base * 4
        add_tile_product(
            weights, line, values, value_size, out, size, num, group, vectors, lanes, cell
        )
        base += num


@njit(inline="always")
def _add_widened(place, arrays, head_dim, group, vectors, lanes):
    """Add the attention output of a work item's 8-bit values, as `_add` does. place: (the body's
    parameters, item, KV head); arrays: (scores, acc, scratch memory for 64 values). The other
    arguments are compile-time constants."""
    (p, item, head), (scores, acc, copies) = place, arrays
    values, size = copies.ctypes.data, head_dim * 4
    first, line = scores.ctypes.data - item[3] // STRETCH * (STRETCH * 4), LINE_OF_SCORES * 4
    base, out = np.int64(item[3]), acc.ctypes.data
    while base < item[4]:
        num = min(KEYS, item[4] - base)
        widen_rows((p, item[0], head), 1, (base, num), (values, size), head_dim, 4)
        weights = first + base * 4
        add_tile_product(weights, line, values, size, out, size, num, group, vectors, lanes, 4)
        base += num


@njit(**EXACT)
def leave(p, place, sums, added, factors, token):
    """Write the outputs of a token, if this item is its only one. Otherwise store the item's sums;
    the token's last item to finish adds all sums and writes the outputs.

    place: (item, its index); sums: scratch memory for the token's sums; added: the item's sums;
    factors: as for `fold`. Sums are (outputs [heads, head_dim], sum of weights [heads], largest
    score [heads])."""
    (item, index), (acc, total, largest), planned = place, added, i64(p[8], (ROOM + 3,))
    seq, shared, (heads, head_dim) = item[0], item[5], acc.shape
    begin(sums)
    if shared == 1:
        fold(sums, added, factors, heads)
    else:
        size = heads * (head_dim + TAIL)
        mine = f32(planned[ROOM] + index * (size * 4), (heads, head_dim + TAIL))
        for h in range(heads):
            copy(acc[h], mine[h])
            mine[h, head_dim], mine[h, head_dim + 1] = total[h], largest[h]
        arrived = planned[ARRIVALS] + np.int64(seq) * (p[5] * 8)
        if next_item(arrived) + 1 < shared:
            return
        i64(arrived, (1,))[0] = 0
        first = planned[ROOM] + i64(planned[FIRST_ITEMS], (seq + 1,))[seq] * (size * 4)
        for part in range(shared):
            left = f32(first + part * (size * 4), (heads, head_dim + TAIL))
            for h in range(heads):
                total[h], largest[h] = left[h, head_dim], left[h, head_dim + 1]
            fold(sums, (left, total, largest), factors, heads)
    outputs, total, largest = sums
    out = p[4] + np.int64(item[1]) * (heads * head_dim * token)
    for h in range(heads):
        sink = p[11] + h * 4 if p[11] else 0
        settle(outputs[h], total[h], largest[h], sink, out + h * head_dim * token, token)
