"""What makes one decoder differ from another: everything the forward pass has to know. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.layers.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention, the same in every layer but for its window and positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores before the softmax."""
    softcap: float = 0.0
    """Scores become cap * tanh(score / cap); 0 leaves them."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMS norm of queries and keys: of each head, or of all heads together."""

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str
    """silu, gelu or gelu_tanh."""
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of gated MLPs; each token takes the best ``top_k`` by softmax score."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    """Scale a token's chosen scores to sum to one."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """RMS norms, and what a checkpoint calls them; ``None`` where a family has no norm.

    x + attention_out(attention(attention_in(x)));  x + mlp_out(mlp(mlp_in(x)))
    """

    eps: float
    add_one: bool = False
    """Stored weights are offsets from one."""
    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer."""

    rope: RopeSpec | None
    """``None``: positions are left out."""
    window: int = 0
    """Keys a query sees, itself included; 0 for all before it."""
    is_moe: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One decoder-only language model."""

    vocab_size: int
    hidden_size: int
    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    moe: MoESpec | None = None
    tied: bool = False
    """The output layer is the embedding table."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
