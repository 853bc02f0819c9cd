"""The compiled loops of paged attention.

An item is some query tokens of one sequence against a range of its keys. It walks the sequence's
blocks in order and, within one, the keys of all heads and then their values, as they lie in memory:
that keeps the hardware's prefetching alive, which scattered 4 KB pieces do not. Softmax is online.

A long sequence is cut into several items. Each leaves its sums, and whoever comes last merges them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention_plan import ITEM_FIELDS, MAX_TOKENS
from kernels.cpu.mathlib import LOG2_E, exp2, tanh
from kernels.cpu.native import FAST, f32, f64, i32, i64, next_item

NUM_PARAMETERS = 19

_EMPTY = np.float32(-1e30)  # the largest score of no keys: finite, so that differences are too
_ZERO, _ONE = np.float32(0), np.float32(1)
_INLINE = {"fastmath": FAST, "error_model": "numpy", "forceinline": True}


@njit(**_INLINE)
def _scores(q, k, first, end, softcap, out, group, head_dim):
    """out[g, t] = q[g] . k[t], in units of log 2."""
    for t in range(end - first):
        for g in range(group):
            total = _ZERO
            for d in range(head_dim):
                total += q[g, d] * k[first + t, d]
            out[g, t] = total
    if softcap > 0:
        for g in range(group):
            for t in range(end - first):
                out[g, t] = tanh(out[g, t] / softcap) * (softcap * LOG2_E)


@njit(**_INLINE)
def _softmax(scores, count, largest, total, acc, group, head_dim):
    """Scores become weights relative to the largest so far; what was summed before is rescaled."""
    for g in range(group):
        best = largest[g]
        for t in range(count):
            best = max(best, scores[g, t])
        shrink = exp2(largest[g] - best)
        largest[g] = best
        added = _ZERO
        for t in range(count):
            weight = exp2(scores[g, t] - best)
            scores[g, t] = weight
            added += weight
        total[g] = total[g] * shrink + added
        for d in range(head_dim):
            acc[g, d] *= shrink


@njit(**_INLINE)
def _add_values(scores, v, first, end, acc, group, head_dim):
    for t in range(end - first):
        for g in range(group):
            weight = scores[g, t]
            for d in range(head_dim):
                acc[g, d] += weight * v[first + t, d]


@njit(**_INLINE)
def _store(acc, total, largest, sinks, out, num, head_dim):
    """Divide by the sum of weights; num rows of all heads. sinks: one logit a head, or length 0."""
    for i in range(num):
        for h in range(total.shape[1]):
            below = total[i, h]
            if sinks.shape[0]:
                below += exp2(sinks[h] * LOG2_E - largest[i, h])
            inverse = _ONE / below
            for d in range(head_dim):
                out[i, h, d] = acc[i, h, d] * inverse


@njit(**_INLINE)
def _merge(partials, sinks, out, num_heads, head_dim):
    """partials: [items, heads, head_dim + 2], the last two the sum of weights and the largest."""
    for h in range(num_heads):
        best = _EMPTY
        for part in range(partials.shape[0]):
            best = max(best, partials[part, h, head_dim + 1])
        below = _ZERO
        for d in range(head_dim):
            out[h, d] = _ZERO
        for part in range(partials.shape[0]):
            shrink = exp2(partials[part, h, head_dim + 1] - best)
            below += partials[part, h, head_dim] * shrink
            for d in range(head_dim):
                out[h, d] += partials[part, h, d] * shrink
        if sinks.shape[0]:
            below += exp2(sinks[h] * LOG2_E - best)
        for d in range(head_dim):
            out[h, d] /= below


def attention_body(head_dim: int, group: int):
    """A body for one head size and number of query heads per key head; all else is parameters."""

    def body(row):
        p, real = i64(row, (NUM_PARAMETERS,)), f64(row, (NUM_PARAMETERS,))
        kv_heads, block, num_items = p[7], p[9], p[11]
        scale, window, softcap = np.float32(real[12]), p[13], np.float32(real[14])
        heads = kv_heads * group
        sinks = f32(p[15], (heads if p[15] else 0,))
        if softcap == 0:
            scale *= LOG2_E
        q = np.empty((MAX_TOKENS, kv_heads, group, head_dim), np.float32)
        acc = np.empty_like(q)
        scores = np.empty((kv_heads, MAX_TOKENS, group, block), np.float32)
        total = np.empty((MAX_TOKENS, kv_heads, group), np.float32)
        largest = np.empty_like(total)
        while True:
            index = next_item(row)
            if index >= num_items:
                break
            item = i32(p[10] + index * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            seq, start, num, low, high = item[0], item[1], item[2], item[3], item[4]
            _begin(p[1], start, num, scale, q, acc, total, largest)
            table = i32(p[3] + seq * p[8] * 4, (p[8],))
            position = i32(p[4], (seq + 1,))[seq] - i32(p[5], (seq + 2,))[seq + 1] + start
            for index_in_table in range(low // block, (high + block - 1) // block):
                base = index_in_table * block
                page = p[2] + np.int64(table[index_in_table]) * (8 * kv_heads * block * head_dim)
                for h in range(kv_heads):
                    k = f32(page + h * (4 * block * head_dim), (block, head_dim))
                    for i in range(num):
                        first, end = _visible(position + i, low, high, window, base, block)
                        if first < end:
                            s, sums = scores[h, i], acc[i, h]
                            _scores(q[i, h], k, first, end, softcap, s, group, head_dim)
                            _softmax(
                                s, end - first, largest[i, h], total[i, h], sums, group, head_dim
                            )
                for h in range(kv_heads):
                    v = f32(page + (kv_heads + h) * (4 * block * head_dim), (block, head_dim))
                    for i in range(num):
                        first, end = _visible(position + i, low, high, window, base, block)
                        _add_values(scores[h, i], v, first, end, acc[i, h], group, head_dim)
            _finish(p, item, index, acc, total, largest, sinks)

    return body


@njit(**_INLINE)
def _begin(q_address, start, num, scale, q, acc, total, largest):
    width = q.shape[1] * q.shape[2] * q.shape[3]
    source = f32(q_address + np.int64(start) * width * 4, (num * width,))
    scaled, sums = q.reshape(-1), acc.reshape(-1)
    for i in range(num * width):
        scaled[i] = source[i] * scale
        sums[i] = _ZERO
    for i in range(num):
        total[i] = _ZERO
        largest[i] = _EMPTY


@njit(**_INLINE)
def _visible(position, low, high, window, base, block):
    """Which keys of the block at `base` the query at `position` sees, as offsets."""
    first, end = low, min(position + 1, high)
    if window:
        first = max(first, position + 1 - window)
    return max(first - base, 0), min(end - base, block)


@njit(**_INLINE)
def _finish(p, item, index, acc, total, largest, sinks):
    """Write the rows, or leave partial sums and merge them if this item is the last of its rows."""
    seq, start, num, shared = item[0], item[1], item[2], item[5]
    heads, head_dim = acc.shape[1] * acc.shape[2], acc.shape[3]
    sums = acc.reshape((MAX_TOKENS, heads, head_dim))
    below, best = total.reshape((MAX_TOKENS, heads)), largest.reshape((MAX_TOKENS, heads))
    out = f32(p[6] + np.int64(start) * (heads * head_dim * 4), (num, heads, head_dim))
    if shared == 1:
        _store(sums, below, best, sinks, out, num, head_dim)
        return
    size = heads * (head_dim + 2)
    mine = f32(p[16] + index * (size * 4), (heads, head_dim + 2))
    for h in range(heads):
        for d in range(head_dim):
            mine[h, d] = sums[0, h, d]
        mine[h, head_dim] = below[0, h]
        mine[h, head_dim + 1] = best[0, h]
    arrived = p[17] + np.int64(seq) * 8
    if next_item(arrived) + 1 == shared:
        i64(arrived, (1,))[0] = 0
        first = i64(p[18], (seq + 1,))[seq]
        parts = f32(p[16] + first * (size * 4), (shared, heads, head_dim + 2))
        _merge(parts, sinks, out[0], heads, head_dim)
