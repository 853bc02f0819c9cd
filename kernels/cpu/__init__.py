"""CPU implementations: compiled loops for contiguous float32 and bfloat16 tensors, the torch
reference for all others.

Same signatures as :mod:`kernels.reference`. Float32 tokens may use a bfloat16 KV cache. Bfloat16 is
computed in float32 and rounded once, when it is stored; the reference, like transformers' modules,
also rounds between operations and is less exact.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.cpu import attention, cells, pointwise, rope
from kernels.meta import AttentionMeta


def _is_plain(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """True if compiled loops can read these tensors: contiguous, and of one supported dtype."""
    return first.dtype in cells.DTYPES and all(
        t is None or (t.dtype is first.dtype and t.is_contiguous()) for t in (first, *others)
    )


def _is_float32(tensor: torch.Tensor | None) -> bool:
    return tensor is None or (tensor.dtype is torch.float32 and tensor.is_contiguous())


def _is_cache(kv_layer: torch.Tensor, tokens: torch.Tensor) -> bool:
    """True if compiled loops support this KV cache: of the tokens' dtype, or bfloat16."""
    is_read = kv_layer.dtype is tokens.dtype or kv_layer.dtype is torch.bfloat16
    return is_read and kv_layer.dtype in cells.DTYPES and kv_layer.is_contiguous()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add_one: bool = False
) -> torch.Tensor:
    if _is_plain(x, weight):
        return pointwise.rms_norm(x, weight, eps, add_one)
    return reference.rms_norm(x, weight, eps, add_one=add_one)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    add_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_plain(x, residual, weight):
        return pointwise.add_rms_norm(x, residual, weight, eps, add_one)
    return reference.add_rms_norm(x, residual, weight, eps, add_one=add_one)


def act_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    if act in pointwise.ACTS and gate_up.dim() == 2 and _is_plain(gate_up):
        return pointwise.act_mul(gate_up, act)
    return reference.act_mul(gate_up, act)


def qkv_rope_write(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    heads: tuple[int, int, int],
    rope_: reference.Rope,
    norm: reference.HeadNorm,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    has_loops = kv_scales is None and _is_cache(kv_layer, qkv) and _is_float32(rope_.cos_sin)
    if has_loops and _is_plain(qkv, norm.q, norm.k):
        return rope.qkv_rope_write(qkv, kv_layer, meta, heads, rope_, norm)
    return reference.qkv_rope_write(qkv, kv_layer, meta, heads, rope_, norm, kv_scales)


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: reference.AttentionOptions,
) -> torch.Tensor:
    is_known = variant.alibi is None and variant.kv_scales is None
    if is_known and _is_plain(q) and _is_cache(kv_layer, q):
        if variant.sinks is not None and not _is_float32(variant.sinks):
            variant = variant._replace(sinks=variant.sinks.float().contiguous())
        return attention.paged_attention(q, kv_layer, meta, variant)
    return reference.paged_attention(q, kv_layer, meta, variant)
