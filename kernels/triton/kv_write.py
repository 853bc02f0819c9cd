"""QK norm, rotary embedding and the write of K and V to the cache, in one pass over qkv.

Intermediate values are rounded to qkv's dtype exactly where the reference rounds, because greedy
tokens depend on it. A program computes some heads of one token's queries, keys or values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.meta import AttentionMeta
from kernels.reference import HeadNorm, Rope
from kernels.triton.launch import Launch
from kernels.triton.repeated import again
from kernels.tuning import pad_power, write_heads, write_warps

FP8_MAX = tl.constexpr(448.0)


class Write(NamedTuple):
    """Compile-time parameters of `write_kernel`."""

    D: int  # head size
    PAD_D: int
    Q_HEADS: int
    KV_HEADS: int
    HEADS: int  # heads per program, a power of two
    PAGE: int
    ROT: int  # rotated dimensions; 0: none
    IS_INTERLEAVED: bool
    NORM: int  # 0: none, 1: each head, 2: all heads of a token together
    EPS: float
    ADD_ONE: bool
    IS_FP8: bool  # of the cache


@triton.jit
def partners(dims, S: tl.constexpr):
    """Returns, for each dimension of a head, the other dimension of its rotated pair, the index of
    the pair's angle, and the sign of the sine."""
    if S.IS_INTERLEAVED:
        partner = dims ^ 1
        angle = dims // 2
        is_first = dims % 2 == 0
    else:
        is_first = dims < S.ROT // 2
        partner = tl.where(is_first, dims + S.ROT // 2, dims - S.ROT // 2)
        angle = dims % (S.ROT // 2)
    return tl.where(dims < S.ROT, partner, dims), angle, tl.where(is_first, -1.0, 1.0)


@triton.jit
def weigh(x, factor, weight, where, mask, dtype, S: tl.constexpr):
    """Apply an RMS norm: x * factor (1 / rms(x)) * weight[where], rounded as in Llama or Gemma."""
    w = tl.load(weight + where, mask=mask, other=0.0).to(tl.float32)
    if S.ADD_ONE:
        y = (x * factor * (1 + w)).to(dtype)
    else:
        y = ((x * factor).to(dtype).to(tl.float32) * w.to(dtype).to(tl.float32)).to(dtype)
    return y.to(tl.float32)


@triton.jit
def normed_and_turned(source, head, num_heads, weight, cos_sin, position, S: tl.constexpr):
    """Load some heads of one token, normalise and rotate them. Returns [HEADS, PAD_D]. source:
    address of the token's head 0; head: indices of the heads to load."""
    dtype = source.dtype.element_ty
    dims = tl.arange(0, S.PAD_D)
    mask = (head < num_heads)[:, None] & (dims < S.D)[None, :]
    here = head[:, None] * S.D + dims[None, :]
    x = tl.load(source + here, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0
    weights = head[:, None] * ((S.NORM - 1) * S.D)  # shared by all heads, or one per head
    y = x
    if weight is not None:
        if S.NORM == 1:
            factor = tl.rsqrt(tl.sum(x * x, 1) / S.D + S.EPS)[:, None]
        else:
            factor = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / (num_heads * S.D) + S.EPS)
        y = weigh(x, factor, weight, weights + dims[None, :], mask, dtype, S)
    if S.ROT > 0:
        partner, angle, sign = partners(dims, S)
        there = here - dims[None, :] + partner[None, :]
        other = tl.load(source + there, mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            other = weigh(other, factor, weight, weights + partner[None, :], mask, dtype, S)
        angles = cos_sin + position * S.ROT + angle
        turns = dims < S.ROT
        cos = tl.load(angles, mask=turns, other=1.0).to(dtype).to(tl.float32)
        sin = tl.load(angles + S.ROT // 2, mask=turns, other=0.0).to(dtype).to(tl.float32)
        straight = (y * cos[None, :]).to(dtype).to(tl.float32)
        crossed = (other * sin[None, :]).to(dtype).to(tl.float32) * sign[None, :]
        y = tl.where(turns[None, :], straight + crossed, y)
    return y.to(dtype)


@triton.jit
def store_cell(cell, x, half, head, kv_scales, S: tl.constexpr):
    """Write a token's keys (half 0) or values (half 1) to the cache. cell: address of the token's
    slot in its block, for head 0. An 8-bit cache stores x / scale, clamped; NaN stays NaN."""
    dims = tl.arange(0, S.PAD_D)
    mask = (head < S.KV_HEADS)[:, None] & (dims < S.D)[None, :]
    row = half * S.KV_HEADS + head
    if kv_scales is not None:
        scale = tl.load(kv_scales + row, mask=head < S.KV_HEADS, other=1.0)
        x = tl.div_rn(x.to(tl.float32), scale[:, None])  # as the reference rounds
    if S.IS_FP8:
        wide = x.to(tl.float32)
        x = tl.clamp(wide, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    there = cell + row[:, None] * (S.PAGE * S.D) + dims[None, :]
    tl.store(there, x.to(cell.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(  # noqa: PLR0913
    qkv, kv, positions, slots, q_out, cos_sin, q_norm, k_norm, kv_scales,
    stride_qkv, stride_block, S: tl.constexpr,
):  # fmt: skip
    """One program per (token, block of heads); the blocks of query heads come first, then those of
    keys, then those of values."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = (S.Q_HEADS + S.HEADS - 1) // S.HEADS
    kv_blocks = (S.KV_HEADS + S.HEADS - 1) // S.HEADS
    source = qkv + token * stride_qkv
    dims = tl.arange(0, S.PAD_D)
    lanes = tl.arange(0, S.HEADS)
    position = tl.load(positions + token)
    if block < q_blocks:
        head = block * S.HEADS + lanes
        q = normed_and_turned(source, head, S.Q_HEADS, q_norm, cos_sin, position, S)
        mask = (head < S.Q_HEADS)[:, None] & (dims < S.D)[None, :]
        there = q_out + token * (S.Q_HEADS * S.D) + head[:, None] * S.D + dims[None, :]
        tl.store(there, q, mask=mask)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    cell = kv + (slot // S.PAGE) * stride_block + (slot % S.PAGE) * S.D
    if block < q_blocks + kv_blocks:
        head = (block - q_blocks) * S.HEADS + lanes
        keys = source + S.Q_HEADS * S.D
        k = normed_and_turned(keys, head, S.KV_HEADS, k_norm, cos_sin, position, S)
        store_cell(cell, k, 0, head, kv_scales, S)
    else:
        head = (block - q_blocks - kv_blocks) * S.HEADS + lanes
        values = source + (S.Q_HEADS + S.KV_HEADS) * S.D
        mask = (head < S.KV_HEADS)[:, None] & (dims < S.D)[None, :]
        v = tl.load(values + head[:, None] * S.D + dims[None, :], mask=mask, other=0.0)
        store_cell(cell, v, 1, head, kv_scales, S)


def qkv_rope_write(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    heads: tuple[int, int, int],
    rope: Rope,
    norm: HeadNorm,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm, rotary embedding and KV write; see kernels.ops.qkv_rope_write. heads: (Hq, Hkv, D)."""
    q = qkv.new_empty((len(qkv), heads[0], heads[2]))
    if len(qkv):
        weights = (rope.cos_sin, norm.q, norm.k, kv_scales)
        forms = [None if one is None else (one.shape, one.dtype) for one in weights]
        shapes = (qkv.shape, qkv.stride(), kv_layer.shape, kv_layer.stride(), heads)
        turns = (rope.interleaved, norm.eps, norm.add_one)
        again(
            meta.scratch,
            ("write", meta.group, shapes, qkv.dtype, kv_layer.dtype, turns, *forms),
            (qkv, kv_layer, q, *weights),
            lambda: [write_launch(qkv, kv_layer, meta, heads, (rope, norm, kv_scales), q)],
        )
    return q


def write_launch(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    heads: tuple[int, int, int],
    variant: tuple[Rope, HeadNorm, torch.Tensor | None],
    q_out: torch.Tensor,
) -> Launch:
    num_heads, num_kv_heads, dim = heads
    rope, norm, kv_scales = variant
    if not kv_layer[0].is_contiguous() or qkv.stride(1) != 1:
        raise ValueError("qkv_rope_write needs contiguous rows of qkv and contiguous cache blocks")
    kind = _norm_kind(norm, dim)
    # Batch-invariant: sums of squares are split the same way for any number of tokens.
    num_tokens = 1 if meta.batch_invariant else len(qkv)
    share = pad_power(num_heads, 1) if kind == 2 else write_heads(num_tokens, num_kv_heads)
    shape = Write(
        *(dim, pad_power(dim), num_heads, num_kv_heads, share, kv_layer.shape[3]),
        ROT=0 if rope.cos_sin is None else rope.cos_sin.shape[1],
        IS_INTERLEAVED=rope.interleaved,
        NORM=kind,
        EPS=norm.eps,
        ADD_ONE=norm.add_one,
        IS_FP8=kv_layer.dtype is torch.float8_e4m3fn,
    )
    args = {
        "qkv": qkv,
        "kv": kv_layer,
        "positions": meta.positions,
        "slots": meta.slots,
        "q_out": q_out,
        "cos_sin": rope.cos_sin,
        "q_norm": norm.q,
        "k_norm": norm.k,
        "kv_scales": kv_scales,
        "stride_qkv": qkv.stride(0),
        "stride_block": kv_layer.stride(0),
        "S": shape,
    }
    blocks = -(-num_heads // share) + 2 * -(-num_kv_heads // share)
    return Launch(write_kernel, (len(qkv), blocks), args, write_warps(share * shape.PAD_D), 1)


def _norm_kind(norm: HeadNorm, head_dim: int) -> int:
    """Returns how queries and keys are normalised: 0: not at all; 1: each head by itself, with
    weights [D]; 2: all heads together, with weights [heads * D]."""
    weights = [weight for weight in (norm.q, norm.k) if weight is not None]
    if not weights:
        return 0
    return 1 if weights[0].numel() == head_dim else 2
