"""Specs that describe an encoder's architecture for the forward pass. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.layers.rope import RopeSpec
from engine.models.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class EncoderLayerSpec:
    """The properties of an encoder layer in which it may differ from other layers."""

    rope: RopeSpec | None = None
    """``None``: queries and keys are not rotated."""
    window: int = 0
    """A token attends to tokens at distances below this, before and after it; 0: to all."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """What is added to a token's embedding before the first norm."""

    num_positions: int = 0
    """Rows of the table of position embeddings; 0: there is no such table."""
    first_position: int = 0
    """The row of a text's first token."""
    num_types: int = 0
    """Rows of the table of token types; 0: there is no such table."""


@dataclass(frozen=True, kw_only=True)
class RelativeSpec:
    """MPNet's relative positions: a bias on attention scores by head and distance, which all layers
    share."""

    num_buckets: int
    """Rows of the table of biases; adjacent large distances share one."""
    max_distance: int = 128
    """All distances from this on share one row."""


@dataclass(frozen=True, kw_only=True)
class EncoderMLPSpec:
    """An MLP: down(act(up(x))), or down(act(gate(x)) * up(x)) if it is gated."""

    intermediate_size: int
    activation: str
    """Name of the activation function: gelu, gelu_tanh, silu or relu; with a gate not relu."""
    is_gated: bool = False
    up_bias: bool = True
    down_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class EncoderNormSpec:
    """The layer norms, which have weights and perhaps biases."""

    eps: float
    has_bias: bool = True
    comes_first: bool = False
    """True if norms are applied to the inputs of attention and MLP, with a final norm after the
    last layer; the first layer's attention then has none, as the embeddings are normalised. False
    if they are applied to the sum of their outputs and the residual stream."""


@dataclass(frozen=True, kw_only=True)
class EncoderNames:
    """Names of modules in one form of a checkpoint. Names of a layer's modules come after
    ``layer`` and the layer's number."""

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer."
    qkv: tuple[str, ...]
    """One module, or those of queries, keys and values."""
    out: str
    attention_norm: str
    up: tuple[str, ...]
    """One module, of up or of gate and up in this order, or those of gate and up."""
    is_up_first: bool = False
    """True if the single module of gate and up stores up first."""
    down: str
    mlp_norm: str
    final_norm: str = ""
    relative: str = ""


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Architecture of an encoder whose tokens attend to earlier and to later tokens."""

    vocab_size: int
    hidden_size: int
    attention: AttentionSpec
    mlp: EncoderMLPSpec
    norm: EncoderNormSpec
    layers: tuple[EncoderLayerSpec, ...]
    names: tuple[EncoderNames, ...]
    """The forms that a checkpoint may have."""
    roots: tuple[str, ...] = ("",)
    """Prefixes of all names, of which a checkpoint has one: that of an encoder alone, or with a
    head."""
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    relative: RelativeSpec | None = None
