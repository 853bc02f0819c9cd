"""Builds a decoder from its spec and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch

from engine.config.model import ModelConfig, ModelInfo
from engine.kv.layout import LayerCache, PagedKV, RecurrentState, StateTensor
from engine.layers.adapted import OUTPUT, AdaptedLayers
from engine.layers.adapted_embedding import AdaptedTable
from engine.layers.adapted_linear import AdaptedLinear, ExpertRows
from engine.layers.gated_delta import GatedDelta
from engine.layers.interface import Linear, Mixer
from engine.layers.linear import is_cpu, make_linear, plain_rows
from engine.layers.parallel import NormOfAllHeads, PartOfOutput, PartOfTable, SummedLinear
from engine.layers.quantized import Weight, plain, scale_rows
from engine.layers.recurrent import Convolution, OutputGate
from engine.layers.rope import RopeSpec
from engine.layers.rotary import cos_sin_table
from engine.layers.short_conv import ShortConv
from engine.layers.sublayers import (
    Attention,
    Embedding,
    GatedMLP,
    MixtureOfExperts,
    OutputLayer,
    ParallelMixers,
    PlainMLP,
    ResidualNorm,
    RMSNorm,
    WithSharedExpert,
)
from engine.models.decoder import Caches, DecoderBlock, Ends, NativeDecoder, Sublayer
from engine.models.mamba import make_mamba
from engine.models.quant import stated
from engine.models.sharding import DecoderSlice, Shard
from engine.models.spec import DecoderLayerSpec, Factor, MixerKind
from engine.models.stages import Pipeline
from engine.models.targets import norm_roles
from engine.models.weights import Weights
from engine.parallel.collectives import Alone, Collectives

MLP = GatedMLP | PlainMLP | MixtureOfExperts | WithSharedExpert
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Device and quantisation of a decoder's tensors. ``max_model_len``: longest sequence, in
    tokens; ``takes_adapters``: linear layers are ``AdaptedLinear``; ``ranks``: compute the model
    together; ``pipeline``: the stage that they compute."""

    device: str
    quantization: str | None
    max_model_len: int
    batch_invariant: bool = False
    output_layer_quantization: str | None = None
    quantize_activations: bool = True
    takes_adapters: bool = False
    ranks: Collectives = field(default_factory=Alone)
    pipeline: Pipeline = field(default_factory=Pipeline)

    @property
    def shard(self) -> Shard:
        return Shard(self.ranks.rank, self.ranks.size)


def assemble(mine: DecoderSlice, weights: Weights, placement: Placement) -> NativeDecoder:
    """Build a rank's part of a decoder. It takes tensors from ``weights`` in the order of
    ``mine.targets()``."""
    return Assembly(mine, weights, placement).decoder()


class TensorSource:
    """Takes the plain tensors of a model from its weights, and makes tables that layers share."""

    def __init__(self, weights: Weights, placement: Placement) -> None:
        self.weights = weights
        self.placement = placement
        self.tables: dict[RopeSpec, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a target on the device, in the dtype of activations."""
        device = self.placement.device
        tensor = plain(self.weights.take(name)).to(device)
        return tensor.to(activation_dtype(tensor.dtype, device))

    def rope_table(self, rope: RopeSpec) -> torch.Tensor:
        """Cosines and sines of all positions."""
        if rope not in self.tables:
            table = cos_sin_table(rope, self.placement.max_model_len)
            self.tables[rope] = table.to(self.placement.device)
        return self.tables[rope]


class Assembly(TensorSource):
    """Builds the layers of one decoder, or a rank's part of them."""

    def __init__(self, mine: DecoderSlice, weights: Weights, placement: Placement) -> None:
        super().__init__(weights, placement)
        self.mine = mine
        self.spec = mine.spec
        self.stage = mine.stage
        self.ranks = placement.ranks if placement.ranks.size > 1 else None
        self.dtype = activation_dtype(weights.dtype, placement.device)
        self.adapted = AdaptedLayers()
        self.adapts_experts = placement.takes_adapters and is_cpu(torch.device(placement.device))

    def decoder(self) -> NativeDecoder:
        embedding, head = self.embedding_and_head()
        blocks = [self.block(index) for index in self.stage.layers]
        norm = ResidualNorm(self.norm("norm")) if self.stage.is_last else None
        output = None if head is None else self.output_layer(head)
        return NativeDecoder(
            Ends(embedding, norm, output),
            blocks,
            self.caches(),
            self.mine,
            self.adapted,
            self.dtype,
        )

    def output_layer(self, head: Linear) -> OutputLayer:
        spec = self.spec
        if self.ranks is None:
            return OutputLayer(head, spec.logit_multiplier, spec.logit_softcap)
        size = self.ranks.size
        return PartOfOutput(
            head,
            spec.logit_multiplier,
            spec.logit_softcap,
            parts=[Shard(rank, size).part(spec.vocab_size) for rank in range(size)],
            ranks=self.ranks,
        )

    def embedding_and_head(self) -> tuple[Embedding | None, Linear | None]:
        """Make the embedding and the output layer, as far as the stage has them. If they are tied,
        they share one table, and the rows of an embedding are those of an output layer even where
        it computes no logits, since it may be quantised."""
        is_first, is_last = self.stage.is_first, self.stage.is_last
        if self.spec.tied:
            if not (is_first or is_last):
                return None, None
            head = self.head_of(self.weights.take("embed"))
            head = self.adaptable(OUTPUT, head) if is_last else head
            return self.embedding(head.rows) if is_first else None, head if is_last else None
        embedding = self.embedding(self.table_rows()) if is_first else None
        if not is_last:
            return embedding, None
        return embedding, self.adaptable(OUTPUT, self.head_of(self.weights.take("head")))

    def table_rows(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Reads rows of an embedding that is not tied."""
        device, table = self.placement.device, self.weights.take("embed")
        if isinstance(table, torch.Tensor) or not is_cpu(torch.device(device)):
            return plain_rows(plain(table).to(device))
        return make_linear(table).rows  # packed tables have the layout of output layers

    def embedding(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> Embedding:
        if self.ranks is not None:
            rows = PartOfTable(rows, self.mine.vocabulary, self.ranks)
        if self.placement.takes_adapters:
            rows = self.adapted.table = AdaptedTable(rows)
        return Embedding(rows, self.dtype, self.spec.embedding_multiplier)

    def block(self, index: int) -> DecoderBlock:
        layer = self.spec.layers[index]
        norms = {
            role: self.norm(f"{index}.{role}") if getattr(self.spec.norm, role) else None
            for role in norm_roles(layer)
        }

        def around(role: str) -> Sublayer:
            entry, leave = (norms.get(f"{role}_{place}") for place in ("in", "out"))
            return Sublayer(ResidualNorm(entry), leave, self.spec.residual_multiplier, self.ranks)

        before = self.spec.layers[self.stage.layers.start : index]
        first = sum(len(layer.mixers) for layer in before)
        mixers = [self.mixer(index, kind) for kind in layer.mixers]
        mixer = mixers[0] if mixers else None
        place: int | slice = first
        if len(mixers) > 1:
            mixer, place = ParallelMixers(mixers), slice(first, first + len(mixers))
        mlp = self.mlp_of(index) if layer.has_mlp else None
        return DecoderBlock(mixer, around("attention"), mlp, around("mlp"), place)

    def mixer(self, index: int, kind: MixerKind) -> Mixer:
        makers: dict[MixerKind, Callable[[int], Mixer]] = {
            "attention": self.attention,
            "short_conv": self.short_conv,
            "gated_delta": self.gated_delta,
            "mamba": partial(make_mamba, self),
        }
        return makers[kind](index)

    def mlp_of(self, index: int) -> MLP:
        return self.experts(index) if self.spec.layers[index].is_moe else self.mlp(f"{index}.")

    def attention(self, index: int) -> Attention:
        spec, a, layer = self.spec, self.spec.attention, self.spec.layers[index]
        qkv = self.linear(f"{index}.qkv", a.qkv_bias)
        gate = self.linear(f"{index}.gate", a.qkv_bias) if a.has_gate else None
        out = self.linear(f"{index}.out", a.out_bias)
        normed = a.qk_norm != "none"
        norms = [self.tensor(f"{index}.{name}_norm") if normed else None for name in "qk"]
        if a.qk_norm == "full" and self.ranks is not None:
            qkv, norms = self.norm_of_all_heads(qkv, norms, self.ranks), [None, None]
        write = {
            "num_heads": a.num_heads,
            "num_kv_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
            "cos_sin": None if layer.rope is None else self.rope_table(layer.rope),
            "q_norm": norms[0],
            "k_norm": norms[1],
            "norm_eps": spec.norm.eps,
            "norm_add_one": spec.norm.add_one,
        }
        attend = {
            "scale": a.scale,
            "window": layer.window,
            "softcap": a.softcap,
            "causal": spec.is_causal,
        }
        return Attention(qkv, out, write, attend, gate)

    def norm_of_all_heads(
        self, qkv: Linear, norms: list[torch.Tensor | None], ranks: Collectives
    ) -> NormOfAllHeads:
        """The projection of a layer that normalises all heads together."""
        a, (q, k) = self.mine.whole.attention, norms
        assert q is not None and k is not None and not self.spec.norm.add_one
        copies = max(1, ranks.size // a.num_kv_heads)
        counts = a.q_width, copies * a.kv_width
        return NormOfAllHeads(qkv, (q, k), counts, self.spec.norm.eps, ranks)

    def short_conv(self, index: int) -> ShortConv:
        conv = self.spec.short_conv
        assert conv is not None
        project = self.linear(f"{index}.in", conv.bias)
        weight = self.tensor(f"{index}.conv").flatten(1)
        bias = self.tensor(f"{index}.conv_bias") if conv.bias else None
        return ShortConv(project, weight, bias, self.linear(f"{index}.out", conv.bias))

    def gated_delta(self, index: int) -> GatedDelta:
        project = self.linear(f"{index}.in")
        gates = self.unquantized(f"{index}.gates")
        conv = Convolution(self.tensor(f"{index}.conv").flatten(1), None)
        rate, bias = (
            plain(self.weights.take(f"{index}.{name}")).float() for name in ("rate", "decay_bias")
        )
        device = self.placement.device
        decay = rate.exp().neg().to(device), bias.to(device)
        norm = self.tensor(f"{index}.head_norm")
        gate = OutputGate(norm.repeat(len(rate)), self.spec.norm.eps, len(norm), norm_first=True)
        out = self.linear(f"{index}.out")
        return GatedDelta(project, gates, conv, *decay, gate, out)

    def mlp(self, prefix: str, has_bias: bool | None = None) -> GatedMLP | PlainMLP:
        """Build an MLP. has_bias: ``None``: as ``MLPSpec`` says."""
        bias = self.spec.mlp.bias if has_bias is None else has_bias
        if not self.spec.mlp.is_gated:
            return PlainMLP(self.linear(f"{prefix}up", bias), self.linear(f"{prefix}down", bias))
        gate_up = self.linear(f"{prefix}gate_up", bias)
        down = self.linear(f"{prefix}down", bias)
        return GatedMLP(gate_up, down, self.spec.mlp.activation)

    def experts(self, index: int) -> MixtureOfExperts | WithSharedExpert:
        moe = self.spec.moe
        assert moe is not None
        router = self.unquantized(f"{index}.router", keeps_float32=True)
        bias = None
        if moe.has_bias:
            bias = plain(self.weights.take(f"{index}.router_bias")).float()
            bias = bias.to(self.placement.device)
        shared: tuple[GatedMLP | PlainMLP, Linear | None] | None = None
        if moe.shared_size:
            gate = self.unquantized(f"{index}.shared_gate") if moe.shared_is_gated else None
            shared = self.mlp(f"{index}.shared_"), gate
        has_bias = self.spec.mlp.bias and self.spec.mlp.is_gated
        experts = [self.mlp(f"{index}.{i}.", has_bias) for i in range(moe.num_experts)]
        adapted = None
        if self.adapts_experts:
            adapted = self.adapted.experts[str(index)] = ExpertRows()
        routed = MixtureOfExperts(router, experts, moe, bias, adapted)
        return routed if shared is None else WithSharedExpert(routed, *shared)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(name), self.spec.norm.eps, self.spec.norm.add_one)

    def head_of(self, weight: Weight) -> Linear:
        """Make the output layer. Unless an option requests it, it is quantised only to int8: 8-bit
        floats round its inputs too much, and 4 bits cost the most accuracy here."""
        requested = self.placement.quantization
        if isinstance(weight, torch.Tensor) and self.placement.output_layer_quantization:
            requested = self.placement.output_layer_quantization
        elif requested != "int8":
            requested = None
        return make_linear(
            weight,
            quantization=requested,
            device=self.placement.device,
            keeps_float32=True,
            batch_invariant=self.placement.batch_invariant,
            quantize_activations=self.placement.quantize_activations,
        )

    def linear(self, name: str, has_bias: bool = False) -> Linear:
        weight = self.weights.take(name)
        bias = plain(self.weights.take(f"{name}_bias")) if has_bias else None
        if self.placement.ranks.rank and self.mine.adds_up(name):
            bias = None  # rank 0 adds it
        factors = self.spec.factors.get(name.rpartition(".")[2])
        if factors is not None:
            weight, bias = scaled(weight, bias, factors)
        layer = make_linear(
            weight,
            bias,
            quantization=self.placement.quantization,
            device=self.placement.device,
            batch_invariant=self.placement.batch_invariant,
            quantize_activations=self.placement.quantize_activations,
        )
        return self.adaptable(name, layer)

    def summed(self, layer: Linear) -> Linear:
        """A layer within a sublayer, as one whose outputs are added up over the ranks."""
        return layer if self.ranks is None else SummedLinear(layer, self.ranks)

    def unquantized(self, name: str, keeps_float32: bool = False) -> Linear:
        """Make a small layer that is not quantised. keeps_float32: its outputs are float32."""
        layer = make_linear(
            self.weights.take(name),
            device=self.placement.device,
            keeps_float32=keeps_float32,
            batch_invariant=self.placement.batch_invariant,
            quantize_activations=False,
        )
        return self.adaptable(name, layer)

    def adaptable(self, name: str, layer: Linear) -> Linear:
        """The layer of a target, as one that takes adapters if it should."""
        is_of_expert = name.count(".") > 1
        if not self.placement.takes_adapters or (is_of_expert and not self.adapts_experts):
            return layer
        self.adapted.linears[name] = AdaptedLinear(layer)
        return self.adapted.linears[name]

    def caches(self) -> Caches:
        """What each mixer keeps between steps. A model without attention, and a stage without it,
        has a cache that no mixer uses, since the engine counts tokens in blocks of KV."""
        of_layers = [
            [self.cache_of(layer, kind) for kind in layer.mixers] for layer in self.spec.layers
        ]
        kept = [cache for layer in of_layers for cache in layer if isinstance(cache, PagedKV)]
        unused = kept[0] if kept else self.cache_of(DecoderLayerSpec(rope=None), "attention")

        def joined(layers: Sequence[Sequence[LayerCache]]) -> tuple[LayerCache, ...]:
            found = tuple(chain(*layers))
            has_kv = any(isinstance(cache, PagedKV) for cache in found)
            return found if has_kv else (*found, unused)

        mine = self.stage.layers
        return Caches(joined(of_layers[mine.start : mine.stop]), joined(of_layers))

    def cache_of(self, layer: DecoderLayerSpec, kind: MixerKind) -> LayerCache:
        a, name, state = (
            self.spec.attention,
            str(self.dtype).removeprefix("torch."),
            self.spec.state(kind),
        )
        if state:
            tensors = (StateTensor(s, "float32" if wide else name, wide) for s, wide in state)
            return RecurrentState(tensors=tuple(tensors))
        return PagedKV(
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            # In both directions, a sequence needs all its keys in its only step.
            window=layer.window if self.spec.is_causal else 0,
            dtype_bytes=self.dtype.itemsize,
        )


def scaled(
    weight: Weight, bias: torch.Tensor | None, factors: tuple[Factor, ...]
) -> tuple[Weight, torch.Tensor | None]:
    """Multiply the rows of a weight and its bias by factors."""
    counts = torch.tensor([factor.num_rows for factor in factors])
    rows, biases = (
        torch.tensor(column, dtype=torch.float32).repeat_interleave(counts)
        for column in zip(*(factor[1:] for factor in factors), strict=True)
    )
    return scale_rows(weight, rows), None if bias is None else bias * biases.to(bias.dtype)


def compute_dtype(
    config: ModelConfig, info: ModelInfo, device: str, stored: torch.dtype | None = None
) -> torch.dtype:
    """The dtype to compute in. For "auto" it is the one in config.json, else ``stored``, that of
    most numbers in the checkpoint, else float32 on a CPU and bfloat16 on a GPU.

    On a CPU, "auto" is bfloat16 instead of float16 for 4-bit and other quantised weights, since the
    kernels for them do not compute in float16."""
    if config.dtype != "auto":
        return COMPUTE_DTYPES[config.dtype]
    named = COMPUTE_DTYPES.get(info.dtype.removeprefix("torch."))
    if named is None and stored in COMPUTE_DTYPES.values():
        named = stored
    is_quantized = config.quantization == "int4" or stated(info) is not None
    if named is torch.float16 and is_quantized and is_cpu(torch.device(device)):
        return torch.bfloat16
    is_on_cpu = torch.device(device).type == "cpu"
    return named or (torch.float32 if is_on_cpu else torch.bfloat16)


def activation_dtype(weights: torch.dtype, device: str) -> torch.dtype:
    """The dtype of activations: that of the weights, but float32 for float16 weights on a CPU,
    which has no float16 products."""
    if weights is torch.float16 and is_cpu(torch.device(device)):
        return torch.float32
    return weights
