"""Finds the keys and values of a sequence in the KV cache, and converts those of 8 bits.

`p` is always the array of a kernel body's parameters: p[2] is the address of the cache, p[3] that
of the block tables, p[5] the number of KV heads, p[6] the length of a block table, p[7] the block
size, p[13] the address of the factors of 8-bit floats (see `factor_of`), p[14] the bytes of a row,
p[15] those of its scale (0 for 8-bit floats), p[16] the number of keys after its own position to
which a query attends, and p[17] the address of scores by head and distance (0: none), p[18] of each
head."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.eight_bits import factor_of, widen
from kernels.cpu.native import INLINE, i32

NUM_PARAMETERS = 18


@njit(**INLINE)
def key_address(p, table, head, position, size):
    """Address in the KV cache of a KV head's key at a position of a sequence. table: its block
    table; size: bytes of a key. The value is half a block after the key."""
    block, kv_heads = p[7], p[5]
    page = p[2] + np.int64(table[position // block]) * (2 * kv_heads * block * size)
    return page + (head * block + position % block) * size


@njit(inline="always")
def widen_some(p, source, place, num, target, width, held):
    """Convert `num` adjacent 8-bit keys (half 0) or values (half 1) of a KV head, or some of their
    columns, to numbers of `held` bytes. source: address of the first number; place: (half, KV head,
    first column); target: (address, row stride in bytes, address of the next rows to prefetch);
    width: columns, a literal."""
    half, head, column = place
    scale = source + (p[14] - p[15] - column) if p[15] else 0
    factor = factor_of(p[13], half, p[5], head)
    widen(source, (p[14], scale, num), target, factor, width, held)


@njit(inline="always")
def widen_rows(place, half, span, target, head_dim, held):
    """Convert 8-bit keys (half 0) or values (half 1) of a sequence and KV head to numbers of `held`
    bytes. place: (parameters, sequence, KV head); span: (position of the first, number); target:
    (address, row stride in bytes); head_dim: a literal."""
    (p, seq, head), (base, count) = place, span
    table = i32(p[3] + seq * p[6] * 4, (p[6],))
    block, size, done = p[7], p[14], 0
    offset = half * p[5] * block * size
    while done < count:
        num = min(block - (base + done) % block, count - done)
        source = key_address(p, table, head, base + done, size) + offset
        to = target[0] + done * target[1], target[1], source + num * size
        widen_some(p, source, (half, head, 0), num, to, head_dim, held)
        done += num
