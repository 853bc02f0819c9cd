"""Builds an encoder from its spec and weights."""

from __future__ import annotations

import torch

from engine.kv.layout import LayerCache, PagedKV, SharedKV
from engine.layers.distance_scores import distance_scores
from engine.layers.interface import Linear
from engine.layers.linear import make_linear, plain_rows
from engine.layers.parallel import PartOfTable, Summed
from engine.layers.quantized import plain
from engine.layers.sublayers import Attention, GatedMLP
from engine.models.assemble import Placement, TensorSource, activation_dtype
from engine.models.encoder import (
    EncoderLayer,
    EncoderMLP,
    LayerNorm,
    NativeEncoder,
    NormThenSum,
    SumThenNorm,
    TextEmbedding,
)
from engine.models.encoder_sharding import EncoderSlice
from engine.models.weights import Weights


class EncoderAssembly(TensorSource):
    """Builds the layers of one encoder, or a rank's part of them. Tensors are taken in the order of
    ``encoder_targets``."""

    def __init__(self, mine: EncoderSlice, weights: Weights, placement: Placement) -> None:
        super().__init__(weights, placement)
        self.mine = mine
        self.spec = mine.spec
        self.ranks = placement.ranks if placement.ranks.size > 1 else None
        self.distances: torch.Tensor | None = None

    def encoder(self) -> NativeEncoder:
        spec = self.spec
        embedding = self.embedding()
        if spec.relative is not None:
            table, longest = self.tensor("relative"), self.placement.max_model_len
            self.distances = distance_scores(table, longest, spec.relative.max_distance)
        layers = [self.layer(index) for index in range(len(spec.layers))]
        final = self.norm("final_norm") if spec.norm.comes_first else None
        return NativeEncoder(
            embedding, layers, final, self.cache_spec(embedding.dtype), spec.vocab_size
        )

    def embedding(self) -> TextEmbedding:
        spec = self.spec.embedding
        words = plain(self.weights.take("words"))
        dtype = activation_dtype(words.dtype, self.placement.device)
        rows = plain_rows(words.to(self.placement.device))
        if self.ranks is not None:
            rows = PartOfTable(rows, self.mine.vocabulary, self.ranks)
        tables = (
            self.tensor("positions") if spec.num_positions else None,
            self.tensor("types") if spec.num_types else None,
        )
        norm = self.norm("embedding_norm")
        return TextEmbedding(rows, tables, spec.first_position, norm, dtype)

    def layer(self, index: int) -> EncoderLayer:
        comes_first = self.spec.norm.comes_first
        norm = self.norm(f"{index}.attention_norm") if index or not comes_first else None
        attention = self.attention(index)
        mlp_norm = self.norm(f"{index}.mlp_norm")
        mlp = self.mlp(index)
        kind = NormThenSum if comes_first else SumThenNorm
        if self.ranks is not None:
            return kind(Summed(attention, self.ranks), norm, Summed(mlp, self.ranks), mlp_norm)
        return kind(attention, norm, mlp, mlp_norm)

    def attention(self, index: int) -> Attention:
        a, layer = self.spec.attention, self.spec.layers[index]
        qkv = self.linear(f"{index}.qkv", a.qkv_bias)
        out = self.linear(f"{index}.out", a.out_bias)
        write = {
            "num_heads": a.num_heads,
            "num_kv_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
            "cos_sin": None if layer.rope is None else self.rope_table(layer.rope),
        }
        attend = {
            "scale": a.scale,
            "window": layer.window,
            "causal": False,
            "distances": self.distances,
        }
        return Attention(qkv, out, write, attend)

    def mlp(self, index: int) -> EncoderMLP | GatedMLP:
        spec = self.spec.mlp
        up = self.linear(f"{index}.up", spec.up_bias)
        down = self.linear(f"{index}.down", spec.down_bias)
        return (GatedMLP if spec.is_gated else EncoderMLP)(up, down, spec.activation)

    def norm(self, name: str) -> LayerNorm:
        spec, device = self.spec.norm, self.placement.device
        weight = plain(self.weights.take(name)).to(device)
        bias = plain(self.weights.take(f"{name}_bias")).to(device) if spec.has_bias else None
        return LayerNorm(weight, bias, spec.eps)

    def linear(self, name: str, has_bias: bool) -> Linear:
        weight = self.weights.take(name)
        bias = plain(self.weights.take(f"{name}_bias")) if has_bias else None
        if self.placement.ranks.rank and self.mine.adds_up(name):
            bias = None  # rank 0 adds it
        return make_linear(
            weight,
            bias,
            quantization=self.placement.quantization,
            device=self.placement.device,
            batch_invariant=self.placement.batch_invariant,
            quantize_activations=self.placement.quantize_activations,
        )

    def cache_spec(self, dtype: torch.dtype) -> tuple[LayerCache, ...]:
        """One layer of KV, which all layers share."""
        a = self.spec.attention
        own = PagedKV(num_kv_heads=a.num_kv_heads, head_dim=a.head_dim, dtype_bytes=dtype.itemsize)
        return own, *(SharedKV(source=0) for _ in self.spec.layers[1:])
