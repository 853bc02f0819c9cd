"""Attention for single query tokens in bfloat16, on processors with AMX tiles.

Work items and outputs are those of `kernels.cpu.attention.single`, which spends as much time on
widening keys and summing across lanes as on reading memory. Here the left operand is a tile of 16
keys of a head, read directly from their block. The right operand has one query head per column. Up
to 16 query heads share a tile of scores, to which each KV head adds the scores of its own query
heads.

So scores are [keys, query heads], and the softmax runs down columns. All scores of an item are
stored before its values are read, in interleaved pairs of rows. Queries are not scaled, weights are
rounded to bfloat16, and sums are float32. Results equal those of `kernels.cpu.attention.paired` bit
for bit: products and sums have the same order.

A *run* is 16 keys, and a *unit* is the 32 keys of one tile of weights. Units begin at multiples of
32 keys, so which keys are summed together depends only on their positions. Keys outside the item
have weight zero and zero values."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu import amx
from kernels.cpu.attention.chunk import NUM_PARAMETERS
from kernels.cpu.attention.paired import HOW
from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.single import leave
from kernels.cpu.attention.softmax import EMPTY, STRETCH, fill, scale_and_cap
from kernels.cpu.columns import (
    interleave16,
    pair_rows,
    scale_columns,
    soften_columns,
    transpose16,
)
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, INLINE, f32, f64, i32, i64, next_item, u16
from kernels.cpu.vectors import prefetch

_CELL = 2  # bytes of an element of queries, cache and outputs
_RUN = amx.ROWS
_UNIT = 2 * _RUN
_RUNS = 4  # runs whose scores are computed together
_LINE = amx.ROW_BYTES
_STEP = _LINE // _CELL  # inputs of a tile
_TILE = _RUN * _LINE
_PIECES = 4 * _TILE  # bytes of 64 columns of a unit's values
_ZERO, _ONE = np.float32(0), np.float32(1)


def fits(head_dim: int, block: int, how: str | None) -> bool:
    """True if ``how``, a key of ``paired.HOW``, uses tiles, and they suit head size and block
    size."""
    return how in ("tiles", "soft tiles") and head_dim % _STEP == 0 and block % _RUN == 0


def tiled_single_body(head_dim: int, group: int, how: int):
    """Make the function (see `kernels.cpu.native`) of a `tiled_single_kernel`; how: a value of
    HOW."""
    soft, steps = int(how != HOW["tiles"]), head_dim // _STEP

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        planned = i64(p[8], (2,))
        kv_heads, block, softcap = p[5], p[7], np.float32(real[10])
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        heads, most = kv_heads * group, STRETCH + _RUNS * _RUN
        tiles = (heads + _RUN - 1) // _RUN
        width = tiles * _RUN
        state = np.empty(amx.STATE + _LINE, np.uint8)
        q = np.zeros((tiles + kv_heads, steps * _RUN, _RUN), np.int32)
        places, scores = np.empty(most // _RUN, np.int64), np.empty((most, width), np.float32)
        # Rows of a tile after those of its head belong to the next head, or are unused.
        weights = np.empty((most // _UNIT * width + _RUN, _RUN), np.int32)
        acc, outputs = (
            np.empty((heads, head_dim), np.float32),
            np.empty((heads, head_dim), np.float32),
        )
        sums = outputs, np.empty(width, np.float32), np.empty(width, np.float32)
        factors = np.empty(width, np.float32), np.empty(width, np.float32)
        total, largest = np.empty(width, np.float32), np.empty(width, np.float32)
        bounds = np.empty((2, _RUN), np.int32)
        pieces = np.empty(2 * _PIECES + _LINE, np.uint8)
        edge, blank = np.zeros((_RUN, head_dim), np.uint16), np.zeros((_RUN, head_dim), np.uint16)
        amx.begin((state.ctypes.data + _LINE - 1) & -_LINE, soft)
        while True:
            index = next_item(row)
            if index >= planned[1]:
                break
            item = i32(planned[0] + index * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            own = (state.ctypes.data + _LINE - 1) & -_LINE
            room = (pieces.ctypes.data + _LINE - 1) & -_LINE
            first = item[3] % _UNIT
            span = first, first + item[4] - item[3]
            _turn(p, item, q, (group, head_dim))
            _place(p, item, places, head_dim)
            _score(own, (q, scores), places, span[1], (kv_heads, block), (group, head_dim), soft)
            _weigh((scores, weights, bounds), room, span, (scale, softcap), (total, largest))
            arrays = (weights, acc, edge, blank)
            _add(own, room, arrays, places, (span, block, width), group, soft)
            leave(p, (item, index), sums, (acc, total, largest), factors, _CELL)
        amx.end(state.ctypes.data, soft)

    return body


@njit(**INLINE)
def _turn(p, item, q, shape):
    """Copy a token's queries to the columns of q [tile, pairs, 16]: query head h of KV head k
    becomes column h % 16 of tile h // 16 + k, so that all columns of a tile have the same KV head.
    shape: (query heads per KV head, head size)."""
    group, head_dim = shape
    heads = p[5] * group
    pairs = i32(p[1] + np.int64(item[1]) * (heads * head_dim * _CELL), (heads, head_dim // 2))
    for h in range(heads):
        tile = q[h // _RUN + h // group]
        for d in range(pairs.shape[1]):
            tile[d, h % _RUN] = pairs[h, d]


@njit(**INLINE)
def _place(p, item, places, head_dim):
    """Write to `places` the address of every 16th key of the work item, in the first KV head. The
    last address is repeated up to a multiple of `_RUNS`."""
    table = i32(p[3] + item[0] * p[6] * 4, (p[6],))
    block, size = p[7], head_dim * _CELL
    start = item[3] - item[3] % _UNIT
    num = (item[4] - start + _RUNS * _RUN - 1) // (_RUNS * _RUN) * _RUNS
    for r in range(num):
        position = min(start + r * _RUN, (item[4] - 1) // _RUN * _RUN)
        page = p[2] + np.int64(table[position // block]) * (2 * p[5] * block * size)
        places[r] = page + position % block * size


@njit(inline="always")
def _score(own, arrays, places, end, heads, shape, soft):
    """Compute scores [key, query head] of all keys before `end`, and prefetch further keys or the
    first values. arrays: (q, scores); places: address of every 16th key; heads: (number of KV
    heads, block size); shape: (query heads per KV head, head size); soft: a literal."""
    q, scores = arrays
    (kv_heads, block), (group, head_dim) = heads, shape
    size, line = head_dim * _CELL, scores.shape[1] * 4
    for r in range(0, (end + _RUN - 1) // _RUN, _RUNS):
        next_run, offset = r + _RUNS, 0
        if next_run * _RUN >= end:
            next_run, offset = 0, kv_heads * block * size
        for t in range(line // _LINE):
            amx.zero(own, 0, soft)
            amx.zero(own, 1, soft)
            amx.zero(own, 2, soft)
            amx.zero(own, 3, soft)
            for h in range(t * _RUN // group, min((t * _RUN + _RUN - 1) // group + 1, kv_heads)):
                start = h * block * size
                for k in range(head_dim // _STEP):
                    at = start + k * _LINE
                    amx.load(own, 7, q[t + h].ctypes.data + k * _TILE, _LINE, soft)
                    amx.load(own, 4, places[r] + at, size, soft)
                    amx.dot(own, 0, 4, 7, soft)
                    amx.load(own, 5, places[r + 1] + at, size, soft)
                    amx.dot(own, 1, 5, 7, soft)
                    amx.load(own, 6, places[r + 2] + at, size, soft)
                    amx.dot(own, 2, 6, 7, soft)
                    amx.load(own, 4, places[r + 3] + at, size, soft)
                    amx.dot(own, 3, 4, 7, soft)
                    for i in range(_RUNS):
                        ahead = places[next_run + i] + offset + start + k * _TILE
                        prefetch(ahead, _RUN, _RUN, 4)
            out = scores[r * _RUN].ctypes.data + t * _LINE
            amx.store(own, 0, out, line, soft)
            amx.store(own, 1, out + _RUN * line, line, soft)
            amx.store(own, 2, out + 2 * _RUN * line, line, soft)
            amx.store(own, 3, out + 3 * _RUN * line, line, soft)


@njit(**EXACT)
def _weigh(arrays, room, span, numbers, sums):
    """Convert scores to softmax weights [unit, query head, key] in bfloat16, and write each head's
    sum of weights and largest score to `sums`. arrays: (scores, weights, bounds); room: address of
    scratch memory for a tile; span: (first, end) of the item's keys; numbers: (scale, softcap)."""
    (scores, weights, bounds), (first, end) = arrays, span
    (scale, softcap), (total, largest) = numbers, sums
    line, units = scores.shape[1] * 4, (end + _UNIT - 1) // _UNIT
    if softcap > 0:
        seen = scores[: units * _UNIT].reshape(-1)
        scale_and_cap(seen, scale, softcap)
        scale = _ONE
    fill(largest, EMPTY)
    fill(total, _ZERO)
    fill(bounds[0], first)
    fill(bounds[1], end)
    for c in range(0, line, _LINE):
        column, best = scores.ctypes.data + c, largest.ctypes.data + c
        added, num = total.ctypes.data + c, units * _UNIT
        if first == 0 and end == num:
            scale_columns(column, line, num, scale, best, 0)
            soften_columns(column, line, num, best, added, 0)
        else:
            scale_columns(column, line, num, scale, best, bounds.ctypes.data)
            soften_columns(column, line, num, best, added, bounds.ctypes.data)
    for u in range(units):
        for c in range(0, line, _LINE):
            pair_rows(scores[u * _UNIT].ctypes.data + c, line, _RUN, room)
            target = weights[u * scores.shape[1] + c // 4].ctypes.data
            transpose16(room, _LINE, target, _LINE, 4)


@njit(inline="always")
def _add(own, room, arrays, places, numbers, group, soft):
    """acc[h] = weights of query head h @ values. room: address of scratch memory for 64 values;
    arrays: (weights, acc, scratch memory for 16 values, 16 zeros); numbers: (span of the item's
    keys, block size, padded number of query heads); soft: a literal."""
    weights, acc, edge, blank = arrays
    span, block, width = numbers
    kv_heads, head_dim = acc.shape[0] // group, acc.shape[1]
    columns = min(head_dim, 2 * _STEP)
    for h in range(kv_heads):
        offset = (kv_heads + h) * block * head_dim * _CELL
        for d in range(0, head_dim, columns):
            # The last columns overlap the ones before if head_dim is not a multiple.
            column = min(d, head_dim - columns)
            for g in range(0, group, _RUN):
                amx.zero(own, 0, soft)
                amx.zero(own, 1, soft)
                amx.zero(own, 2, soft)
                amx.zero(own, 3, soft)
                for u in range((span[1] + _UNIT - 1) // _UNIT):
                    base = room + u % 2 * _PIECES
                    _pair_up(base, places, u, span, (edge, blank), (offset, block, column))
                    left = weights[u * width + h * group + g].ctypes.data
                    _add_unit(own, left, base, columns, soft)
                _leave(own, room, acc, (h * group + g, min(_RUN, group - g)), column, soft)


@njit(inline="always")
def _add_unit(own, left, values, columns, soft):
    amx.load(own, 4, left, _LINE, soft)
    amx.load(own, 5, values, _LINE, soft)
    amx.dot(own, 0, 4, 5, soft)
    amx.load(own, 6, values + _TILE, _LINE, soft)
    amx.dot(own, 1, 4, 6, soft)
    if columns > _STEP:
        amx.load(own, 7, values + 2 * _TILE, _LINE, soft)
        amx.dot(own, 2, 4, 7, soft)
        amx.load(own, 5, values + 3 * _TILE, _LINE, soft)
        amx.dot(own, 3, 4, 5, soft)


@njit(**INLINE)
def _pair_up(base, places, u, span, rooms, numbers):
    """Copy the values of 32 keys of a KV head to tiles at address `base`, in interleaved pairs, and
    prefetch those of the next head. u: index of the 32 keys; span: (first, end) of the item's keys;
    rooms: (scratch memory for the values of 16 keys, as many zeros); numbers: (offset of values
    from keys, block size, first column)."""
    (edge, blank), (offset, block, column) = rooms, numbers
    size = edge.shape[1] * _CELL
    for i in range(2):
        r = 2 * u + i
        low, high = span[0] - r * _RUN, span[1] - r * _RUN
        source = places[min(r, places.shape[0] - 1)] + offset
        if high <= 0:
            source = blank.ctypes.data
        elif low > 0 or high < _RUN:
            _keep(source, max(low, 0), min(high, _RUN), edge)
            source = edge.ctypes.data
        else:
            prefetch(source + block * size + column * _UNIT, _UNIT, _RUN, 4)
        for d in range(0, min(edge.shape[1], 2 * _STEP), _STEP):
            target = base + i * (_TILE // 2) + d // _STEP * (2 * _TILE)
            interleave16(source + (column + d) * _CELL, size, target, _TILE)


@njit(**INLINE)
def _keep(source, low, high, edge):
    """Copy the values of keys [low, high) of the 16 keys at address `source` to `edge`, and zeros
    for the other keys."""
    values = u16(source, edge.shape)
    for i in range(_RUN):
        row, kept = values[i], edge[i]
        if low <= i < high:
            for d in range(kept.shape[0]):
                kept[d] = row[d]
        else:
            fill(kept, 0)


@njit(inline="always")
def _leave(own, room, acc, rows, column, soft):
    """Copy a product of 64 columns from tiles 0 to 3 to `acc`, from `column` on, in original order.
    room: scratch memory; rows: (first row of `acc`, number of rows)."""
    line = 4 * _LINE
    amx.store(own, 0, room, line, soft)
    amx.store(own, 1, room + _LINE, line, soft)
    amx.store(own, 2, room + 2 * _LINE, line, soft)
    amx.store(own, 3, room + 3 * _LINE, line, soft)
    for i in range(rows[1]):
        _order(room + i * line, acc[rows[0] + i].ctypes.data + column * 4, acc.shape[1])


@njit(**INLINE)
def _order(source, target, head_dim):
    """Copy up to 64 float32 from `source` to `target`, undoing the order of `interleave16`."""
    num = min(head_dim // _STEP, 2)
    parted, whole = f32(source, (num, 2, 4, 4)), f32(target, (num, 4, 2, 4))
    for n in range(num):
        for quarter in range(4):
            for half in range(2):
                for i in range(4):
                    whole[n, quarter, half, i] = parted[n, half, quarter, i]
