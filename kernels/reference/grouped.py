"""Mixtures of experts: products in which each row selects its matrices."""

from __future__ import annotations

import torch

from kernels.quantized import Packed, unpack
from kernels.reference.pointwise import act_mul, wide
from kernels.reference.quant import dequantize

Experts = torch.Tensor | Packed
"""The matrices of all experts, [E, out, in]: plain, or packed and stacked by
`kernels.quantized.stack`."""


def mixture(
    x: torch.Tensor,
    gate_up: Experts,
    down: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    act: str,
) -> torch.Tensor:
    """Weighted sum of the outputs of each token's experts: x [N, H] -> [N, H].

    gate_up [E, 2F, H], down [E, H, F]; chosen [N, k] int32: expert ids, -1: none; weights [N, k]
    float32. The sum over k is computed in float32, in order.
    """
    rows = []
    for token, experts, factors in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(wide(token))
        for expert, factor in zip(experts, factors, strict=True):
            if expert >= 0:
                hidden = (_expert(gate_up, expert, x) @ wide(token)).to(x.dtype)
                inner = act_mul(hidden[None], act)[0]
                part = _expert(down, expert, x) @ wide(inner) * factor.to(total.dtype)
                total += part.to(x.dtype).to(total.dtype)
        rows.append(total.to(x.dtype))
    return torch.stack(rows) if rows else torch.empty_like(x)


def _expert(experts: Experts, index: int, x: torch.Tensor) -> torch.Tensor:
    """The matrix of expert ``index``, dequantised if it is packed, in the dtype that x is computed
    in."""
    if isinstance(experts, Packed):
        return dequantize(unpack(experts.at(index)), torch.float32).to(wide(x).dtype)
    return wide(experts[index])
