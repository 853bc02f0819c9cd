"""Input and output of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels.cpu.recording import Recorder
from kernels.meta import AttentionMeta


@dataclass(slots=True)
class Wanted:
    """The tokens whose hidden states will be read, each as a decode of its own.

    Of a prompt only the last token's hidden state is read, so the last layer computes queries,
    output projection and MLP of few rows, but keys and values of all.
    """

    rows: torch.Tensor  # [R] int64, rows of the batch
    attn: AttentionMeta  # R sequences of one query


class Embeds(NamedTuple):
    """Vectors in place of those that the embedding gives, as an encoder made them."""

    rows: torch.Tensor  # [M] int64, rows of the batch
    values: torch.Tensor  # [M, H]


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of one step, flattened over its sequences (decodes first)."""

    input_ids: torch.Tensor  # [N] int32 or int64
    positions: torch.Tensor  # [N] int64; [K, N] for models that count along several axes: ``move``
    attn: AttentionMeta
    wanted: Wanted | None = None  # None: every row
    embeds: Embeds | None = None
    aux_layers: tuple[int, ...] = ()  # whose outputs are wanted with the last hidden states
    recorder: Recorder | None = None  # repeats this step, from which nothing else is wanted

    def move(self, positions: torch.Tensor) -> None:
        """Give the tokens other positions than their places in the sequence, of one row [N] or
        several [K, N]. Attention goes by places, rotation by positions."""
        self.positions = positions
        if positions.dim() == 1:
            self.attn = replace(self.attn, positions=positions)
            if self.wanted is not None:
                of_rows = replace(self.wanted.attn, positions=positions[self.wanted.rows])
                self.wanted = Wanted(self.wanted.rows, of_rows)


class Hidden(NamedTuple):
    """Output of a forward pass."""

    last: torch.Tensor  # [R, H]: of the wanted rows, after the final norm
    aux: tuple[torch.Tensor, ...] = ()  # [N, H] each: the residual stream after each aux layer
