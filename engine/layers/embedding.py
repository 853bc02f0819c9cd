"""Token embeddings and the way back to scores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.layers.adapted import Linear
from engine.layers.batch import Embeds


class Embedding:
    """A table of vectors, scaled if the family says so."""

    def __init__(
        self,
        rows: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        multiplier: float = 1.0,
    ) -> None:
        self.rows = rows  # [N] -> a new [N, H]; a tied table belongs to the output layer
        self.dtype = dtype
        # Gemma rounds the factor to the dtype computed with.
        self.multiplier = torch.tensor(multiplier, dtype=dtype).item()

    def __call__(self, input_ids: torch.Tensor, embeds: Embeds | None = None) -> torch.Tensor:
        """input_ids: [N] -> [N, H]; ``embeds`` take the place of their rows, unscaled."""
        x = self.rows(input_ids).to(self.dtype)
        x = x if self.multiplier == 1.0 else x.mul_(self.multiplier)
        if embeds is not None:
            x[embeds.rows] = embeds.values.to(self.dtype)
        return x


class OutputLayer:
    """Scores of the vocabulary: scaled, then capped to cap * tanh(score / cap)."""

    def __init__(self, linear: Linear, multiplier: float = 1.0, softcap: float = 0.0) -> None:
        self.linear = linear
        self.multiplier = multiplier
        self.softcap = softcap

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, H] -> [R, V] float32, in ``out`` if it is given."""
        scores = self.linear(hidden)
        scores = scores.float() if out is None else out.copy_(scores)
        if self.multiplier != 1.0:
            scores.mul_(self.multiplier)
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores
