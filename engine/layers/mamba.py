"""Mamba layers: mixers whose state is the last inputs of a convolution and that of a selective
scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

import kernels
from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from engine.layers.recurrent import Convolution, Gate, StateTensors
from kernels.meta import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan


@dataclass(eq=False)
class HeadMamba:
    """Mamba-2: a selective scan by heads between two projections."""

    project: Linear  # hidden state to gate, input of the convolution and time steps
    conv: Convolution
    scan: HeadScan
    gate: Gate
    out: Linear

    def __call__(
        self, x: torch.Tensor, meta: StateMeta, cache: StateTensors, wanted: Wanted | None = None
    ) -> torch.Tensor:
        """Compute the mixer; see ``Mixer``. cache: the states of the convolution and of the
        scan."""
        conv_state, state = cache
        num_heads, num_channels = len(self.scan.decay), len(self.conv.weight)
        projected = self.project(x)
        width = projected.shape[1] - num_channels - num_heads
        gate = projected[:, :width]
        xbc = self.conv(projected[:, width : width + num_channels], conv_state, meta)
        y = kernels.head_scan(xbc, projected[:, -num_heads:], self.scan, state, meta)
        return self.out(self.gate(y, gate, wanted))


class StepNorms(NamedTuple):
    """RMS norms of the time steps, b and c of a Mamba-1 layer."""

    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    eps: float

    def __call__(self, parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Normalise the three parts, each [N, ...]."""
        pairs = zip(parts, self.weights, strict=True)
        return [
            kernels.rms_norm(kernels.join_columns([part]), weight, self.eps)
            for part, weight in pairs
        ]


@dataclass(eq=False)
class ChannelMamba:
    """Mamba-1: a selective scan by channels between two projections."""

    project: Linear  # hidden state to x and gate
    conv: Convolution
    parameters: Linear  # x to low-rank time steps, b and c
    steps: Linear  # low-rank time steps to those of all channels
    norms: StepNorms | None
    scan: ChannelScan
    out: Linear

    def __call__(
        self, x: torch.Tensor, meta: StateMeta, cache: StateTensors, wanted: Wanted | None = None
    ) -> torch.Tensor:
        """Compute the mixer; see ``Mixer``. cache: the states of the convolution and of the
        scan."""
        conv_state, state = cache
        projected = self.project(x)
        width, size = len(self.conv.weight), len(self.scan.decay)
        hidden = self.conv(projected[:, :width], conv_state, meta)
        parameters = self.parameters(hidden)
        rank = parameters.shape[1] - 2 * size
        low, bc = parameters[:, :rank], parameters[:, rank:]
        if self.norms is None:
            low = kernels.join_columns([low])
        else:
            low, b, c = self.norms((low, bc[:, :size], bc[:, size:]))
            bc = kernels.join_columns([b, c])
        steps = self.steps(low)
        y = kernels.channel_scan(hidden, steps, bc, projected[:, width:], self.scan, state, meta)
        return self.out(y if wanted is None else y[wanted.rows])
