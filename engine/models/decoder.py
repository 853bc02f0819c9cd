"""The forward pass of every native family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.kv.layout import KVSpec
from engine.layers.attention import Attention
from engine.layers.batch import ForwardBatch, Wanted
from engine.layers.embedding import Embedding, OutputLayer
from engine.layers.mlp import GroupedExperts, MixtureOfExperts, can_be_grouped
from engine.layers.norm import ResidualNorm, RMSNorm
from kernels.meta import AttentionMeta


class Sublayer:
    """What is done to the output of attention or MLP before it joins the residual stream."""

    def __init__(self, norm_in: ResidualNorm, norm_out: RMSNorm | None, multiplier: float) -> None:
        self.enter = norm_in
        self.norm_out = norm_out
        self.multiplier = multiplier

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, H], the sublayer's own tensor -> [N, H]."""
        if self.norm_out is not None:
            x = self.norm_out(x)
        return x if self.multiplier == 1.0 else x.mul_(self.multiplier)


class Block:
    """One layer: attention, then MLP, each added to the residual stream."""

    def __init__(
        self,
        attention: Attention,
        around_attention: Sublayer,
        mlp: Callable[[torch.Tensor], torch.Tensor],
        around_mlp: Sublayer,
    ) -> None:
        self.attention = attention
        self.around_attention = around_attention
        self.mlp = mlp
        self.around_mlp = around_mlp

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMeta,
        kv_layer: torch.Tensor,
        wanted: Wanted | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: what the layer before adds to ``residual``; returns the same pair of this layer.

        With ``wanted``, of these rows only: [R, H].
        """
        x, residual = self.around_attention.enter(x, residual)
        x = self.around_attention.leave(self.attention(x, meta, kv_layer, wanted))
        if wanted is not None:
            residual = residual[wanted.rows]
        x, residual = self.around_mlp.enter(x, residual)
        return self.around_mlp.leave(self.mlp(x)), residual


class Decoder:
    """A decoder-only language model over a paged KV cache; see ``engine.models.model.Model``."""

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[Block],
        final_norm: ResidualNorm,
        output: OutputLayer,
        kv_spec: KVSpec,
    ) -> None:
        self.embedding = embedding
        self.blocks = blocks
        self.final_norm = final_norm
        self.output = output
        self.kv_spec = kv_spec
        self.vocab_size = output.linear.out_features
        self.dtype = embedding.dtype

    @property
    def can_be_recorded(self) -> bool:
        """A mixture that groups tokens on the host waits for them."""
        return all(getattr(block.mlp, "can_be_recorded", True) for block in self.blocks)

    def group_experts(self) -> None:
        """Put each layer's experts into one tensor, as a GPU likes them, where that is possible."""
        for block in self.blocks:
            if isinstance(block.mlp, MixtureOfExperts) and can_be_grouped(block.mlp):
                block.mlp = GroupedExperts(block.mlp)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states [R, H] of the wanted rows after the final norm; writes all K and V."""
        x, residual = self.embedding(batch.input_ids), None
        for block, kv_layer in zip(self.blocks[:-1], kv[:-1], strict=True):
            x, residual = block(x, residual, batch.attn, kv_layer)
        x, residual = self.blocks[-1](x, residual, batch.attn, kv[-1], batch.wanted)
        return self.final_norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, H] rows of what ``forward`` returned -> scores [R, V] in float32."""
        return self.output(hidden, out)
