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
from kernels.cpu.attention.paired import HOW
from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.rows import NUM_PARAMETERS, widen_some
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
from kernels.cpu.native import EXACT, INLINE, f32, f64, i32, i64, keep, next_item, u16, unowned
from kernels.cpu.vectors import prefetch

_CELL = 2  # bytes of an element of queries and outputs, and of what products read
_RUN = amx.ROWS
_UNIT = 2 * _RUN
_RUNS = 4  # runs whose scores are computed together
_HEADS_AHEAD, _UNITS_AHEAD = 2, 2  # how far ahead keys and values of 8 bits are prefetched
_LINE = amx.ROW_BYTES
_STEP = _LINE // _CELL  # inputs of a tile
_TILE = _RUN * _LINE
_PIECES = 4 * _TILE  # bytes of 64 columns of a unit's values
_ZERO, _ONE = np.float32(0), np.float32(1)


def fits(head_dim: int, block: int, how: str | None) -> bool:
    """True if ``how``, a key of ``paired.HOW``, uses tiles, and they suit head size and block
    size."""
    return how in ("tiles", "soft tiles") and head_dim % _STEP == 0 and block % _RUN == 0


def tiled_single_body(head_dim: int, group: int, how: int, cell: int):
    """Make the function (see `kernels.cpu.native`) of a `tiled_single_kernel`; how: a value of HOW;
    cell: bytes of a cache element, 2 or 1."""
    soft, steps = int(how != HOW["tiles"]), head_dim // _STEP
    columns = min(head_dim, 2 * _STEP)  # of values that are multiplied together

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        planned = i64(p[8], (2,))
        kv_heads, softcap = p[5], np.float32(real[10])
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        heads, most = kv_heads * group, STRETCH + _RUNS * _RUN
        tiles = (heads + _RUN - 1) // _RUN
        width = tiles * _RUN
        state = np.empty(amx.STATE + _LINE, np.uint8)
        integers = (
            np.zeros((tiles + kv_heads, steps * _RUN, _RUN), np.int32),  # queries
            # Weights. Rows of a tile after those of its head belong to the next head, or are
            # unused.
            np.empty((most // _UNIT * width + _RUN, _RUN), np.int32),
            np.empty((2, _RUN), np.int32),
            np.empty(most // _RUN, np.int64),
            np.empty(2 * _PIECES + _RUN * head_dim * _CELL + _LINE, np.uint8),
            np.zeros((2, _RUN, head_dim), np.uint16),
            np.zeros((_RUNS * _RUN if cell == 1 else 0) * head_dim + _LINE, np.uint16),
        )
        floats = (
            np.empty((most, width), np.float32),
            np.empty((2, heads, head_dim), np.float32),
            np.empty((6, width), np.float32),
        )
        q, weights, bounds, places, pieces, edges, copies = unowned(integers)
        scores, wide, lines = unowned(floats)
        acc, edge, blank, sums = wide[0], edges[0], edges[1], (wide[1], lines[0], lines[1])
        factors, total, largest = (lines[2], lines[3]), lines[4], lines[5]
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
            _place(p, item, places)
            arrays = (q, scores, places, copies)
            _score((p, own), arrays, span[1], group, head_dim, cell, soft)
            _weigh((scores, weights, bounds), room, span, (scale, softcap), (total, largest))
            rooms, numbers = (room, places, edge, blank), (span, width, group)
            _add((p, own), rooms, (weights, acc), numbers, columns, cell, soft)
            leave(p, (item, index), sums, (acc, total, largest), factors, _CELL)
        amx.end(state.ctypes.data, soft)
        keep((integers, floats))

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
def _place(p, item, places):
    """Write to `places` the address of every 16th key of the work item, in the first KV head. The
    last address is repeated up to a multiple of `_RUNS`."""
    table = i32(p[3] + item[0] * p[6] * 4, (p[6],))
    block, size = p[7], p[14]
    start = item[3] - item[3] % _UNIT
    num = (item[4] - start + _RUNS * _RUN - 1) // (_RUNS * _RUN) * _RUNS
    for r in range(num):
        position = min(start + r * _RUN, (item[4] - 1) // _RUN * _RUN)
        page = p[2] + np.int64(table[position // block]) * (2 * p[5] * block * size)
        places[r] = page + position % block * size


@njit(inline="always")
def _score(given, arrays, end, group, head_dim, cell, soft):
    """Compute scores [key, query head] of all keys before `end`, and prefetch further keys or the
    first values. given: (parameters, tile state); arrays: (queries, scores, addresses of every 16th
    key, scratch memory for 64 keys of 8 bits); group: query heads per KV head. The last three
    arguments are literals."""
    (p, own), (q, scores, places, copies) = given, arrays
    kv_heads, block, size, line = p[5], p[7], p[14], scores.shape[1] * 4
    stride, spare = head_dim * _CELL, (copies.ctypes.data + _LINE - 1) & -_LINE
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
                a0, a1, a2, a3 = places[r], places[r + 1], places[r + 2], places[r + 3]
                if cell == 1:
                    for i in range(_RUNS):
                        ahead = _soon(p, places, (r + i, h), end)
                        to = spare + i * _RUN * stride, stride, ahead
                        widen_some(p, places[r + i] + start, (0, h, 0), _RUN, to, head_dim, _CELL)
                    a0, a1 = spare - start, spare + _RUN * stride - start
                    a2, a3 = a0 + 2 * _RUN * stride, a1 + 2 * _RUN * stride
                for k in range(head_dim // _STEP):
                    at = start + k * _LINE
                    amx.load(own, 7, q[t + h].ctypes.data + k * _TILE, _LINE, soft)
                    amx.load(own, 4, a0 + at, stride, soft)
                    amx.dot(own, 0, 4, 7, soft)
                    amx.load(own, 5, a1 + at, stride, soft)
                    amx.dot(own, 1, 5, 7, soft)
                    amx.load(own, 6, a2 + at, stride, soft)
                    amx.dot(own, 2, 6, 7, soft)
                    amx.load(own, 4, a3 + at, stride, soft)
                    amx.dot(own, 3, 4, 7, soft)
                    if cell == 2:
                        for i in range(_RUNS):
                            ahead = places[next_run + i] + offset + start + k * _TILE
                            prefetch(ahead, _RUN, _RUN, 4)
            out = scores[r * _RUN].ctypes.data + t * _LINE
            amx.store(own, 0, out, line, soft)
            amx.store(own, 1, out + _RUN * line, line, soft)
            amx.store(own, 2, out + 2 * _RUN * line, line, soft)
            amx.store(own, 3, out + 3 * _RUN * line, line, soft)


@njit(**INLINE)
def _soon(p, places, at, end):
    """Address of the 16 keys that are read two heads after those of `at`: (index in `places`, KV
    head). After the item's last keys, the address of values."""
    (run, head), half = at, p[7] * p[14]
    later = run + (head + _HEADS_AHEAD) // p[5] * _RUNS
    place = (head + _HEADS_AHEAD) % p[5] * half
    if later // _RUNS * (_RUNS * _RUN) < end:
        return places[later] + place
    return places[run % _RUNS] + place + p[5] * half


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
def _add(given, rooms, arrays, numbers, columns, cell, soft):
    """acc[h] = weights of query head h @ values. given: (parameters, tile state); rooms: (address
    of scratch memory for 64 values, addresses of every 16th key, scratch memory for 16 values, 16
    zeros); arrays: (weights, acc); numbers: (span of the item's keys, padded number of query heads,
    query heads per KV head). columns (of values multiplied together), cell and soft: literals."""
    (p, own), (weights, acc), (span, width, group) = given, arrays, numbers
    room, head_dim = rooms[0], acc.shape[1]
    for h in range(p[5]):
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
                    _pair_up(p, base, rooms, (u, span, h, column), columns, cell)
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


@njit(inline="always")
def _pair_up(p, base, rooms, numbers, columns, cell):
    """Copy the values of 32 keys of a KV head to tiles at address `base`, in interleaved pairs, and
    prefetch those of the next head. rooms: as in `_add`; numbers: (index of the 32 keys, (first,
    end) of the item's keys, KV head, first column). columns and cell: literals."""
    (room, places, edge, blank), (u, (first, end), head, column) = rooms, numbers
    stride, half = edge.shape[1] * _CELL, p[7] * p[14]  # half: bytes of a head's keys in a block
    for i in range(2):
        r = 2 * u + i
        low, high = max(first - r * _RUN, 0), min(end - r * _RUN, _RUN)
        source = places[min(r, places.shape[0] - 1)] + (p[5] + head) * half
        if high <= 0:
            source = blank.ctypes.data
        elif cell == 1:
            ahead = _values_soon(p, places, (r, head), end) + column
            spare = room + 2 * _PIECES, stride, ahead
            _widen_values(p, source, (head, column), (low, high), spare, columns)
            source = spare[0]
        elif low > 0 or high < _RUN:
            _keep(source, low, high, edge)
            source = edge.ctypes.data
        else:
            prefetch(source + half + column * _UNIT, _UNIT, _RUN, 4)
        for d in range(0, columns, _STEP):
            target = base + i * (_TILE // 2) + d // _STEP * (2 * _TILE)
            interleave16(source + (column + d) * _CELL, stride, target, _TILE)


@njit(**INLINE)
def _values_soon(p, places, at, end):
    """Address of the 16 values that are read 64 keys after those of `at`, (index in `places`, KV
    head), or among the first ones of the next head."""
    (run, head), half = at, p[7] * p[14]
    later = run + 2 * _UNITS_AHEAD
    if later * _RUN < end:
        return places[later] + (p[5] + head) * half
    return places[run % _RUNS] + (p[5] + head + 1) * half


@njit(inline="always")
def _widen_values(p, source, place, span, target, columns):
    """Convert columns of the 8-bit values of 16 keys to bfloat16. source: address of the values;
    place: (KV head, first column); span: (first, end) of the keys whose values are not replaced by
    zeros; target: as for `widen_some`, without the columns before; columns: a literal."""
    (head, column), (low, high), (address, stride, ahead) = place, span, target
    if low > 0 or high < _RUN:
        fill(u16(address, (_RUN * stride // _CELL,)), 0)
    first = source + low * p[14] + column
    to = address + low * stride + column * _CELL, stride, ahead
    widen_some(p, first, (1, head, column), high - low, to, columns, _CELL)


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
