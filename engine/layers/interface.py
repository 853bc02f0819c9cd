"""The interface of linear layers."""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in] -> [N, out], a new tensor of x's dtype."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, for an embedding tied to the output layer: [N] -> [N, in]."""
        ...

    def load(self, weight: torch.Tensor) -> None:
        """Put another weight [out, in] in the place of this one; no tensor moves, so recorded
        graphs stay valid. Raises ``ValueError`` for another shape."""
        ...


def check_shape(linear: Linear, weight: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a weight fits."""
    wanted = (linear.out_features, linear.in_features)
    if tuple(weight.shape) != wanted:
        raise ValueError(f"a weight of shape {list(weight.shape)}, must be {list(wanted)}")
