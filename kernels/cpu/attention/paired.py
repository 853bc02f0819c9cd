"""Attention of several query tokens in bfloat16, on processors that multiply it.

An item is what it is in `kernels.cpu.attention.chunk`: up to 48 rows, query tokens times the query
heads of one key head, against 64 keys at a time. Rows lie in columns while they are softened, so
that nothing is summed across a vector:

    scores [64 keys, rows]   = keys [64, head size] @ queries [head size / 2, rows, 2]
    weights [rows, 64 keys]  = scores, softened down the columns, rounded and turned
    outputs [rows, head size] += weights @ values [32 pairs of keys, head size, 2]

Keys go in as they lie in their blocks. Weights are rounded to bfloat16; sums are float32, and so is
all between the products.

    tiles   AMX: 16 rows of the left side a tile
    dots    AVX-512 BF16: several rows at a time

A key's place is its position modulo 64, so which keys are multiplied together does not depend on
where a prompt was cut. Places without a key have weight zero, and zeros for values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu import amx, isa
from kernels.cpu.attention.chunk import (
    KEYS,
    NUM_PARAMETERS,
    finish,
    key_address,
    row_address,
    tokens_an_item,
)
from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.softmax import EMPTY, cap, fill, scale_by
from kernels.cpu.columns import round_turned, scale_columns, soften_columns, transpose16
from kernels.cpu.mathlib import LOG2_E, exp2
from kernels.cpu.native import INLINE, f64, i32, i64, next_item, u16
from kernels.cpu.vectors import (
    DOTS,
    LANES,
    SOFT_DOTS,
    pair_tile_product,
)

_SOFT_TILES, _TILES = 8, 9  # beside what `pair_tile_product` knows
HOW = {"dots": DOTS, "soft dots": SOFT_DOTS, "tiles": _TILES, "soft tiles": _SOFT_TILES}

_CELL = 2  # bytes of an element of queries, cache and outputs
_PAIRS = KEYS // 2
_STEP = 48  # rows are a multiple of what either product takes at once
_DOT_ROWS = 6
_DOT_KEYS = 8
_TILE = amx.ROWS  # rows, and columns of float32
_ZERO, _ONE = np.float32(0), np.float32(1)


def chosen() -> str | None:
    """How this processor multiplies pairs; ``None`` if it widens them."""
    return {"amx": "tiles", "avx512_bf16": "dots"}.get(isa.LEVEL)


def paired_body(head_dim: int, group: int, how: int):
    """A body for one head size and number of query heads per key head; how: of HOW."""
    rows = -(-tokens_an_item(group) * group // _STEP) * _STEP
    depth = -(-head_dim // 32) * 32  # inputs of the first product, with zeros behind the last
    width = -(-head_dim // _TILE) * _TILE  # outputs of the second
    vectors = width // LANES
    is_tiled, soft = int(how in (_TILES, _SOFT_TILES)), int(how != _TILES)

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        told, kv_heads = i64(p[8], (2,)), p[5]
        state = np.empty(amx.STATE + 64, np.uint8)
        flat, q = np.zeros((rows, depth), np.uint16), np.empty((depth // 2, rows), np.int32)
        copies, values = np.zeros((LANES, depth), np.uint16), np.zeros((_PAIRS, width), np.int32)
        scores, weights = np.zeros((KEYS, rows), np.float32), np.empty((rows, KEYS), np.uint16)
        acc, total = np.empty((rows, width), np.float32), np.empty((rows, 1), np.float32)
        largest, shrink = np.empty(rows, np.float32), np.empty(rows, np.float32)
        positions, bounds = np.empty(rows, np.int32), np.empty((rows // LANES, 2, LANES), np.int32)
        queries, sums = (flat, q, positions), (largest, shrink, total, acc)
        room = copies, values, scores, weights, bounds, sums
        if is_tiled:
            amx.begin((state.ctypes.data + 63) & -64, soft)
        while True:
            index = next_item(row)
            if index >= told[1] * kv_heads:
                break
            item = i32(told[0] + (index // kv_heads) * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            head = index % kv_heads
            _begin(p, item, head, group, queries, head_dim)
            fill(acc.reshape(-1), _ZERO)
            fill(total.reshape(-1), _ZERO)
            fill(largest, EMPTY)
            base = item[3]
            while base < item[4]:
                own = (state.ctypes.data + 63) & -64
                _weigh(row, own, (item, head, base), queries, room, head_dim, how)
                num = item[2] * group
                for r in range(num):
                    if shrink[r] != _ONE:
                        scale_by(shrink[r], acc[r])
                if is_tiled:
                    _add_tiles(own, weights, values, acc, num, soft)
                else:
                    _add_dots(weights, values, acc, num, vectors, how)
                base += KEYS - base % KEYS
            finish(p, item, head, group, (acc, total, largest), head_dim, _CELL)
        if is_tiled:
            amx.end(state.ctypes.data, soft)

    return body


@njit(inline="always")
def _weigh(row, own, place, queries, room, head_dim, how):
    """Weights and paired values of an item's rows and up to 64 keys; row: of the body; place: item,
    key head, and the first key."""
    p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
    (item, head, base), (_, q, positions) = place, queries
    copies, values, scores, weights, bounds, sums = room
    softcap = np.float32(real[10])
    scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
    start = base - base % KEYS
    # Keys, and those that are computed with them: whole groups.
    span = start, base - start, min(KEYS, item[4] - start)
    low, high = span[1] // LANES * LANES, -(-span[2] // LANES) * LANES
    _gather(p, item[0], head, span, values, head_dim)
    for first in range(low, high, LANES):
        left = _keys(p, item[0], head, (start + first, base, item[4]), copies, head_dim)
        if how == _TILES:
            _score_tiles(own, left, q, scores[first:], 0)
        elif how == _SOFT_TILES:
            _score_tiles(own, left, q, scores[first:], 1)
        else:
            _score_dots(left, q, scores[first:], how)
    if softcap > 0:
        scale_by(scale, scores.reshape(-1))
        cap(scores.reshape(-1), softcap)
        scale = _ONE
    fill(scores[:low].reshape(-1), _ZERO)
    fill(scores[high:].reshape(-1), _ZERO)
    all_seen = _see(positions, span, low, p[12], bounds)
    _soften(scores[low:high], scale, sums, bounds, all_seen)
    _round(scores, weights)


@njit(**INLINE)
def _begin(p, item, head, group, targets, head_dim):
    """Queries of an item in pairs [head size / 2, rows, 2], and the positions of their tokens."""
    flat, q, positions = targets
    width, before = group * head_dim, item[4] - item[2]
    for i in range(item[2]):
        address = p[1] + row_address(item[1], i, head, p, width * _CELL)
        source = u16(address, (group, head_dim))
        for g in range(group):
            target = flat[i * group + g]
            for d in range(head_dim):
                target[d] = source[g, d]
            positions[i * group + g] = before + i
    for r in range(item[2] * group, flat.shape[0]):
        positions[r] = item[4] - 1
    stride = flat.shape[1] * _CELL
    for r in range(0, flat.shape[0], LANES):
        for k in range(0, q.shape[0], LANES):
            target = q[k].ctypes.data + r * 4
            transpose16(flat[r].ctypes.data + k * 4, stride, target, flat.shape[0] * 4, 4)


@njit(**INLINE)
def _keys(p, seq, head, span, copies, head_dim):
    """Address of 16 keys from span[0] on, and bytes from one to the next; of those outside
    [span[1], span[2]) anything."""
    block, size, (first, low, high) = p[7], head_dim * _CELL, span
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    if block % LANES == 0 and head_dim % 32 == 0:
        return key_address(p, table, head, first, size), size
    for position in range(max(first, low), min(first + LANES, high)):
        source = u16(key_address(p, table, head, position, size), (head_dim,))
        target = copies[position - first]
        for d in range(head_dim):
            target[d] = source[d]
    return copies.ctypes.data, copies.shape[1] * _CELL


@njit(inline="always")
def _gather(p, seq, head, span, values, head_dim):
    """Values of one head, of positions span[0] + [span[1], span[2]), in pairs among zeros."""
    block, kv_heads = p[7], p[5]
    start, first, end = span
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    size = head_dim * _CELL
    # A row of an even place overwrites its pair, one of an odd place is added to it.
    fill(values[: first // 2 + 1].reshape(-1), 0)
    fill(values[(end + 1) // 2 :].reshape(-1), 0)
    done = first
    while done < end:
        source = key_address(p, table, head, start + done, size) + kv_heads * block * size
        num = min(block - (start + done) % block, end - done)
        _pair_up(source, values, done, num, head_dim)
        done += num


@njit(**INLINE)
def _see(positions, span, low, window, bounds):
    """Of each row, the keys it sees, counted from key `low` of the 64; whether all see all 64."""
    start, first, end = span
    latest, soonest = first - low, end - low
    for v in range(bounds.shape[0]):
        for i in range(LANES):
            position = positions[v * LANES + i] - start
            begin = max(position + 1 - window, first) if window else first
            stop = min(position + 1, end)
            bounds[v, 0, i], bounds[v, 1, i] = begin - low, stop - low
            latest, soonest = max(latest, begin - low), min(soonest, stop - low)
    return latest == 0 and soonest == KEYS


@njit(**INLINE)
def _soften(scores, factor, sums, bounds, all_seen):
    """Scores [keys, rows] become weights relative to each row's largest so far; `shrink` is what
    sums before are to be multiplied with."""
    largest, shrink, total, _ = sums
    stride, num = scores.shape[1] * 4, scores.shape[0]
    for r in range(shrink.shape[0]):
        shrink[r] = largest[r]
    for v in range(bounds.shape[0]):
        column, best = scores.ctypes.data + v * 64, largest.ctypes.data + v * 64
        if all_seen:
            scale_columns(column, stride, num, factor, best, 0)
        else:
            scale_columns(column, stride, num, factor, best, bounds[v].ctypes.data)
    for r in range(shrink.shape[0]):
        shrink[r] = exp2(shrink[r] - largest[r])
        total[r, 0] *= shrink[r]
    for v in range(bounds.shape[0]):
        column, best = scores.ctypes.data + v * 64, largest.ctypes.data + v * 64
        added = total.ctypes.data + v * 64
        if all_seen:
            soften_columns(column, stride, num, best, added, 0)
        else:
            soften_columns(column, stride, num, best, added, bounds[v].ctypes.data)


@njit(**INLINE)
def _round(scores, weights):
    """Scores [KEYS, rows] to weights [rows, KEYS] in bfloat16."""
    stride = scores.shape[1] * 4
    for r in range(0, scores.shape[1], LANES):
        for k in range(0, KEYS, 32):
            target = weights[r].ctypes.data + k * _CELL
            round_turned(scores[k].ctypes.data + r * 4, stride, target, KEYS * _CELL)


@njit(inline="always")
def _score_dots(left, q, scores, how):
    """scores[16, rows] = left[16] @ q; left: as `_keys` returns it."""
    (a, lda), width = left, q.shape[1] * 4
    for k in range(0, LANES, _DOT_KEYS):
        for r in range(0, width, 192):
            b, c = q.ctypes.data + r, scores[k].ctypes.data + r
            keys = a + k * lda
            pair_tile_product(keys, lda, b, width, c, width, q.shape[0], 8, 3, 16, 1, how)


@njit(**INLINE)
def _pair_up(source, values, first, num, head_dim):
    """Values [num, head_dim] at an address to the rows of pairs from that of key `first` on."""
    j = 0
    while j < num:
        row, pair = u16(source + j * head_dim * _CELL, (head_dim,)), values[(first + j) // 2]
        if (first + j) % 2:
            for d in range(head_dim):
                pair[d] |= np.int32(row[d]) << 16
        elif j + 1 < num:
            other = u16(source + (j + 1) * head_dim * _CELL, (head_dim,))
            for d in range(head_dim):
                pair[d] = np.int32(row[d]) | np.int32(other[d]) << 16
            j += 1
        else:
            for d in range(head_dim):
                pair[d] = np.int32(row[d])
        j += 1


@njit(inline="always")
def _add_dots(weights, values, acc, num, vectors, how):
    """acc[num] += weights[num] @ values; the last two are literals."""
    lda, width = KEYS * 2, acc.shape[1] * 4
    a, b, c = weights.ctypes.data, values.ctypes.data, acc.ctypes.data
    for r in range(0, num, _DOT_ROWS):
        pair_tile_product(
            a + r * lda, lda, b, width, c + r * width, width, _PAIRS, 6, vectors, 16, 0, how
        )


@njit(inline="always")
def _score_tiles(own, left, q, scores, soft):
    """As `_score_dots`: a tile of keys times three of rows."""
    (a, lda), width = left, q.shape[1] * 4
    for r in range(0, width, 192):
        b, c = q.ctypes.data + r, scores.ctypes.data + r
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
        amx.zero(own, 2, soft)
        for k in range(q.shape[0] // _TILE):
            amx.load(own, 3, a + k * 64, lda, soft)
            amx.load(own, 4, b + k * _TILE * width, width, soft)
            amx.load(own, 5, b + k * _TILE * width + 64, width, soft)
            amx.load(own, 6, b + k * _TILE * width + 128, width, soft)
            amx.dot(own, 0, 3, 4, soft)
            amx.dot(own, 1, 3, 5, soft)
            amx.dot(own, 2, 3, 6, soft)
        amx.store(own, 0, c, width, soft)
        amx.store(own, 1, c + 64, width, soft)
        amx.store(own, 2, c + 128, width, soft)


@njit(inline="always")
def _add_tiles(own, weights, values, acc, num, soft):
    """acc[num] += weights[num] @ values, a tile of rows times four of outputs, then times one."""
    lda, width = KEYS * 2, acc.shape[1] * 4
    wide = width // 256 * 256
    for r in range(0, num, _TILE):
        a, c = weights.ctypes.data + r * lda, acc.ctypes.data + r * width
        for d in range(0, wide, 256):
            amx.load(own, 0, c + d, width, soft)
            amx.load(own, 1, c + d + 64, width, soft)
            amx.load(own, 2, c + d + 128, width, soft)
            amx.load(own, 3, c + d + 192, width, soft)
            for k in range(KEYS // 32):
                b = values.ctypes.data + k * _TILE * width + d
                amx.load(own, 4, a + k * 64, lda, soft)
                amx.load(own, 5, b, width, soft)
                amx.load(own, 6, b + 64, width, soft)
                amx.dot(own, 0, 4, 5, soft)
                amx.dot(own, 1, 4, 6, soft)
                amx.load(own, 5, b + 128, width, soft)
                amx.load(own, 6, b + 192, width, soft)
                amx.dot(own, 2, 4, 5, soft)
                amx.dot(own, 3, 4, 6, soft)
            amx.store(own, 0, c + d, width, soft)
            amx.store(own, 1, c + d + 64, width, soft)
            amx.store(own, 2, c + d + 128, width, soft)
            amx.store(own, 3, c + d + 192, width, soft)
        for d in range(wide, width, 64):
            amx.load(own, 0, c + d, width, soft)
            for k in range(KEYS // 32):
                amx.load(own, 4, a + k * 64, lda, soft)
                amx.load(own, 5, values.ctypes.data + k * _TILE * width + d, width, soft)
                amx.dot(own, 0, 4, 5, soft)
            amx.store(own, 0, c + d, width, soft)
