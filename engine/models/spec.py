"""Specs that describe a decoder's architecture for the forward pass. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.layers.rope import RopeSpec

MixerKind = Literal["attention", "short_conv", "gated_delta", "mamba"]
"""How a layer relates the tokens of a sequence."""


class StateShape(NamedTuple):
    """One tensor of the recurrent state that a mixer keeps for each sequence."""

    shape: tuple[int, ...]
    is_float32: bool = False  # otherwise it has the dtype of activations


class Factor(NamedTuple):
    """A factor on some outputs of a linear layer, which is multiplied into its weights."""

    num_rows: int
    of_weight: float
    of_bias: float


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of all layers; windows and rotary embeddings are in ``DecoderLayerSpec``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores before the softmax."""
    softcap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: unchanged."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMS norm of queries and keys: of each head, or of all heads together."""
    has_gate: bool = False
    """The query projection has a gate next to each query head, whose sigmoid multiplies the head's
    output."""

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A gated MLP: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str
    """Name of the activation function: silu, gelu or gelu_tanh; relu2 if there is no gate."""
    bias: bool = False
    is_gated: bool = True
    """False: the MLP is down(act(up(x)))."""


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """The gated short convolution of LFM2."""

    width: int
    """Number of channels."""
    taps: int
    """Number of inputs that are summed, the current one included."""
    bias: bool = False
    """The convolution and both projections have biases."""

    @property
    def state(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution."""
        return (StateShape((self.taps - 1, self.width)),)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """The gated delta rule of Qwen3-Next, after a convolution of queries, keys and values."""

    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``: adjacent value heads share a key head."""
    key_dim: int
    """Size of a key head."""
    value_dim: int
    taps: int
    """Number of inputs that the convolution sums, the current one included."""

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and a matrix for each value head."""
        matrices = self.value_heads, self.key_dim, self.value_dim
        return StateShape((self.taps - 1, self.conv_width)), StateShape(matrices, True)


@dataclass(frozen=True, kw_only=True)
class HeadMambaSpec:
    """Mamba-2, whose selective scan is by heads."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    """Groups of heads, which share b and c."""
    taps: int
    conv_bias: bool
    bias: bool
    """The input projection has a bias."""
    out_bias: bool
    """The output projection has a bias."""
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Limits of the time steps of all tokens. transformers applies them to whole sequences, but not
    to steps of one token with a cache."""
    has_norm: bool = True
    norm_group: int = 0
    """Columns that are normalised together; 0: all of a group of heads."""
    norm_first: bool = False
    """The output is normalised before it is multiplied by the gate."""

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: x of all heads, b and c of all groups."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the state of the scan."""
        scan = self.num_heads, self.state_size, self.head_dim
        return StateShape((self.taps - 1, self.conv_width)), StateShape(scan, True)


@dataclass(frozen=True, kw_only=True)
class ChannelMambaSpec:
    """Mamba-1, whose selective scan is by channels."""

    width: int
    """Number of channels."""
    state_size: int
    rank: int
    """Inputs of the projection to the time steps of all channels."""
    taps: int
    conv_bias: bool
    bias: bool
    """The projections have biases."""
    norms: Literal["none", "stored", "plain"] = "none"
    """RMS norms of time steps, b and c: with stored weights, or without weights."""
    norm_eps: float = 1e-6

    @property
    def conv_width(self) -> int:
        """Channels of the convolution."""
        return self.width

    @property
    def out_bias(self) -> bool:
        """The output projection has a bias."""
        return self.bias

    @property
    def state(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the state of the scan."""
        scan = self.state_size, self.width
        return StateShape((self.taps - 1, self.conv_width)), StateShape(scan, True)


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of gated MLPs; each token uses the ``top_k`` experts with the largest scores."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    """Scale the scores of a token's chosen experts to sum to one."""
    renormalize_eps: float = 0.0
    """Added to that sum."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """The function from the router's outputs to scores."""
    has_bias: bool = False
    """A stored bias is added to the scores when experts are chosen, but not to their weights."""
    scale: float = 1.0
    """Factor on the weights of the chosen experts."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which all tokens use; 0: no shared expert."""
    shared_is_gated: bool = True
    """The sigmoid of a gate multiplies the output of the shared expert."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """RMS norms of a layer, by their names in a checkpoint; ``None``: the family lacks this norm.

    A layer is x + attention_out(attention(attention_in(x))), then x + mlp_out(mlp(mlp_in(x))).
    """

    eps: float
    add_one: bool = False
    """Stored weights are differences from one."""
    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None
    final: str = "norm"


@dataclass(frozen=True, kw_only=True)
class NameSpec:
    """Names of modules in a checkpoint that differ between families."""

    prefix: str = "model."
    """Prefix of all names except that of the output layer."""
    attention_out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    """The module with both gate and up projections, in checkpoints that fuse them."""
    down: str = "down_proj"
    attention: str = "self_attn"
    mamba: str = "mamba"
    embedding: str = "embed_tokens"
    roots: tuple[str, ...] = ("model",)
    """First part of all names except that of the output layer; a checkpoint uses one of these."""
    heads: tuple[str, ...] = ("lm_head",)
    """Modules of the output layer; a checkpoint has one of these."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayerSpec:
    """The properties of a decoder layer in which it may differ from other layers."""

    rope: RopeSpec | None
    """``None``: no position encoding."""
    window: int = 0
    """Number of keys that a query attends to, itself included; 0: no limit."""
    is_moe: bool = False
    mixers: tuple[MixerKind, ...] = ("attention",)
    """Several mixers have the same input, and their outputs are added. (): only an MLP."""
    has_mlp: bool = True


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Architecture of a decoder-only language model."""

    vocab_size: int
    hidden_size: int
    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    layers: tuple[DecoderLayerSpec, ...]
    moe: MoESpec | None = None
    short_conv: ShortConvSpec | None = None
    gated_delta: GatedDeltaSpec | None = None
    mamba: HeadMambaSpec | ChannelMambaSpec | None = None
    factors: Mapping[str, tuple[Factor, ...]] = field(default_factory=dict)
    """Factors on the outputs of linear layers; the keys are the last parts of target names."""
    names: NameSpec = NameSpec()
    tied: bool = False
    """The output layer uses the embedding table."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on the outputs of attention and MLP before the residual addition."""
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    is_causal: bool = True
    """False if tokens attend to later ones, too; a layer's window then limits both directions."""

    def state(self, kind: MixerKind) -> tuple[StateShape, ...]:
        """The recurrent state of a mixer of this kind, () for attention."""
        specs = {"short_conv": self.short_conv, "gated_delta": self.gated_delta}
        found = {**specs, "mamba": self.mamba}.get(kind)
        return () if found is None else found.state
