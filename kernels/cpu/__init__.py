"""CPU implementations: compiled loops for contiguous float32 and bfloat16 tensors, the torch
reference for all others.

Same signatures as :mod:`kernels.reference`. The KV cache may have fewer bits than tokens. Bfloat16
is computed in float32 and rounded once, when it is stored; the reference, like transformers'
modules, also rounds between operations and is less exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.cpu import (
    activation,
    attention,
    cells,
    delta_rule,
    layer_norms,
    low_rank,
    pointwise,
    rope,
    selective_scan,
)
from kernels.cpu import causal_conv as convolution
from kernels.cpu.state_cells import STATE_TYPES
from kernels.low_rank import AdaptedRows, ProductTable
from kernels.meta import AttentionMeta, StateMeta
from kernels.reference.causal_conv import ACTIVATIONS
from kernels.reference.selective_scan import ChannelScan, HeadScan


def _is_plain(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """True if compiled loops can read these tensors: contiguous, and of one supported dtype."""
    return first.dtype in cells.DTYPES and all(
        t is None or (t.dtype is first.dtype and t.is_contiguous()) for t in (first, *others)
    )


def _is_float32(tensor: torch.Tensor | None) -> bool:
    return tensor is None or (tensor.dtype is torch.float32 and tensor.is_contiguous())


def _is_cache(
    kv_layer: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None = None
) -> bool:
    """True if compiled loops support this KV cache: of the tokens' dtype, bfloat16 or 8 bits.
    scales: of keys and values, which only 8-bit floats have."""
    dtype = kv_layer.dtype
    is_read = dtype in (tokens.dtype, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    is_scaled = scales is None or (dtype is torch.float8_e4m3fn and _is_float32(scales))
    return is_read and is_scaled and kv_layer.is_contiguous()


def _has_rows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if a matrix has this dtype and contiguous rows, which may lie apart."""
    return tensor.dtype is dtype and tensor.dim() == 2 and tensor.stride(1) == 1


def _have_rows(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """True if compiled loops can read the rows of these matrices, which may lie apart."""
    dtype = first.dtype
    return dtype in cells.DTYPES and all(_has_rows(tensor, dtype) for tensor in (first, *others))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add_one: bool = False
) -> torch.Tensor:
    if _is_plain(x, weight):
        return pointwise.rms_norm(x, weight, eps, add_one)
    return reference.rms_norm(x, weight, eps, add_one=add_one)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if _is_plain(x, residual) and x.dim() == 2 and all(map(_is_float32, (weight, bias))):
        return layer_norms.layer_norm((x, residual), weight, bias, eps)
    return reference.layer_norm(x, weight, bias, eps, residual)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_plain(x, residual) and x.dim() == 2 and all(map(_is_float32, (weight, bias))):
        total = torch.empty_like(x)
        return layer_norms.layer_norm((x, residual), weight, bias, eps, total), total
    return reference.add_layer_norm(x, residual, weight, bias, eps)


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    if act in activation.CODES and _is_plain(x):
        return activation.activate(x, act)
    return reference.activate(x, act)


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


def join_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return pointwise.join_columns(parts) if _have_rows(*parts) else torch.cat(list(parts), 1)


def scale_in_place(x: torch.Tensor, factor: float) -> torch.Tensor:
    return pointwise.scale_in_place(x, factor) if _is_plain(x) else x.mul_(factor)


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return pointwise.add_in_place(x, y) if _is_plain(x, y) else x.add_(y)


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, table: ProductTable, rows: AdaptedRows
) -> torch.Tensor:
    """``y`` must be contiguous, float32 or of x's dtype."""
    if _is_plain(x) and y.is_contiguous() and y.dtype in (x.dtype, torch.float32):
        return low_rank.add_low_rank(y, x, table, rows)
    return reference.add_low_rank(y, x, table, rows)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return pointwise.relu_squared(x) if _is_plain(x) else reference.relu_squared(x)


def apply_gate(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    if _have_rows(x, gate):
        return pointwise.apply_gate(x, gate, activation)
    return reference.apply_gate(x, gate, activation)


def grouped_gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group: int,
    norm_first: bool = False,
) -> torch.Tensor:
    if _have_rows(x, gate) and (weight is None or _is_plain(weight, x[0])):
        return pointwise.grouped_gated_norm(x, gate, weight, eps, (group, norm_first))
    return reference.grouped_gated_norm(x, gate, weight, eps, group=group, norm_first=norm_first)


def qkv_rope_write(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    heads: tuple[int, int, int],
    rope_: reference.Rope,
    norm: reference.HeadNorm,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    has_loops = _is_cache(kv_layer, qkv, kv_scales) and _is_float32(rope_.cos_sin)
    if has_loops and _is_plain(qkv, norm.q, norm.k):
        return rope.qkv_rope_write(qkv, kv_layer, meta, heads, rope_, norm, kv_scales)
    return reference.qkv_rope_write(qkv, kv_layer, meta, heads, rope_, norm, kv_scales)


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: reference.AttentionOptions,
) -> torch.Tensor:
    has_loops = variant.alibi is None and _is_float32(variant.distances)
    if variant.distances is not None:  # of heads with keys of their own, without a cap
        has_loops &= q.shape[1] == kv_layer.shape[2] and not variant.softcap
    if has_loops and _is_plain(q) and _is_cache(kv_layer, q, variant.kv_scales):
        if variant.sinks is not None and not _is_float32(variant.sinks):
            variant = variant._replace(sinks=variant.sinks.float().contiguous())
        return attention.paged_attention(q, kv_layer, meta, variant)
    return reference.paged_attention(q, kv_layer, meta, variant)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    has_loops = _have_rows(x) and state.dtype is x.dtype and _is_plain(weight, state, bias)
    if has_loops and activation in ACTIVATIONS:
        return convolution.causal_conv(x, weight, bias, activation, state, meta)
    return reference.causal_conv(x, weight, bias, activation, state, meta)


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    has_loops = state.dtype in STATE_TYPES and state.is_contiguous()
    if has_loops and _is_plain(qkv, gates) and all(map(_is_float32, (rate, bias))):
        return delta_rule.gated_delta_rule(qkv, gates, rate, bias, state, meta)
    return reference.gated_delta_rule(qkv, gates, rate, bias, state, meta)


def head_scan(
    xbc: torch.Tensor, dt: torch.Tensor, layer: HeadScan, state: torch.Tensor, meta: StateMeta
) -> torch.Tensor:
    if _have_rows(xbc, dt) and selective_scan.supports_heads(state):
        return selective_scan.head_scan(xbc, dt, layer, state, meta)
    return reference.head_scan(xbc, dt, layer, state, meta)


def channel_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    bc: torch.Tensor,
    gate: torch.Tensor,
    layer: ChannelScan,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    if _have_rows(x, dt, bc, gate) and selective_scan.supports_channels(state):
        return selective_scan.channel_scan(x, dt, bc, gate, layer, state, meta)
    return reference.channel_scan(x, dt, bc, gate, layer, state, meta)
