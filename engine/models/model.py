"""What the worker may ask of a model, native or of transformers."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kv.layout import KVSpec
from engine.layers.batch import ForwardBatch, Hidden


class Model(Protocol):
    """A decoder over a paged KV cache. N tokens, H hidden size, V vocabulary."""

    kv_spec: KVSpec
    """What each layer keeps per token."""
    vocab_size: int
    dtype: torch.dtype
    """Type of activations."""
    has_own_products: bool
    """Whether its large products on the CPU are those of the compiled kernels, not torch's."""

    @property
    def can_be_recorded(self) -> bool:
        """Whether a pass of single tokens launches the same work each time and waits for none."""
        ...

    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> Hidden:
        """Hidden states [R, H] of ``batch.wanted`` (all N if None) after the final norm, and what
        ``batch.aux_layers`` put out [N, H].

        Writes K and V of all tokens.

        kv: one tensor a layer, [num_blocks, 2, num_kv_heads, block_size, head_dim], of
        ``dtype`` or of half its size where kernels read that.
        """
        ...

    def lower_layers(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """The residual stream [N, H] below the last layer, if the model can be recorded: what
        ``forward`` does the same way whichever tokens are wanted."""
        ...

    def last_layer(
        self, stream: torch.Tensor, batch: ForwardBatch, kv: list[torch.Tensor]
    ) -> torch.Tensor:
        """``forward(batch, kv).last`` of what ``lower_layers`` returned."""
        ...

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The token with the largest score of each row [R] int32, found without storing the scores;
        -1 where ``logits`` would not be sound. ``None`` if the model cannot do that."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, H] rows of what ``forward`` returned -> scores [R, V] in float32.

        out: where to put them, if the model can be recorded.
        """
        ...
