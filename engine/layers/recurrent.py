"""The parts that mixers with a recurrent state have in common."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

import kernels
from engine.layers.batch import Wanted
from kernels.meta import StateMeta

StateTensors = tuple[torch.Tensor, ...]
"""The state tensors of one layer, [rows, ...] each."""


class Convolution(NamedTuple):
    """A causal convolution of each channel, followed by SiLU."""

    weight: torch.Tensor  # [C, L], the last tap is the token's own
    bias: torch.Tensor | None  # [C]

    def __call__(self, x: torch.Tensor, state: torch.Tensor, meta: StateMeta) -> torch.Tensor:
        """x [N, C] -> [N, C]. state: [rows, L - 1, C]."""
        return kernels.causal_conv(x, self.weight, self.bias, "silu", state, meta)


class Gate(Protocol):
    """Gates the output of a recurrence, and may normalise it."""

    def __call__(
        self, y: torch.Tensor, gate: torch.Tensor, wanted: Wanted | None = None
    ) -> torch.Tensor:
        """Gate y: [N, C] -> [N, C], or [R, C] for the R tokens in ``wanted``."""
        ...


class OutputGate(NamedTuple):
    """The gate on the output of a recurrence and its RMS norm, over each ``group`` columns."""

    weight: torch.Tensor | None  # [C]; None: no norm
    eps: float
    group: int
    norm_first: bool

    def __call__(
        self, y: torch.Tensor, gate: torch.Tensor, wanted: Wanted | None = None
    ) -> torch.Tensor:
        """Gate and normalise y: [N, C] -> [N, C], or [R, C] for the R tokens in ``wanted``."""
        if wanted is not None:
            y, gate = y[wanted.rows], gate[wanted.rows]
        return kernels.grouped_gated_norm(
            y, gate, self.weight, self.eps, group=self.group, norm_first=self.norm_first
        )
