"""QK norm, rotary embedding and the write of K and V to the cache, in one pass over each row."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.cells import elements, get, read_cells, write_cells
from kernels.cpu.eight_bits import factor_of, write_row
from kernels.cpu.native import INLINE, Kernel, bits, f32, f64, i64, next_item
from kernels.cpu.threads import num_threads
from kernels.meta import AttentionMeta
from kernels.reference import HeadNorm, Rope

_NUM_PARAMETERS = 20
_INTERLEAVED, _ADDS_ONE = 1, 2  # flags
_ENOUGH = 16384  # with fewer elements of qkv, one thread is faster
_TOKENS = 4  # tokens per item
_ZERO = np.float32(0)


def qkv_rope_write(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    heads: tuple[int, int, int],
    rope: Rope,
    norm: HeadNorm,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """QK norm, rotary embedding and KV write; see kernels.ops.qkv_rope_write. heads: (Hq, Hkv, D).
    Contiguous float32 or bfloat16, but the cache may have 8 bits, and the rotary table and
    ``kv_scales`` are float32."""
    num, width = qkv.shape
    q = qkv.new_empty((num, heads[0], heads[2]))
    table = rope.cos_sin
    QKV[qkv.element_size(), kv_layer.element_size()].run(
        num_threads() if num * width >= _ENOUGH else 1,
        qkv.data_ptr(),
        q.data_ptr(),
        kv_layer.data_ptr(),
        meta.positions.data_ptr(),
        meta.slots.data_ptr(),
        0 if table is None else table.data_ptr(),
        0 if table is None else table.shape[1],
        _INTERLEAVED * rope.interleaved + _ADDS_ONE * norm.add_one,
        0 if norm.q is None else norm.q.data_ptr(),
        0 if norm.q is None else norm.q.numel(),
        0 if norm.k is None else norm.k.data_ptr(),
        0 if norm.k is None else norm.k.numel(),
        bits(norm.eps),
        kv_layer.shape[4] * kv_layer.element_size(),
        num,
        *heads,
        kv_layer.shape[3],
        0 if kv_scales is None else kv_scales.data_ptr(),
    )
    return q


@njit(**INLINE)
def _inverse_rms(x, eps):
    squares = _ZERO
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    return np.float32(1 / np.sqrt(squares / x.shape[0] + eps))


@njit(**INLINE)
def _normalise(x, weight, eps, extra):
    """Apply RMS norm to x in place, separately to each part as long as the weight (one head, or the
    full width). An empty weight leaves x unchanged. extra: number added to each weight."""
    size = weight.shape[0]
    if size == 0:
        return
    for first in range(0, x.shape[0], size):
        part = x[first : first + size]
        scale = _inverse_rms(part, eps)
        for i in range(size):
            part[i] = part[i] * scale * (get(weight, i) + extra)


@njit(**INLINE)
def _rotate(x, cos, sin, interleaved):
    """Rotate a head's first 2 * len(cos) dimensions. interleaved: those of a pair are adjacent."""
    half = cos.shape[0]
    if interleaved:
        for i in range(half):
            a, b = x[2 * i], x[2 * i + 1]
            x[2 * i] = a * cos[i] - b * sin[i]
            x[2 * i + 1] = b * cos[i] + a * sin[i]
    else:
        low, high = x[:half], x[half : 2 * half]
        for i in range(half):
            a, b = low[i], high[i]
            low[i] = a * cos[i] - b * sin[i]
            high[i] = b * cos[i] + a * sin[i]


@njit(**INLINE)
def _rotate_heads(x, dim, cos, sin, interleaved):
    """Rotate all heads of a token, of `dim` elements each."""
    for first in range(0, x.shape[0], dim):
        _rotate(x[first : first + dim], cos, sin, interleaved)


@njit(**INLINE)
def _move(source, target, num, cell):
    """Copy `num` elements of `cell` bytes, a literal, from one address to another."""
    given, taken = elements(source, (num,), cell), elements(target, (num,), cell)
    for i in range(num):
        taken[i] = given[i]


@njit(**INLINE)
def _copy_token(p, source, n, slot, cell):
    """Copy the query, the key and the value of a token that are neither normalised nor rotated, to
    a cache of the same dtype. p: the body's parameters; source: address of the token's row."""
    heads, kv_heads, dim, block, size = p[16], p[17], p[18], p[19], p[14]
    width = heads * dim * cell
    _move(source, p[2] + n * width, heads * dim, cell)
    if slot < 0:
        return
    step, key = block * size, p[3] + (slot // block * 2 * kv_heads * block + slot % block) * size
    for h in range(kv_heads):
        given = source + width + h * dim * cell
        _move(given, key + h * step, dim, cell)
        _move(given + kv_heads * dim * cell, key + (kv_heads + h) * step, dim, cell)


def _qkv_body(token: int, cell: int):
    """Make the body of `qkv_rope_write`. token, cell: bytes per activation and cache element."""
    may_copy = int(token == cell)

    def body(row):
        p = i64(row, (_NUM_PARAMETERS + 1,))
        eps, extra = f64(row, (_NUM_PARAMETERS + 1,))[13], np.float32(1 if p[8] & _ADDS_ONE else 0)
        rot, interleaved, size, num, heads, kv_heads, dim, block = (
            p[7],
            p[8] & _INTERLEAVED,
            p[14],
            p[15],
            p[16],
            p[17],
            p[18],
            p[19],
        )
        q_weight = elements(p[9], (p[10],), token)
        k_weight = elements(p[11], (p[12],), token)
        q_width, k_width = heads * dim, kv_heads * dim
        positions, slots = i64(p[4], (num,)), i64(p[5], (num,))
        q, keys, values = (
            np.empty(q_width, np.float32),
            np.empty(k_width, np.float32),
            np.empty(k_width, np.float32),
        )
        while True:
            first = next_item(row) * _TOKENS
            if first >= num:
                break
            for n in range(first, min(first + _TOKENS, num)):
                source = p[1] + n * (q_width + 2 * k_width) * token
                if may_copy and not (rot or p[10] or p[12]):
                    _copy_token(p, source, n, slots[n], token)
                    continue
                read_cells(source, q, token)
                read_cells(source + q_width * token, keys, token)
                _normalise(q, q_weight, eps, extra)
                _normalise(keys, k_weight, eps, extra)
                if rot:
                    angles = f32(p[6] + positions[n] * rot * 4, (rot,))
                    cos, sin = angles[: rot // 2], angles[rot // 2 :]
                    _rotate_heads(q, dim, cos, sin, interleaved)
                    _rotate_heads(keys, dim, cos, sin, interleaved)
                write_cells(p[2] + n * q_width * token, q, token)
                if slots[n] >= 0:
                    read_cells(source + (q_width + k_width) * token, values, token)
                    page, offset = slots[n] // block, slots[n] % block
                    for h in range(kv_heads):
                        to_key = p[3] + (((page * 2) * kv_heads + h) * block + offset) * size
                        to_value = to_key + kv_heads * block * size
                        head = slice(h * dim, (h + 1) * dim)
                        factors = factor_of(p[20], 0, kv_heads, h), factor_of(p[20], 1, kv_heads, h)
                        write_row(to_key, keys[head], size, cell, factors[0])
                        write_row(to_value, values[head], size, cell, factors[1])

    return body


# By bytes of an activation element and of a cache element.
QKV = {sizes: Kernel(_qkv_body(*sizes)) for sizes in ((4, 4), (4, 2), (4, 1), (2, 2), (2, 1))}
