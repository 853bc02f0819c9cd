"""The interfaces of linear layers and mixers."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.layers.batch import Wanted


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


class Mixer(Protocol):
    """The sublayer of a decoder layer that relates the tokens of a sequence, such as attention."""

    def __call__(
        self, x: torch.Tensor, meta: Any, cache: Any, wanted: Wanted | None = None, /
    ) -> torch.Tensor:
        """Compute the sublayer: x [N, H] -> [N, H], or [R, H] for the R tokens in ``wanted``.

        meta: an ``AttentionMeta`` or a ``StateMeta``, as the mixer needs; cache: what the layer
        keeps between steps, which is updated for all N tokens."""
        ...
