"""The worker's interface to a model, native or of transformers."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.kv.layout import LayerCache
from engine.layers.batch import ForwardBatch, Hidden

LayerCaches = list[Any]
"""What each layer keeps: a tensor of keys and values, or a tuple of state tensors."""


class Model(Protocol):
    """A decoder or an encoder over a paged KV cache. N tokens, R wanted tokens, H hidden size, V
    vocabulary."""

    cache_spec: tuple[LayerCache, ...]
    """The KV cache of each layer, in forward order."""
    vocab_size: int
    dtype: torch.dtype
    """Dtype of activations."""
    has_own_products: bool
    """True if its large CPU products use our compiled kernels and not torch's."""
    is_causal: bool
    """False if tokens attend to later ones, too. Then a sequence is computed in one step, and
    shares no blocks."""

    @property
    def can_be_recorded(self) -> bool:
        """True if decode steps always launch the same kernels and never wait for the device."""
        ...

    def forward(self, batch: ForwardBatch, kv: LayerCaches) -> Hidden:
        """Compute hidden states [R, H] of the tokens ``batch.wanted`` (``None``: all N) after the
        final norm, and the outputs [N, H] of the layers ``batch.aux_layers``. Writes K and V of all
        tokens to ``kv``.

        kv: one tensor per layer, [num_blocks, 2, num_kv_heads, block_size, head_dim], of ``dtype``
        or of a smaller type that the kernels support. For a layer with a recurrent state, a tuple
        of its state tensors, [rows, ...].
        """
        ...

    def lower_layers(self, batch: ForwardBatch, kv: LayerCaches) -> torch.Tensor:
        """Compute the residual stream [N, H] before the last layer, for models that can be
        recorded."""
        ...

    def last_layer(
        self, stream: torch.Tensor, batch: ForwardBatch, kv: LayerCaches
    ) -> torch.Tensor:
        """Compute hidden states [R, H] from the output of ``lower_layers``."""
        ...

    @property
    def has_largest(self) -> bool:
        """True if ``largest`` can return tokens."""
        ...

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The token with the largest logit of each row [R] int32, computed without storing logits;
        -1 for rows whose logits are invalid (NaN or infinite). ``None`` if the model does not
        support it."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] float32 of hidden states [R, H]. out: where to write them, if the model can
        be recorded. Raises ``NotImplementedError`` for an encoder."""
        ...
