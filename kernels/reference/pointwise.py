"""Norms and gated activations."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of arithmetic: float64 stays, others become float32."""
    return x if x.dtype is torch.float64 else x.float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add_one: bool = False
) -> torch.Tensor:
    """RMS norm over the last axis: x [..., H], weight [H]. Llama rounds to x's dtype before the
    weight is applied, Gemma (add_one) afterwards."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if add_one:
        return (y * (1 + wide(weight))).to(x.dtype)
    return y.to(x.dtype) * weight.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    add_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual [N, H], and the sum itself. The sum is rounded to x's dtype before
    it is normalised."""
    total = x + residual
    return rms_norm(total, weight, eps, add_one=add_one), total


def act_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """Gated activation act(first half) * second half: gate_up [N, 2F] -> [N, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if act == "silu":
        return F.silu(gate) * up
    if act == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if act == "gelu":
        return F.gelu(gate) * up
    raise ValueError(f"activation {act!r} is unknown; use 'silu', 'gelu_tanh' or 'gelu'")


def apply_gate(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """x * activation(gate), [N, F]; see `kernels.ops.apply_gate`."""
    factor = wide(gate).sigmoid() if activation == "sigmoid" else wide(gate)
    return (wide(x) * factor).to(x.dtype)


def grouped_gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group: int,
    norm_first: bool = False,
) -> torch.Tensor:
    """RMS norm of each `group` columns of x * silu(gate), [N, H]; see
    `kernels.ops.grouped_gated_norm`."""
    y, opened = wide(x), F.silu(wide(gate))
    if not norm_first:
        y = y * opened
    if weight is not None:
        parts = y.unflatten(-1, (-1, group))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
        y = parts.flatten(-2) * wide(weight)
    return (y * opened if norm_first else y).to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layer norm of x, or of x + residual, over the last axis, rounded once."""
    y = wide(x) if residual is None else wide(x) + wide(residual)
    shift = None if bias is None else bias.to(y.dtype)
    return F.layer_norm(y, y.shape[-1:], weight.to(y.dtype), shift, eps).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm of x + residual [N, H], and the sum itself, which is rounded to x's dtype before
    it is normalised."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """act(x) of x [N, F]; act: "silu", "gelu_tanh", "gelu" or "relu"."""
    y = wide(x)
    if act == "silu":
        y = F.silu(y)
    elif act == "gelu_tanh":
        y = F.gelu(y, approximate="tanh")
    elif act == "gelu":
        y = F.gelu(y)
    elif act == "relu":
        y = F.relu(y)
    else:
        raise ValueError(
            f"activation {act!r} is unknown; use 'silu', 'gelu_tanh', 'gelu' or 'relu'"
        )
    return y.to(x.dtype)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) ** 2 of x [N, F]."""
    return F.relu(x).square()
