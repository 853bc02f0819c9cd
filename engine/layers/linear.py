"""Linear layers that own the only copy of their weights, in the form fastest on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in] -> [N, out], a new tensor of x's dtype."""
        ...


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantization: str | None = None,
    device: torch.device | str = "cpu",
    keep_plain: bool = False,
) -> Linear:
    """Take over `weight` [out, in] and `bias` [out]; the caller drops its own references.

    quantization: None, or "int8" (weights per channel, activations per token at run time; CPU).
    keep_plain: `weight` stays readable, for an embedding table that is also the output layer.
    """
    return PlainLinear(weight.to(device), None if bias is None else bias.to(device))


class PlainLinear:
    """torch's own product on the weights as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
