"""The forward pass of encoders: BERT and its relatives.

All layers share one layer of the paged KV cache: each writes its keys and values there, and reads
them before the next layer overwrites them. So a sequence is computed in one step, and its blocks
are never those of another sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import kernels
from engine.kv.layout import LayerCache
from engine.layers.batch import Embeds, ForwardBatch, Hidden
from engine.layers.interface import Linear, Mixer
from engine.models.model import LayerCaches
from kernels.meta import LayerMeta


class LayerNorm(NamedTuple):
    """A layer norm; weight and bias [H] are float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, [N, H]."""
        return kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum itself, both [N, H]."""
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class EncoderMLP:
    """down(act(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        then = getattr(self.up, "then", None)  # product and activation in one pass
        if then is not None:
            return self.down(then(x, self.activation))
        return self.down(kernels.activate(self.up(x), self.activation))


class TextEmbedding:
    """The normalised sum of a token's embedding, its position's and its type's."""

    def __init__(
        self,
        words: Callable[[torch.Tensor], torch.Tensor],
        tables: tuple[torch.Tensor | None, torch.Tensor | None],
        first_position: int,
        norm: LayerNorm,
        dtype: torch.dtype,
    ) -> None:
        """words: rows of the token table by id; tables: of positions [P, H] and of types [T, H];
        first_position: the row of a text's first token."""
        self.words = words
        self.positions, self.types = tables
        self.first_position = first_position
        self.norm = norm
        self.dtype = dtype

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None = None,
        embeds: Embeds | None = None,
    ) -> torch.Tensor:
        """Vectors [N, H] of the tokens input_ids [N] at positions [N]. types: [N], None: all 0."""
        x = self.words(input_ids).to(self.dtype)
        if embeds is not None:
            x[embeds.rows] = embeds.values.to(self.dtype)
        added = None
        if self.positions is not None:
            added = self.positions[positions + self.first_position]
        if self.types is not None:
            kinds = self.types[0] if types is None else self.types[types]
            added = kinds.expand_as(x) if added is None else added + kinds
        return self.norm(x, None if added is None else added.contiguous())


class EncoderLayer:
    """One encoder layer: attention, then an MLP. attention_norm: ``None`` if the input is already
    normalised."""

    def __init__(
        self,
        attention: Mixer,
        attention_norm: LayerNorm | None,
        mlp: Callable[[torch.Tensor], torch.Tensor],
        mlp_norm: LayerNorm,
    ) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: LayerMeta, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layer. x [N, H]: output of the layer before, not yet added to the residual.
        Returns the new x and residual."""
        raise NotImplementedError


class SumThenNorm(EncoderLayer):
    """A layer whose norms are applied to the sums of sublayers' outputs and their inputs. It has no
    residual."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: LayerMeta, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.attention_norm is not None
        x = self.attention_norm(self.attention(x, meta, cache), x)
        return self.mlp_norm(self.mlp(x), x), None


class NormThenSum(EncoderLayer):
    """A layer whose norms are applied to the inputs of sublayers."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: LayerMeta, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.attention_norm is None:
            residual = x
        else:
            assert residual is not None
            x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, meta, cache), residual)
        return self.mlp(x), residual


class NativeEncoder:
    """An encoder over a paged KV cache of one layer; see ``engine.models.model.Model``."""

    has_own_products = True
    is_causal = False
    can_be_recorded = False
    has_largest = False

    def __init__(
        self,
        embedding: TextEmbedding,
        layers: Sequence[EncoderLayer],
        final_norm: LayerNorm | None,
        cache_spec: tuple[LayerCache, ...],
        vocab_size: int,
    ) -> None:
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.cache_spec = cache_spec
        self.vocab_size = vocab_size
        self.dtype = embedding.dtype

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: LayerCaches) -> Hidden:
        """Compute hidden states of the wanted tokens [R, H] (``None``: all N) after the last
        layer."""
        x = self.embedding(batch.input_ids, batch.positions, batch.token_types, batch.embeds)
        residual: torch.Tensor | None = None
        for layer, meta, cache in zip(self.layers, batch.attn, kv, strict=True):
            x, residual = layer(x, residual, meta, cache)
        if self.final_norm is not None:
            x = self.final_norm(x, residual)
        return Hidden(x if batch.wanted is None else x[batch.wanted.rows])

    def lower_layers(self, batch: ForwardBatch, kv: LayerCaches) -> torch.Tensor:
        raise NotImplementedError("encoders are not recorded")

    def last_layer(
        self, stream: torch.Tensor, batch: ForwardBatch, kv: LayerCaches
    ) -> torch.Tensor:
        raise NotImplementedError("encoders are not recorded")

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError("encoders have no output layer, so they generate no tokens")
