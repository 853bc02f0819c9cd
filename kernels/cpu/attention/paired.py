"""Attention of several query tokens in bfloat16, on processors that multiply it.

As `kernels.cpu.attention.chunk`, whose items and softmax it shares; only the two products differ.
Both read one operand in pairs, the form of `kernels.cpu.matmul.bfloat16`: keys as [head size / 2,
64 keys, 2], values as [32 pairs of keys, head size, 2]. Queries go in as they are, weights rounded
to bfloat16; sums are float32, and so is all between the products.

    tiles   AMX: 16 rows of queries or weights a tile
    dots    AVX-512 BF16: six rows at a time

A key's column is its position modulo 64, so which keys are multiplied together does not depend on
where a prompt was cut. Columns without a key have weight zero, and zeros for values.
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
    weigh,
)
from kernels.cpu.attention.plan import ITEM_FIELDS
from kernels.cpu.attention.softmax import EMPTY, fill, scale_by
from kernels.cpu.cells import write_cells
from kernels.cpu.mathlib import LOG2_E
from kernels.cpu.native import INLINE, f64, i32, i64, next_item, u16
from kernels.cpu.vectors import DOTS, LANES, SOFT_DOTS, pair_tile_product, transpose16

_SOFT_TILES, _TILES = 8, 9  # beside what `pair_tile_product` knows
HOW = {"dots": DOTS, "soft dots": SOFT_DOTS, "tiles": _TILES, "soft tiles": _SOFT_TILES}

_CELL = 2  # bytes of an element of queries, cache and outputs
_PAIRS = KEYS // 2
_STEP = 48  # rows are a multiple of what either product takes at once
_DOT_ROWS = 6
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
    is_tiled, soft = int(how in (_TILES, _SOFT_TILES)), int(how != _TILES)
    vectors, pairs = width // LANES, depth // 2

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS + 1,)), f64(row, (NUM_PARAMETERS + 1,))
        told = i64(p[8], (2,))
        kv_heads, softcap = p[5], np.float32(real[10])
        scale = np.float32(real[9]) * (LOG2_E if softcap == 0 else _ONE)
        state = np.empty(amx.STATE + 64, np.uint8)
        q = np.zeros((rows, depth), np.uint16)
        keys, values = np.zeros((pairs, KEYS), np.int32), np.zeros((_PAIRS, width), np.int32)
        scores, weights = np.zeros((rows, KEYS), np.float32), np.zeros((rows, KEYS), np.uint16)
        acc, total = np.empty((rows, width), np.float32), np.empty((rows, 1), np.float32)
        largest = np.empty(rows, np.float32)
        if is_tiled:
            amx.begin((state.ctypes.data + 63) & -64, soft)
        while True:
            index = next_item(row)
            if index >= told[1] * kv_heads:
                break
            item = i32(told[0] + (index // kv_heads) * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            head, num = index % kv_heads, item[2] * group
            _begin(p, item, head, group, q, head_dim)
            fill(acc.reshape(-1), _ZERO)
            fill(total.reshape(-1), _ZERO)
            fill(largest, EMPTY)
            base = item[3]
            while base < item[4]:
                start = base - base % KEYS
                end = min(KEYS, item[4] - start)
                own = (state.ctypes.data + 63) & -64
                _gather(p, item[0], head, (start, base - start, end), (keys, values), head_dim)
                if is_tiled:
                    _score_tiles(own, q, keys, scores, num, soft)
                else:
                    _score_dots(q, keys, scores, num, how)
                scale_by(scale, scores[:num].reshape(-1))
                weigh(p, item, group, (start, end), softcap, scores, (largest, total, acc))
                _round(scores, weights, num, end)
                if is_tiled:
                    _add_tiles(own, weights, values, acc, num, soft)
                else:
                    _add_dots(weights, values, acc, num, vectors, how)
                base = start + KEYS
            finish(p, item, head, group, (acc, total, largest), head_dim, _CELL)
        if is_tiled:
            amx.end(state.ctypes.data, soft)

    return body


@njit(**INLINE)
def _begin(p, item, head, group, q, head_dim):
    width = group * head_dim
    for i in range(item[2]):
        address = p[1] + row_address(item[1], i, head, p, width * _CELL)
        source = u16(address, (group, head_dim))
        for g in range(group):
            for d in range(head_dim):
                q[i * group + g, d] = source[g, d]


@njit(inline="always")
def _gather(p, seq, head, span, targets, head_dim):
    """Keys and values of one head, of positions span[0] + [span[1], span[2])."""
    keys, values = targets
    block, kv_heads = p[7], p[5]
    start, first, end = span
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    size = head_dim * _CELL
    aligned = block % LANES == 0 and head_dim % 32 == 0 and first % LANES == 0
    # A row of an even column overwrites its pair, one of an odd column is added to it.
    fill(values[: first // 2 + 1].reshape(-1), 0)
    fill(values[(end + 1) // 2 :].reshape(-1), 0)
    done = first
    while done < end:
        source = key_address(p, table, head, start + done, size)
        num = min(block - (start + done) % block, end - done)
        if aligned:
            for j in range(0, num, LANES):
                for d in range(0, head_dim, 32):
                    target = keys[d // 2].ctypes.data + (done + j) * 4
                    transpose16(source + j * size + d * _CELL, size, target, KEYS * 4, 4)
        else:
            _turn(source, keys, done, num, head_dim)
        source += kv_heads * block * size
        _pair_up(source, values, done, num, head_dim)
        done += num


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


@njit(**INLINE)
def _turn(source, keys, column, num, head_dim):
    """Keys [num, head_dim] at an address to the columns from this one on."""
    for j in range(num):
        row = u16(source + j * head_dim * _CELL, (head_dim,))
        for d in range(0, head_dim - 1, 2):
            keys[d // 2, column + j] = np.int32(row[d]) | np.int32(row[d + 1]) << 16
        if head_dim % 2:
            keys[head_dim // 2, column + j] = np.int32(row[head_dim - 1])


@njit(**INLINE)
def _round(scores, weights, num, end):
    """Weights [num, KEYS] as bfloat16, zeros from column `end` on."""
    for r in range(num):
        fill(scores[r, end:], _ZERO)
        write_cells(weights[r].ctypes.data, scores[r], _CELL)


@njit(inline="always")
def _score_dots(q, keys, scores, num, how):
    """scores[num, KEYS] = q[num] @ keys."""
    lda, width, depth = q.shape[1] * 2, KEYS * 4, keys.shape[0]
    a, b, c = q.ctypes.data, keys.ctypes.data, scores.ctypes.data
    for r in range(0, num, _DOT_ROWS):
        pair_tile_product(a + r * lda, lda, b, width, c + r * width, width, depth, 6, 4, 16, 1, how)


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
def _score_tiles(own, q, keys, scores, num, soft):
    """scores[num, KEYS] = q[num] @ keys, a tile of rows times four of keys."""
    lda, width = q.shape[1] * 2, KEYS * 4
    for r in range(0, num, _TILE):
        left = (q.ctypes.data + r * lda, amx.ROW_BYTES, lda)
        target = scores.ctypes.data + r * width
        amx.row_product(own, left, keys.ctypes.data, target, keys.shape[0] // _TILE, 0, soft)


@njit(inline="always")
def _add_tiles(own, weights, values, acc, num, soft):
    """acc[num] += weights[num] @ values, a tile of rows times one of outputs."""
    lda, width = KEYS * 2, acc.shape[1] * 4
    for r in range(0, num, _TILE):
        a, b, c = weights.ctypes.data + r * lda, values.ctypes.data, acc.ctypes.data + r * width
        amx.load(own, 4, a, lda, soft)
        amx.load(own, 5, a + 64, lda, soft)
        for d in range(0, width, 64):
            amx.load(own, 0, c + d, width, soft)
            amx.load(own, 6, b + d, width, soft)
            amx.load(own, 7, b + _TILE * width + d, width, soft)
            amx.dot(own, 0, 4, 6, soft)
            amx.dot(own, 0, 5, 7, soft)
            amx.store(own, 0, c + d, width, soft)
