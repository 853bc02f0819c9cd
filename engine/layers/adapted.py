"""The interface of linear layers, and the layer that adapters add to."""

from __future__ import annotations

from typing import Protocol

import torch


class AdapterState(Protocol):
    """What adapters add to the output of one linear layer."""

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y += what the adapter of each row makes of x, in place. y: [N, out]; x: [N, in].

        Rows are those of the step, or those that the last layer was asked for.
        """
        ...


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

    def with_adapters(self, state: AdapterState) -> Linear:
        """This layer, and what adapters add to it."""
        ...


class Adaptable:
    """What every linear layer can do with adapters."""

    in_features: int
    out_features: int

    def with_adapters(self: Linear, state: AdapterState) -> Linear:
        return AdaptedLinear(self, state)

    def check_shape(self, weight: torch.Tensor) -> None:
        """Raise ``ValueError`` unless a weight fits."""
        wanted = (self.out_features, self.in_features)
        if tuple(weight.shape) != wanted:
            raise ValueError(f"a weight of shape {list(weight.shape)}, must be {list(wanted)}")


class AdaptedLinear(Adaptable):
    """A linear layer with what adapters add to it."""

    def __init__(self, base: Linear, state: AdapterState) -> None:
        self.base = base
        self.state = state
        self.out_features, self.in_features = base.out_features, base.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        self.state.add(y, x)
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.base.rows(ids)

    def load(self, weight: torch.Tensor) -> None:
        self.base.load(weight)
