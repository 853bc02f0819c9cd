"""The interface of linear layers."""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> a new tensor [N, out] of x's dtype."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [N] of the weight, [N, in]: the embeddings of tokens if tied to the head."""
        ...
