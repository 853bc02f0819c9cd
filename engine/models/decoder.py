"""The forward pass of all natively supported model families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import kernels
from engine.kv.layout import LayerCache
from engine.layers.batch import ForwardBatch, Hidden, Wanted
from engine.layers.interface import Mixer
from engine.layers.sublayers import (
    Attention,
    Embedding,
    GroupedExperts,
    MixtureOfExperts,
    OutputLayer,
    ResidualNorm,
    RMSNorm,
    WithSharedExpert,
    can_be_grouped,
)
from engine.models.model import LayerCaches
from kernels.cpu.recording import Stages
from kernels.meta import LayerMeta


class Sublayer:
    """The norms before and after a mixer or an MLP, and the factor on its output."""

    def __init__(self, norm_in: ResidualNorm, norm_out: RMSNorm | None, multiplier: float) -> None:
        self.enter = norm_in
        self.norm_out = norm_out
        self.multiplier = multiplier

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the output norm and factor, if any, to the sublayer's output x [N, H], in place."""
        if self.norm_out is not None:
            x = self.norm_out(x)
        return x if self.multiplier == 1.0 else kernels.scale_in_place(x, self.multiplier)


class DecoderBlock:
    """One decoder layer: a mixer (attention or another), then an MLP, each added to the residual
    stream."""

    def __init__(
        self,
        mixer: Mixer,
        around_mixer: Sublayer,
        mlp: Callable[[torch.Tensor], torch.Tensor],
        around_mlp: Sublayer,
    ) -> None:
        self.mixer = mixer
        self.around_mixer = around_mixer
        self.mlp = mlp
        self.around_mlp = around_mlp

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: LayerMeta,
        cache: Any,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one decoder layer. x [N, H]: output of the layer before, not yet added to
        ``residual``; cache: what the layer keeps between steps, see ``LayerCaches``. Returns the
        new x and residual, only for the rows of ``wanted`` if given."""
        x, residual = self.around_mixer.enter(x, residual)
        x = self.around_mixer.leave(self.mixer(x, meta, cache, wanted))
        if wanted is not None:
            residual = residual[wanted.rows]
        x, residual = self.around_mlp.enter(x, residual)
        return self.around_mlp.leave(self.mlp(x)), residual


class MixerBlock:
    """One decoder layer with only a mixer, or, with the next layer, half of one whose two mixers
    have the same input."""

    mlp = None

    def __init__(self, mixer: Mixer, around: Sublayer) -> None:
        self.mixer = mixer
        self.around = around

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: LayerMeta,
        cache: Any,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer; see ``DecoderBlock.__call__``."""
        x, residual = self.around.enter(x, residual)
        x = self.around.leave(self.mixer(x, meta, cache, wanted))
        return x, residual if wanted is None else residual[wanted.rows]


class MLPBlock:
    """One decoder layer with only an MLP."""

    mixer = None

    def __init__(self, mlp: Callable[[torch.Tensor], torch.Tensor], around: Sublayer) -> None:
        self.mlp = mlp
        self.around = around

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: LayerMeta,
        cache: Any,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer; see ``DecoderBlock.__call__``."""
        if wanted is not None:
            x = x[wanted.rows]
            residual = None if residual is None else residual[wanted.rows]
        x, residual = self.around.enter(x, residual)
        return self.around.leave(self.mlp(x)), residual


class IdleBlock:
    """The last layer of a model without attention, which computes nothing.

    The engine counts each request's tokens in blocks. This layer has them, and they are small."""

    mixer = None
    mlp = None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: LayerMeta,
        cache: Any,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x and residual, only for the rows of ``wanted`` if given."""
        assert residual is not None
        return (x, residual) if wanted is None else (x[wanted.rows], residual[wanted.rows])


class JoinedBlock(DecoderBlock):
    """A decoder layer whose mixer has the same input as that of the block before, a
    ``MixerBlock``."""

    is_joined = True

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: LayerMeta,
        cache: Any,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer. x [N, H]: output of the other mixer; ``residual``: the residual stream
        before both mixers. Otherwise as in ``DecoderBlock.__call__``."""
        assert residual is not None
        entered, _ = self.around_mixer.enter(residual, None)
        y = self.around_mixer.leave(self.mixer(entered, meta, cache, wanted))
        if wanted is not None:
            x, residual = x[wanted.rows], residual[wanted.rows]
        _, residual = self.around_mixer.enter(x, residual)  # for the sum
        y, residual = self.around_mlp.enter(y, residual)
        return self.around_mlp.leave(self.mlp(y)), residual


Block = DecoderBlock | MixerBlock | MLPBlock | IdleBlock


class NativeDecoder:
    """A decoder-only language model over a paged KV cache; see ``engine.models.model.Model``."""

    has_own_products = True

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[Block],
        final_norm: ResidualNorm,
        output: OutputLayer,
        cache_spec: tuple[LayerCache, ...],
    ) -> None:
        self.embedding = embedding
        self.blocks = blocks
        self.final_norm = final_norm
        self.output = output
        self.cache_spec = cache_spec
        self.vocab_size = output.linear.out_features
        self.dtype = embedding.dtype
        self.weight_dtype = embedding.dtype  # of weights that are not quantised
        # Per layer: scales [2, Hkv] of K and V for an 8-bit cache; see ``scale_cache``.
        self.kv_scales: Sequence[torch.Tensor | None] = ()

    @property
    def can_be_recorded(self) -> bool:
        """True unless tokens are grouped by expert on the host, which no graph can record."""
        return all(getattr(block.mlp, "can_be_recorded", True) for block in self.blocks)

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
            if scales is not None and isinstance(block.mixer, Attention):
                held = scales.to(device)
                block.mixer.write["kv_scales"] = block.mixer.attend["kv_scales"] = held
        return sum(scales is not None for scales in self.kv_scales)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: LayerCaches) -> Hidden:
        """Compute hidden states [R, H] of the wanted tokens after the final norm. Writes K and V of
        all N tokens to ``kv``."""
        if batch.positions.dim() != 1:
            raise ValueError(
                f"positions have {len(batch.positions)} rows, but this model needs one row"
            )
        if batch.recorder is not None and batch.embeds is None:
            stages = self._stages(batch, kv)
            hidden, output = batch.recorder.run(stages, batch.input_ids, batch.attention)
            last = hidden if batch.wanted is None else hidden[batch.wanted.rows]
            return Hidden(last, output=output)
        return self._hidden(batch, kv, self.embedding(batch.input_ids, batch.embeds))

    @torch.inference_mode()
    def lower_layers(self, batch: ForwardBatch, kv: LayerCaches) -> torch.Tensor:
        """Compute the residual stream [N, H] before the last layer."""
        x, residual = self.embedding(batch.input_ids, batch.embeds), None
        last = self._num_last
        lower = zip(self.blocks[:-last], batch.attn[:-last], kv[:-last], strict=True)
        for block, meta, cache in lower:
            x, residual = block(x, residual, meta, cache)
        return x if residual is None else x + residual

    @torch.inference_mode()
    def last_layer(
        self, stream: torch.Tensor, batch: ForwardBatch, kv: LayerCaches
    ) -> torch.Tensor:
        """Compute hidden states [R, H] of the wanted tokens from the output of ``lower_layers``."""
        x, residual = stream, None
        for place in range(-self._num_last, 0):
            wanted = batch.wanted if place == -1 else None
            x, residual = self.blocks[place](x, residual, batch.attn[place], kv[place], wanted)
        return self.final_norm(x, residual)[0]

    @property
    def _num_last(self) -> int:
        """Blocks of the last layer."""
        last = self.blocks[-1]
        return 2 if getattr(last, "is_joined", False) or isinstance(last, IdleBlock) else 1

    def _stages(self, batch: ForwardBatch, kv: LayerCaches) -> Stages:
        """The parts of a step that is recorded or replayed."""
        layers = partial(self._last_hidden, batch, kv)
        if batch.output is None:
            return Stages(self.embedding, layers)
        output = self.largest if batch.output == "largest" else self.logits
        return Stages(self.embedding, layers, output, batch.output)

    def _last_hidden(self, batch: ForwardBatch, kv: LayerCaches, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, H] of all tokens: a replay of a recorded step may need other rows."""
        return self._hidden(replace(batch, wanted=None), kv, x).last

    def _hidden(self, batch: ForwardBatch, kv: LayerCaches, x: torch.Tensor) -> Hidden:
        """Compute ``forward`` from the embeddings x [N, H]."""
        residual = None
        aux: dict[int, torch.Tensor] = {}
        # The last layer computes only wanted rows, unless its full output is requested.
        last = len(self.blocks) - 1
        narrowed = None if last in batch.aux_layers else batch.wanted
        layers = zip(self.blocks, batch.attn, kv, strict=True)
        for index, (block, meta, cache) in enumerate(layers):
            x, residual = block(x, residual, meta, cache, narrowed if index == last else None)
            if index in batch.aux_layers:
                aux[index] = x + residual
        hidden = self.final_norm(x, residual)[0]
        if batch.wanted is not None and narrowed is None:
            hidden = hidden[batch.wanted.rows]
        return Hidden(hidden, tuple(aux[layer] for layer in batch.aux_layers))

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The token with the largest logit of each row, [R] int32; ``None`` if not supported."""
        return self.output.largest(hidden)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] float32 of hidden states [R, H]."""
        return self.output(hidden, out)
