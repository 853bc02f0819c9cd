"""Mixtures of experts in plain torch: each token is multiplied by the matrices of its experts."""

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

    gate_up [E, 2F, H], down [E, H, F]: matrices of the E experts. chosen [N, k] int32: ids of each
    token's experts, -1: none; weights [N, k] float32. Outputs are added in float32, in order of k.
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
    """Returns the matrix of expert ``index``, dequantised if it is packed: float64 if x is float64,
    otherwise float32."""
    if isinstance(experts, Packed):
        return dequantize(unpack(experts.at(index)), torch.float32).to(wide(x).dtype)
    return wide(experts[index])
