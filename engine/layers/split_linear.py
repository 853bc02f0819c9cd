"""A linear layer whose outputs are computed by several layers, each with its own kind of weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.layers.interface import Linear
from engine.layers.quantized import SplitWeight, Weight
from kernels.cpu.pointwise import join_columns


class SplitLinear:
    """A CPU layer that joins the outputs of other layers, which have the same inputs."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        """parts: the layers in the order of their outputs."""
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, out]."""
        return join_columns([part(x) for part in self.parts])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [N] of the weight, [N, in]."""
        found, first = None, 0
        for part in self.parts:
            mine = (ids >= first) & (ids < first + part.out_features)
            rows = part.rows(ids[mine] - first)
            if found is None:
                found = rows.new_empty((len(ids), self.in_features))
            found[mine] = rows
            first += part.out_features
        assert found is not None
        return found


def split_linear(
    weight: SplitWeight,
    bias: torch.Tensor | None,
    make: Callable[[Weight, torch.Tensor | None], Linear],
) -> SplitLinear:
    """Make the layer of a split weight and a bias [out]. make: makes the layer of a part."""
    sizes = [part.shape[0] for part in weight.parts]
    biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    return SplitLinear([make(*pair) for pair in zip(weight.parts, biases, strict=True)])
