"""The forward pass of all natively supported model families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

import kernels
from engine.kv.layout import LayerCache
from engine.layers.adapted import AdaptedLayers
from engine.layers.axes import axes_of, rows_along
from engine.layers.batch import ForwardBatch, Hidden, Wanted
from engine.layers.interface import Mixer
from engine.layers.sublayers import (
    Attention,
    Embedding,
    GroupedExperts,
    MixtureOfExperts,
    OutputLayer,
    ParallelMixers,
    ResidualNorm,
    RMSNorm,
    WithSharedExpert,
    can_be_grouped,
)
from engine.models.model import LayerCaches
from engine.models.sharding import DecoderSlice
from engine.parallel.collectives import Collectives
from kernels.cpu.recording import Stages
from kernels.meta import LayerMeta


class Sublayer:
    """The norms before and after a mixer or an MLP, and the factor on its output."""

    def __init__(
        self,
        norm_in: ResidualNorm,
        norm_out: RMSNorm | None,
        multiplier: float,
        ranks: Collectives | None = None,
    ) -> None:
        """ranks: each computes a part of the sublayer, and the outputs are added up."""
        self.enter = norm_in
        self.norm_out = norm_out
        self.multiplier = multiplier
        self.ranks = ranks

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the sublayer's output x [N, H] over the ranks, and apply the output norm and
        factor, if any, in place."""
        if self.ranks is not None:
            x = self.ranks.all_reduce(x)
        if self.norm_out is not None:
            x = self.norm_out(x)
        return x if self.multiplier == 1.0 else kernels.scale_in_place(x, self.multiplier)


class DecoderBlock:
    """One decoder layer: a mixer (attention or another), then an MLP, each added to the residual
    stream. A layer may lack one of the two."""

    def __init__(
        self,
        mixer: Mixer | None,
        around_mixer: Sublayer,
        mlp: Callable[[torch.Tensor], torch.Tensor] | None,
        around_mlp: Sublayer,
        place: int | slice = 0,
    ) -> None:
        """place: the index of the mixer's cache among those of the model; a slice for
        ``ParallelMixers``."""
        self.mixer = mixer
        self.around_mixer = around_mixer
        self.mlp = mlp
        self.around_mlp = around_mlp
        self.place = place

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        metas: Sequence[LayerMeta],
        caches: LayerCaches,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one decoder layer. x [N, H]: output of the layer before, not yet added to
        ``residual``; metas, caches: those of all layers. Returns the new x and residual, only for
        the rows of ``wanted`` if given."""
        if self.mixer is not None:
            x, residual = self.around_mixer.enter(x, residual)
            x = self.mixer(x, metas[self.place], caches[self.place], wanted)
            x = self.around_mixer.leave(x)
        elif wanted is not None:
            x = x[wanted.rows]
        if wanted is not None and residual is not None:
            residual = residual[wanted.rows]
        if self.mlp is not None:
            x, residual = self.around_mlp.enter(x, residual)
            x = self.around_mlp.leave(self.mlp(x))
        assert residual is not None
        return x, residual


class Ends(NamedTuple):
    """What a stage has before its first and after its last layer; ``None``: others have it."""

    embedding: Embedding | None
    final_norm: ResidualNorm | None
    output: OutputLayer | None


class Caches(NamedTuple):
    """What the mixers of a stage, and those of all stages, keep between steps."""

    mine: tuple[LayerCache, ...]
    all: tuple[LayerCache, ...]


class NativeDecoder:
    """A decoder-only language model over a paged KV cache, or a stage of it; see
    ``engine.models.model.Model``.

    Instead of an embedding, a later stage has the residual stream of the stage before
    (``ForwardBatch.stream``). In place of final hidden states, all stages but the last one compute
    the residual stream [N, H] of all tokens."""

    has_own_products = True

    def __init__(
        self,
        ends: Ends,
        blocks: Sequence[DecoderBlock],
        caches: Caches,
        mine: DecoderSlice,
        adapted: AdaptedLayers,
        dtype: torch.dtype,
    ) -> None:
        """mine: the part of the model that this is; dtype: of activations."""
        self.embedding, self.final_norm, self.output = ends
        self.blocks = blocks
        self.cache_spec, self.whole_cache_spec = caches
        self.mine = mine
        self.stage = mine.stage
        self.spec = mine.spec
        self.adapted = adapted
        self.is_causal = mine.spec.is_causal
        self.vocab_size = mine.whole.vocab_size
        self.dtype = dtype
        self.weight_dtype = dtype  # of weights that are not quantised
        # Per layer: scales [2, Hkv] of K and V for an 8-bit cache; see ``scale_cache``.
        self.kv_scales: Sequence[torch.Tensor | None] = ()

    @property
    def can_be_recorded(self) -> bool:
        """True unless tokens are grouped by expert on the host, which no graph can record, or a
        sequence must be computed in one step."""
        return self.is_causal and all(
            getattr(block.mlp, "can_be_recorded", True) for block in self.blocks
        )

    def group_experts(self) -> None:
        """Stack each layer's experts in one tensor for grouped GPU kernels, where possible."""
        for block in self.blocks:
            mlp = block.mlp
            routed = mlp.routed if isinstance(mlp, WithSharedExpert) else mlp
            if not isinstance(routed, MixtureOfExperts) or not can_be_grouped(routed):
                continue
            if isinstance(mlp, WithSharedExpert):
                mlp.routed = GroupedExperts(routed)
            else:
                block.mlp = GroupedExperts(routed)

    def scale_cache(self, device: torch.device) -> int:
        """Use the checkpoint's scales to store keys and values as 8-bit floats. Returns the number
        of layers that have scales."""
        for block, scales in zip(self.blocks, self.kv_scales, strict=False):
            mixer = block.mixer
            mixers = mixer.mixers if isinstance(mixer, ParallelMixers) else (mixer,)
            for attention in mixers:
                if scales is not None and isinstance(attention, Attention):
                    held = scales.to(device)
                    attention.write["kv_scales"] = attention.attend["kv_scales"] = held
        return sum(scales is not None for scales in self.kv_scales)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: LayerCaches) -> Hidden:
        """Compute hidden states [R, H] of the wanted tokens after the final norm. Writes K and V of
        all N tokens to ``kv``."""
        if batch.positions.dim() != 1:
            cos_sin = self._cos_sin(batch.positions)
            if cos_sin is not None:
                batch.rotate(cos_sin)
        if batch.recorder is not None and batch.embeds is None:
            stages = self._stages(batch, kv)
            given = batch.input_ids if self.embedding is not None else self._first(batch)
            hidden, output = batch.recorder.run(stages, given, batch.attention)
            if batch.wanted is not None and self.stage.is_last:
                hidden = hidden[batch.wanted.rows]
            return Hidden(hidden, output=output)
        return self._hidden(batch, kv, self._first(batch))

    def _first(self, batch: ForwardBatch) -> torch.Tensor:
        """The input [N, H] of the first layer."""
        if self.embedding is not None:
            return self.embedding(batch.input_ids, batch.embeds)
        assert batch.stream is not None, "a later stage needs what leaves the stage before"
        return batch.stream

    def _cos_sin(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Cosines and sines [N, rotary_dim] of positions [K, N] along K axes; ``None`` in a stage
        without attention."""
        rope = next((layer.rope for layer in self.spec.layers if layer.rope is not None), None)
        axes = () if rope is None else axes_of(rope)
        if not axes:
            raise ValueError(f"positions have {len(positions)} rows, but this model needs one row")
        mixers = (block.mixer for block in self.blocks)
        tables = (mixer.write["cos_sin"] for mixer in mixers if isinstance(mixer, Attention))
        table = next(tables, None)
        return None if table is None else rows_along(axes, positions, table)

    @torch.inference_mode()
    def lower_layers(self, batch: ForwardBatch, kv: LayerCaches) -> torch.Tensor:
        """Compute the residual stream [N, H] before the last layer."""
        x, residual = self._first(batch), None
        for block in self.blocks[:-1]:
            x, residual = block(x, residual, batch.attn, kv)
        return x if residual is None else x + residual

    @torch.inference_mode()
    def last_layer(
        self, stream: torch.Tensor, batch: ForwardBatch, kv: LayerCaches
    ) -> torch.Tensor:
        """Compute hidden states [R, H] of the wanted tokens from the output of ``lower_layers``."""
        if self.final_norm is None:
            return _sum(*self.blocks[-1](stream, None, batch.attn, kv))
        x, residual = self.blocks[-1](stream, None, batch.attn, kv, batch.wanted)
        return self.final_norm(x, residual)[0]

    def _stages(self, batch: ForwardBatch, kv: LayerCaches) -> Stages:
        """The parts of a step that is recorded or replayed."""
        layers = partial(self._last_hidden, batch, kv)
        if batch.output is None:
            return Stages(self.embedding, layers, variant=batch.variant)
        output = self.largest if batch.output == "largest" else self._output.part
        return Stages(self.embedding, layers, output, batch.output, batch.variant)

    def _last_hidden(self, batch: ForwardBatch, kv: LayerCaches, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, H] of all tokens: a replay of a recorded step may need other rows."""
        return self._hidden(replace(batch, wanted=None), kv, x).last

    def _hidden(self, batch: ForwardBatch, kv: LayerCaches, x: torch.Tensor) -> Hidden:
        """Compute ``forward`` from the input x [N, H] of the first layer."""
        residual = None
        aux: dict[int, torch.Tensor] = {}
        # The last layer computes only wanted rows, unless its full output is requested. (A query
        # alone would be its sequence's last one, which sees no later tokens.)
        layers = self.stage.layers
        last = layers[-1]
        is_whole = last in batch.aux_layers or not self.is_causal or self.final_norm is None
        added: Sequence[torch.Tensor] = ()
        if batch.embeds is not None:
            added = () if batch.embeds.added is None else tuple(batch.embeds.added)
            is_whole |= last < len(added) or batch.is_open
        narrowed = None if is_whole else batch.wanted
        for index, block in zip(layers, self.blocks, strict=True):
            wanted = narrowed if index == last else None
            x, residual = block(x, residual, batch.attn, kv, wanted)
            if batch.embeds is not None and index < len(added):
                x = x.index_add(0, batch.embeds.rows, added[index].to(x.dtype))
            if index in batch.aux_layers:
                aux[index] = x + residual
        streams = tuple(aux[layer] for layer in batch.aux_layers if layer in layers)
        if self.final_norm is None:
            return Hidden(_sum(x, residual), streams)
        hidden = self.final_norm(x, residual)[0]
        if batch.wanted is not None and narrowed is None:
            hidden = hidden[batch.wanted.rows]
        return Hidden(hidden, streams)

    @property
    def _output(self) -> OutputLayer:
        assert self.output is not None, "only the last stage has an output layer"
        return self.output

    @property
    def has_largest(self) -> bool:
        return self.output is not None and self.output.has_largest

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The token with the largest logit of each row, [R] int32; ``None`` if not supported."""
        return self._output.largest(hidden)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] float32 of hidden states [R, H]."""
        return self._output(hidden, out)


def _sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream [N, H] after the last layer of a stage, in place of x. It is rounded as
    by the norm that would add them in the next layer."""
    return x if residual is None else kernels.add_in_place(x, residual)
