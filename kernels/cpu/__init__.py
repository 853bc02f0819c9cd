"""Bodies for the CPU: compiled loops for contiguous float32, else the reference's torch.

Same signatures as :mod:`kernels.reference`. A KV cache may be bfloat16 beside float32 tokens.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.cpu import attention, cells, logits, matmul, pointwise, rope, sampling, slots
from kernels.meta import AttentionMeta

_COMPILED_ACTS = ("silu", "gelu_tanh")


def prepare() -> None:
    """Load what every float32 decoder needs; for a thread, while the weights are read.

    The first operation of a process would pay for it otherwise: most of a second, Numba's own.
    """
    for kernel in (
        *(matmul.PACKED, rope.QKV[4], pointwise.NORM, pointwise.ACT_MUL, sampling.CHOOSE),
        *(slots.PREPARE, slots.ADVANCE, slots.GROW),
    ):
        kernel.prepare()
    logits.prepare()


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether compiled loops can read these by address."""
    return all(t is None or (t.dtype is torch.float32 and t.is_contiguous()) for t in tensors)


def _is_cache(kv_layer: torch.Tensor) -> bool:
    return kv_layer.dtype in cells.DTYPES and kv_layer.is_contiguous()


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
    if act in _COMPILED_ACTS and gate_up.dim() == 2 and _is_plain(gate_up):
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
    has_loops = kv_scales is None and _is_cache(kv_layer)
    if has_loops and _is_plain(qkv, rope_.cos_sin, norm.q, norm.k):
        return rope.qkv_rope_write(qkv, kv_layer, meta, heads, rope_, norm)
    return reference.qkv_rope_write(qkv, kv_layer, meta, heads, rope_, norm, kv_scales)


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: reference.Variant
) -> torch.Tensor:
    has_loops = variant.alibi is None and variant.kv_scales is None and _is_cache(kv_layer)
    if has_loops and _is_plain(q, variant.sinks):
        return attention.paged_attention(q, kv_layer, meta, variant)
    return reference.paged_attention(q, kv_layer, meta, variant)
