"""Input and output of a model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from kernels.cpu.recording import Recorder
from kernels.meta import AttentionMeta, BothWays, LayerMeta


@dataclass(slots=True)
class Wanted:
    """The R tokens of a batch whose final hidden states are needed, e.g. the last token of a
    prompt.

    For all other tokens, the last layer computes only keys and values.
    """

    rows: torch.Tensor  # [R] int64, index among the batch's tokens
    attn: AttentionMeta  # for the last layer: R sequences of one query each


class Embeds(NamedTuple):
    """Input vectors that replace embeddings of some tokens, for example from an image encoder, and
    vectors that are added to the outputs of the first layers for these tokens."""

    rows: torch.Tensor  # [M] int64, index among the batch's tokens
    values: torch.Tensor  # [M, H]
    added: torch.Tensor | None = None  # [L, M, H], for the first L layers


class OpenItem(NamedTuple):
    """Tokens of a media item that attend to each other both ways: the index of their sequence, the
    first of their rows and its number, and the position at which the item ends."""

    seq: int
    row: int
    num_rows: int
    end: int


Output = Literal["logits", "largest"]
"""What a model computes from the hidden states: logits [N, V], or the token with the largest logit
of each row [N]."""


@dataclass(slots=True)
class ForwardBatch:
    """The N tokens of a step, concatenated over its sequences (decodes first)."""

    input_ids: torch.Tensor  # [N] int32 or int64
    positions: torch.Tensor  # [N] int64; [K, N] for positions along K axes, see ``move``
    # One for each layer. Layers of a KV group share theirs, and so do those with recurrent states.
    attn: tuple[LayerMeta, ...]
    wanted: Wanted | None = None  # None: hidden states of all tokens
    embeds: Embeds | None = None
    # [N, H]: what leaves the stage before, for a later stage of a pipeline, which reads no ids.
    stream: torch.Tensor | None = None
    # [N] int64, for encoders with token types: 1 in the second text of a pair. None: all are 0.
    token_types: torch.Tensor | None = None
    aux_layers: tuple[int, ...] = ()  # layers whose outputs are returned, too
    recorder: Recorder | None = None  # records or replays this step on a CPU
    output: Output | None = None  # compute this, too, if the step is recorded or replayed
    variant: str = ""  # of the recording, see ``Feature.variant``

    @property
    def attention(self) -> AttentionMeta:
        """The metadata of the last attention layer."""
        return next(meta for meta in reversed(self.attn) if isinstance(meta, AttentionMeta))

    @property
    def is_open(self) -> bool:
        """True if some tokens attend to later ones of their media item; see ``open``."""
        return any(isinstance(m, AttentionMeta) and m.both_ways is not None for m in self.attn)

    def open(self, items: Sequence[OpenItem]) -> None:
        """Let the tokens of media items attend to all tokens of their item. The last layer then
        computes all tokens."""
        device = self.input_ids.device
        rows = torch.cat([torch.arange(item.row, item.row + item.num_rows) for item in items])
        counts = torch.tensor([item.num_rows for item in items])
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device, torch.int32)
        lengths = torch.tensor([item.end for item in items], dtype=torch.int32, device=device)
        seqs = torch.tensor([item.seq for item in items], device=device)
        rows = rows.to(device)
        scratch: dict[Any, Any] = {}
        opened: dict[int, AttentionMeta] = {}
        for meta in self.attn:
            if isinstance(meta, AttentionMeta) and id(meta) not in opened:
                own = replace(
                    meta,
                    query_start=starts,
                    seq_lens=lengths,
                    block_tables=meta.block_tables[seqs],
                    positions=meta.positions[rows],
                    slots=meta.slots[rows],
                    num_decodes=0,
                    max_query_len=int(counts.max()),
                    max_seq_len=max(item.end for item in items),
                    scratch=scratch,
                )
                opened[id(meta)] = replace(meta, both_ways=BothWays(rows, own))
        self.attn = tuple(opened.get(id(meta), meta) for meta in self.attn)

    def rotate(self, cos_sin: torch.Tensor) -> None:
        """Set the cosines and sines [N, rotary_dim] by which layers rotate the tokens."""
        rows = torch.arange(len(cos_sin), device=cos_sin.device)
        rotated = {
            id(meta): replace(meta, positions=rows, cos_sin=cos_sin)
            for meta in self.attn
            if isinstance(meta, AttentionMeta)
        }
        self.attn = tuple(rotated.get(id(meta), meta) for meta in self.attn)

    def move(self, positions: torch.Tensor) -> None:
        """Set rotary positions [N], or [K, N] for K axes, that differ from the tokens' indices in
        their sequences. The causal mask still uses the indices."""
        self.positions = positions
        if positions.dim() == 1:
            moved = {
                id(meta): replace(meta, positions=positions)
                for meta in self.attn
                if isinstance(meta, AttentionMeta)
            }
            self.attn = tuple(moved.get(id(meta), meta) for meta in self.attn)
            if self.wanted is not None:
                of_rows = replace(self.wanted.attn, positions=positions[self.wanted.rows])
                self.wanted = Wanted(self.wanted.rows, of_rows)


class Hidden(NamedTuple):
    """Output of a forward pass."""

    last: torch.Tensor  # [R, H], wanted tokens after the final norm
    aux: tuple[torch.Tensor, ...] = ()  # [N, H] each, the residual stream after each aux layer
    output: torch.Tensor | None = None  # see ``ForwardBatch.output``; a later step overwrites it
