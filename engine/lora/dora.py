"""What an adapter does to the outputs of a linear layer after it has added a product: DoRA scales
them, and biases are added."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.interface import Linear
from engine.lora.placing import Slice

ROWS = 256  # of the base's weight that are unpacked at once


def output_changes(
    one: Slice, linear: Linear, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor | None, Tensor | None]:
    """Factors and addends of outputs, each [outputs] float32 on the CPU, or ``None``:

    y * factors + addends + factors * scale * (x @ a.T) @ b.T

    are the outputs with the adapter where y are those of the base. linear: the base, of which some
    rows are unpacked at a time; dtype, device: of its inputs."""
    added = None if one.bias is None else one.bias.float()
    if one.magnitude is None:
        return None, added
    norms = torch.cat([_norms(one, linear, at, device) for at in range(0, len(one.b), ROWS)])
    factors = one.magnitude.float() / norms
    bias = linear(torch.zeros((1, linear.in_features), dtype=dtype, device=device))[0]
    bias = bias[one.first : one.first + len(one.b)].float().cpu()
    if bias.any():  # DoRA does not scale the bias
        unscaled = bias * (1 - factors)
        added = unscaled if added is None else added + unscaled
    return factors, added


def _norms(one: Slice, linear: Linear, begin: int, device: torch.device | str) -> Tensor:
    """Norms of changed rows, from ``begin`` on."""
    b = one.b[begin : begin + ROWS].float()
    first = one.first + begin
    rows = linear.rows(torch.arange(first, first + len(b), device=device))
    changed = torch.addmm(rows.float().cpu(), b, one.a.float(), alpha=one.scale)
    norms: Tensor = torch.linalg.vector_norm(changed, dim=1)
    return norms
