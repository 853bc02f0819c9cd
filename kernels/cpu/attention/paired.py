"""Attention in bfloat16 for any number of query tokens, on processors with bfloat16 products.

A work item is up to 48 rows (query tokens times the query heads of one KV head) with the keys of a
sequence, processed in stretches of 256. Single tokens have an item per stretch. Rows are stored as
columns for the softmax, so that no sum is across the lanes of a vector:

    scores [256 keys, rows]   = keys [256, head size] @ queries [head size / 2, rows, 2]
    weights [rows, 256 keys]  = softmax of scores down the columns, rounded and transposed
    outputs [rows, head size] += weights @ values [128 pairs of keys, head size, 2]

Weights are rounded to bfloat16; everything else between the products is float32. The products use:

    tiles   AMX: 16 rows of the left operand per tile
    dots    AVX-512 BF16: several rows at a time

Stretches begin at multiples of 256 tokens, so which keys are multiplied together does not depend on
how a prompt was split into chunks. Missing keys have weight zero and zero values."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu import amx, isa
from kernels.cpu.attention.chunk import finish, row_address, tokens_an_item
from kernels.cpu.attention.plan import ARRIVALS, FIRST_ITEMS, ITEM_FIELDS, ROOM
from kernels.cpu.attention.rows import NUM_PARAMETERS, key_address, widen_rows
from kernels.cpu.attention.softmax import (
    EMPTY,
    STRETCH,
    TAIL,
    begin,
    copy,
    fill,
    fold,
    scale_and_cap,
)
from kernels.cpu.columns import (
    pair_halves,
    round_turned,
    scale_columns,
    soften_columns,
    transpose16,
)
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import EXACT, INLINE, f32, f64, i32, i64, keep, next_item, u16, unowned
from kernels.cpu.vectors import (
    DOTS,
    LANES,
    LINE,
    SOFT_DOTS,
    copy_bytes,
    pair_tile_product,
)

_SOFT_TILES, _TILES = 8, 9  # in addition to the values for `pair_tile_product`
HOW = {"dots": DOTS, "soft dots": SOFT_DOTS, "tiles": _TILES, "soft tiles": _SOFT_TILES}

_CELL = 2  # bytes of an element of queries and outputs, and of what products read
_UNIT = 32  # keys per tile of weights
_WIDE = 48  # rows are padded to a multiple of this, or of one vector if they are few
_DOT_ROWS = 6
_TILE = amx.ROWS  # rows, and columns of float32
_ZERO, _ONE = np.float32(0), np.float32(1)


def chosen() -> str | None:
    """The key of ``HOW`` for this processor; ``None`` without bfloat16 products."""
    return {"amx": "tiles", "avx512_bf16": "dots"}.get(isa.LEVEL)


def paired_body(head_dim: int, group: int, how: int, cell: int, single: int = 0):
    """Make the kernel body (see `kernels.cpu.native`). group: query heads per KV head; how: a value
    of HOW; cell: bytes of a cache element, 2 or 1; single: 1 for items of single query tokens, 0
    for prompt chunks."""
    wide = 0 if single and group <= _WIDE // 2 else 1
    step, num_rows = _WIDE if wide else LANES, group if single else tokens_an_item(group) * group
    rows = -(-num_rows // step) * step
    depth = -(-head_dim // 32) * 32  # inputs of the first product, padded with zeros
    width = -(-head_dim // _TILE) * _TILE  # outputs of the second
    vectors, height = width // LANES, min(_DOT_ROWS, num_rows)
    is_tiled, soft = int(how in (_TILES, _SOFT_TILES)), int(how != _TILES)

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        planned, kv_heads = i64(p[8], (2,)), p[5]
        state = np.empty(amx.STATE + LINE, np.uint8)
        halves = (
            np.zeros((rows, depth), np.uint16),
            np.zeros((LANES, depth), np.uint16),
            # Weights. Padded, since dots compute several rows together.
            np.zeros((rows + _DOT_ROWS, STRETCH), np.uint16),
        )
        words = np.empty((depth // 2, rows), np.int32), np.zeros((STRETCH // 2, width), np.int32)
        places = np.empty(rows, np.int32), np.empty((rows // LANES, 2, LANES), np.int32)
        floats = (
            np.empty((rows + _DOT_ROWS, width), np.float32),
            np.empty((rows, head_dim), np.float32),
            np.empty((6, rows), np.float32),
            # Scores. Separate for each group of 16 rows, since a group is read several times.
            np.zeros((rows // LANES, STRETCH, LANES), np.float32),
        )
        (flat, copies, weights), (q, values) = unowned(halves), unowned(words)
        (positions, bounds), (acc, outputs, lines, scores) = unowned(places), unowned(floats)
        total, largest, factors = lines[0], lines[1], (lines[2], lines[3])
        added, sums = (acc, total, largest), (outputs, lines[4], lines[5])
        if is_tiled:
            amx.begin((state.ctypes.data + LINE - 1) & -LINE, soft)
        while True:
            index = next_item(row)
            if index >= planned[1] * kv_heads:
                break
            item = i32(planned[0] + (index // kv_heads) * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            head, num = index % kv_heads, item[2] * group
            # Tiles multiply all rows, dots only whole vectors with rows of the item.
            used = rows // LANES if is_tiled else (num + LANES - 1) // LANES
            _begin(p, item, head, group, (flat, q, positions), head_dim, used)
            room = scores[:used], weights, bounds[:used], total, largest
            begin(sums)
            start = item[3] - item[3] % STRETCH
            while start < item[4]:
                # Computed in each round, since Numba frees an array after its last use.
                own = (state.ctypes.data + LINE - 1) & -LINE
                span = start, max(item[3] - start, 0), min(STRETCH, item[4] - start)
                place = p, item[0], head
                _score((place, own), span, (q, copies, room[0]), head_dim, cell, how, wide)
                _add_distances(row, (head, item[6]), span, room[0])
                _weigh(row, span, positions, room, is_tiled)
                gather_pairs(place, span, (values, copies), head_dim, cell)
                _add(own, (weights, values, acc), num, span, vectors, height, how)
                fold(sums, added, factors, num)
                start += STRETCH
            if single == 0 or is_last(p, (item, index), sums, added, factors, group):
                finish(p, item, head, group, sums, _CELL)
        if is_tiled:
            amx.end(state.ctypes.data, soft)
        keep((halves, words, places, floats))

    return body


@njit(**INLINE)
def whole_units(span):
    """Return the first and the end of an item's keys in a stretch, rounded outwards to multiples of
    32."""
    return span[1] // _UNIT * _UNIT, -(-span[2] // _UNIT) * _UNIT


@njit(**EXACT)
def is_last(p, place, sums, room, factors, group):
    """Whether this item completes its token: True for a token's only item, or for the last of
    several to finish, which merges all their results into ``sums``. place: (item, its index); room:
    scratch memory for the results of one item; factors: scratch memory for `fold`."""
    (item, index), (outputs, total, largest) = place, sums
    if item[5] == 1:
        return True
    planned = i64(p[8], (ROOM + 3,))
    head_dim, seq, head = outputs.shape[1], np.int64(item[0]), index % p[5]
    line = head_dim + TAIL
    size = group * line * 4
    mine = f32(planned[ROOM] + index * size, (group, line))
    for g in range(group):
        copy(outputs[g], mine[g])
        mine[g, head_dim], mine[g, head_dim + 1] = total[g], largest[g]
    arrived = planned[ARRIVALS] + (seq * p[5] + head) * 8
    if next_item(arrived) + 1 < item[5]:
        return False
    i64(arrived, (1,))[0] = 0
    first = i64(planned[FIRST_ITEMS], (seq + 1,))[seq]
    begin(sums)
    for part in range(item[5]):
        left = f32(planned[ROOM] + ((first + part) * p[5] + head) * size, (group, line))
        for g in range(group):
            room[1][g], room[2][g] = left[g, head_dim], left[g, head_dim + 1]
        fold(sums, (left, room[1], room[2]), factors, group)
    return True


@njit(inline="always")
def _score(given, span, arrays, head_dim, cell, how, wide):
    """Compute an item's scores [rows / 16, keys, 16] for one stretch of keys. given: ((body's
    parameters, sequence, KV head), tile state); span: (position of the stretch, first and end of
    the keys in it); arrays: (queries, scratch memory, scores); the others: literals."""
    (place, own), (start, low, high), (q, copies, scores) = given, span, arrays
    # Computes full groups of 16 keys.
    for first in range(low // LANES * LANES, high, LANES):
        left = keys_address(
            place, (start + first, start + low, start + high), copies, head_dim, cell
        )
        if how == _TILES:
            _score_tiles(own, left, q, scores[:, first:], 0, wide)
        elif how == _SOFT_TILES:
            _score_tiles(own, left, q, scores[:, first:], 1, wide)
        else:
            _score_dots(left, q, scores[:, first:], how)


@njit(**INLINE)
def _add_distances(row, place, span, scores):
    """Add the scores by distance, if any, to products of queries and keys, before they are scaled,
    of heads with keys of their own. row: address of the kernel body's parameters; place: (head,
    position of the first query); span: as in `_weigh`."""
    p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
    if not p[17]:
        return
    (head, before), (start, low, high), width = place, span, p[18]
    line, factor = f32(p[17] + head * width * 4, (width,)), np.float32(1 / real[9])
    for v in range(scores.shape[0]):
        for k in range(low, high):
            at, column = width // 2 + start + k - before - v * LANES, scores[v, k]
            for i in range(LANES):
                column[i] += line[at - i] * factor


@njit(inline="always")
def _weigh(row, span, positions, room, is_tiled):
    """Convert a work item's scores for one stretch of keys to softmax weights. row: address of the
    kernel body's parameters; span: (position of the stretch, first and end of the item's keys in
    it); positions: of the rows' tokens; room: (scores, weights, bounds, sums of weights, largest
    scores); is_tiled: weights are stored as [rows / 16, units, 16, 32]."""
    p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
    scores, weights, bounds, total, largest = room
    softcap, (before, after) = np.float32(real[10]), whole_units(span)
    scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
    low, high = span[1] // LANES * LANES, -(-span[2] // LANES) * LANES
    all_seen = _see(positions, span, low, (p[12], p[16]), bounds)
    for v in range(scores.shape[0]):
        column = scores[v, low:high].reshape(-1)
        if softcap > 0:
            scale_and_cap(column, scale, softcap)
        fill(scores[v, before:low].reshape(-1), _ZERO)
        fill(scores[v, high:after].reshape(-1), _ZERO)
        of = slice(v * LANES, (v + 1) * LANES)
        factor = _ONE if softcap > 0 else scale
        _soften(column, factor, (total[of], largest[of]), bounds[v], all_seen)
        place = weights[v * LANES].ctypes.data
        for k in range(before, after, _UNIT):
            if is_tiled:
                round_turned(scores[v, k].ctypes.data, LINE, place + k * LINE // 2, LINE)
            else:
                target = place + k * _CELL
                round_turned(scores[v, k].ctypes.data, LINE, target, STRETCH * _CELL)


@njit(**INLINE)
def _begin(p, item, head, group, targets, head_dim, used):
    """Copy a work item's queries to `targets`, with the positions of their tokens. targets:
    (scratch memory, queries in pairs [head size / 2, rows, 2], positions [rows]); used: number of
    groups of 16 rows that are multiplied."""
    flat, q, positions = targets
    width, before, stride = group * head_dim, item[6], flat.shape[1] * _CELL
    for i in range(item[2]):
        source = p[1] + row_address(item[1], i, head, p, width * _CELL)
        target = flat.ctypes.data + i * group * stride
        for g in range(group):
            copy_bytes(source + g * head_dim * _CELL, target + g * stride, head_dim * _CELL)
            positions[i * group + g] = before + i
    for r in range(item[2] * group, used * LANES):
        positions[r] = before + item[2] - 1
    for r in range(0, used * LANES, LANES):
        for k in range(0, q.shape[0], LANES):
            target = q[k].ctypes.data + r * 4
            transpose16(flat[r].ctypes.data + k * 4, stride, target, q.shape[1] * 4, 4)


@njit(inline="always")
def keys_address(place, span, copies, head_dim, cell):
    """Return (address, stride in bytes) of 16 consecutive keys of a KV head. place: (parameters,
    sequence, KV head); span: positions of (the first key, first and end of the item's keys); keys
    outside the item are undefined. copies: scratch memory for keys that are not adjacent in the
    cache, or have 8 bits. head_dim and cell (bytes of a cache element): literals."""
    (p, seq, head), (first, low, high) = place, span
    block, size, stride = p[7], head_dim * _CELL, copies.shape[1] * _CELL
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    address = copies.ctypes.data
    begin, end = max(first, low), min(first + LANES, high)
    if cell == 1:
        to = address + (begin - first) * stride, stride
        widen_rows(place, 0, (begin, end - begin), to, head_dim, _CELL)
    elif block % LANES == 0 and head_dim % 32 == 0:
        address, stride = key_address(p, table, head, first, size), size
    else:
        for position in range(begin, end):
            source = key_address(p, table, head, position, size)
            copy_bytes(source, address + (position - first) * stride, size)
    return address, stride


@njit(inline="always")
def gather_pairs(place, span, arrays, head_dim, cell):
    """Copy the values of a KV head for one stretch, interleaved in pairs of keys. place:
    (parameters, sequence, KV head); span: (position of the stretch, first and end of the keys in
    it); arrays: (pairs of values, scratch memory for 16 values of 8 bits). The rest of the first
    and last 32 keys is zeroed."""
    (p, seq, head), (start, first, end), (values, copies) = place, span, arrays
    block, kv_heads, (before, after) = p[7], p[5], whole_units(span)
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    size, stride = head_dim * _CELL, copies.shape[1] * _CELL
    # A row at an even place overwrites its pair; one at an odd place is added to it.
    fill(values[before // 2 : first // 2 + 1].reshape(-1), 0)
    fill(values[(end + 1) // 2 : after // 2].reshape(-1), 0)
    done = first
    while done < end:
        if cell == 1:
            num = min(LANES, end - done)
            to = copies.ctypes.data, stride
            widen_rows(place, 1, (start + done, num), to, head_dim, _CELL)
            _pair_up(to, values, done, num, head_dim)
        else:
            source = key_address(p, table, head, start + done, size) + kv_heads * block * size
            num = min(block - (start + done) % block, end - done)
            _pair_up((source, size), values, done, num, head_dim)
        done += num


@njit(**INLINE)
def _see(positions, span, low, reach, bounds):
    """Write to `bounds` the first and the end of the keys that each row attends to, counted from
    index `low` of a stretch. reach: (window, keys after its own position to which a query
    attends). Returns True if all rows attend to all 256 keys."""
    (start, first, end), (window, ahead) = span, reach
    latest, soonest = first - low, end - low
    for v in range(bounds.shape[0]):
        for i in range(LANES):
            position = positions[v * LANES + i] - start
            begin = max(position + 1 - window, first) if window else first
            stop = min(position + 1 + ahead, end)
            bounds[v, 0, i], bounds[v, 1, i] = begin - low, stop - low
            latest, soonest = max(latest, begin - low), min(soonest, stop - low)
    return latest == 0 and soonest == STRETCH


@njit(**EXACT)
def _soften(scores, factor, sums, bounds, all_seen):
    """Convert scores [keys, 16 rows] to softmax weights. Writes each row's sum of weights and
    largest score to `sums`. all_seen: every row attends to all keys, so `bounds` is not needed."""
    total, largest = sums
    fill(largest, EMPTY)
    fill(total, _ZERO)
    column, num = scores.ctypes.data, scores.shape[0] // LANES
    best, added = largest.ctypes.data, total.ctypes.data
    if all_seen:
        scale_columns(column, LINE, num, factor, best, 0)
        soften_columns(column, LINE, num, best, added, 0)
    else:
        scale_columns(column, LINE, num, factor, best, bounds.ctypes.data)
        soften_columns(column, LINE, num, best, added, bounds.ctypes.data)


@njit(inline="always")
def _score_dots(left, q, scores, how):
    """Compute the scores of 16 keys for all rows with dot products, 16 rows in each scores[v].
    left: (address, stride in bytes) of the keys; how: a literal."""
    (a, lda), width = left, q.shape[1] * 4
    for v in range(scores.shape[0]):
        b, c = q.ctypes.data + v * LINE, scores[v].ctypes.data
        pair_tile_product(a, lda, b, width, c, LINE, q.shape[0], 16, 1, 16, 1, how)


@njit(**INLINE)
def _pair_up(source, values, first, num, head_dim):
    """Copy bfloat16 values [num, head_dim] to `values`, where the values of two keys are
    interleaved. source: (address, row stride in bytes); first: index of the first key."""
    j, (address, stride), whole = 0, source, head_dim // LANES * LANES
    while j < num:
        row, pair = u16(address + j * stride, (head_dim,)), values[(first + j) // 2]
        if (first + j) % 2:
            for d in range(head_dim):
                pair[d] |= np.int32(row[d]) << 16
        elif j + 1 < num:
            other = u16(address + (j + 1) * stride, (head_dim,))
            for d in range(0, whole, LANES):
                at = address + j * stride + d * _CELL
                pair_halves(at, at + stride, pair.ctypes.data + d * 4)
            for d in range(whole, head_dim):
                pair[d] = np.int32(row[d]) | np.int32(other[d]) << 16
            j += 1
        else:
            for d in range(head_dim):
                pair[d] = np.int32(row[d])
        j += 1


@njit(inline="always")
def _add(own, arrays, num, span, vectors, height, how):
    """acc[:num] = weights[:num] @ values over the keys of `span`. arrays: (weights, values, acc);
    own: address of the tile state; vectors, height, how: literals."""
    if how == _TILES:
        _add_tiles(own, arrays, num, span, 0)
    elif how == _SOFT_TILES:
        _add_tiles(own, arrays, num, span, 1)
    else:
        add_dots(arrays, num, span, vectors, height, how)


@njit(inline="always")
def add_dots(arrays, num, span, vectors, height, how):
    """acc[:num] = weights[:num] @ values over the keys of `span`, `height` rows at a time. arrays:
    (weights, values, acc); vectors, height, how: literals."""
    (weights, values, acc), (before, after) = arrays, whole_units(span)
    lda, width = STRETCH * _CELL, acc.shape[1] * 4
    a, b = weights.ctypes.data + before * _CELL, values[before // 2].ctypes.data
    pairs = (after - before) // 2
    for r in range(0, num, height):
        rows, out = a + r * lda, acc[r].ctypes.data
        pair_tile_product(rows, lda, b, width, out, width, pairs, height, vectors, 16, 1, how)


@njit(inline="always")
def _score_tiles(own, left, q, scores, soft, wide):
    """Compute the scores of 16 keys for all rows, with AMX. left: (address, stride in bytes) of the
    keys; wide: multiply three tiles of rows at a time."""
    (a, lda), width = left, q.shape[1] * 4
    if not wide:
        for v in range(scores.shape[0]):
            amx.zero(own, 0, soft)
            for k in range(q.shape[0] // _TILE):
                amx.load(own, 3, a + k * LINE, lda, soft)
                amx.load(own, 4, q.ctypes.data + v * LINE + k * _TILE * width, width, soft)
                amx.dot(own, 0, 3, 4, soft)
            amx.store(own, 0, scores[v].ctypes.data, LINE, soft)
        return
    for v in range(0, scores.shape[0], 3):
        b = q.ctypes.data + v * LINE
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
        amx.zero(own, 2, soft)
        for k in range(q.shape[0] // _TILE):
            amx.load(own, 3, a + k * LINE, lda, soft)
            amx.load(own, 4, b + k * _TILE * width, width, soft)
            amx.load(own, 5, b + k * _TILE * width + 64, width, soft)
            amx.load(own, 6, b + k * _TILE * width + 128, width, soft)
            amx.dot(own, 0, 3, 4, soft)
            amx.dot(own, 1, 3, 5, soft)
            amx.dot(own, 2, 3, 6, soft)
        amx.store(own, 0, scores[v].ctypes.data, LINE, soft)
        amx.store(own, 1, scores[v + 1].ctypes.data, LINE, soft)
        amx.store(own, 2, scores[v + 2].ctypes.data, LINE, soft)


@njit(inline="always")
def _add_tiles(own, arrays, num, span, soft):
    """acc[:num] = weights[:num] @ values over the keys of `span`, with AMX. arrays: (weights,
    values, acc); own: address of the tile state."""
    (weights, values, acc), (before, after) = arrays, whole_units(span)
    width = acc.shape[1] * 4
    wide = width // 256 * 256
    for r in range(0, num, _TILE):
        a, c = weights[r].ctypes.data, acc[r].ctypes.data
        for d in range(0, wide, 256):
            amx.zero(own, 0, soft)
            amx.zero(own, 1, soft)
            amx.zero(own, 2, soft)
            amx.zero(own, 3, soft)
            for k in range(before, after, _UNIT):
                b = values[k // 2].ctypes.data + d
                amx.load(own, 4, a + k * LINE // 2, LINE, soft)
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
            amx.zero(own, 0, soft)
            for k in range(before, after, _UNIT):
                amx.load(own, 4, a + k * LINE // 2, LINE, soft)
                amx.load(own, 5, values[k // 2].ctypes.data + d, width, soft)
                amx.dot(own, 0, 4, 5, soft)
            amx.store(own, 0, c + d, width, soft)
