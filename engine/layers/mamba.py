"""Mamba layers: mixers whose state is the last inputs of a convolution and that of a selective
scan."""

from __future__ import annotations

from typing import NamedTuple

import torch

import kernels
from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from kernels.meta import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan


class Convolution(NamedTuple):
    """A causal convolution of each channel, followed by SiLU."""

    weight: torch.Tensor  # [C, L], the last tap is the token's own
    bias: torch.Tensor | None  # [C]

    def __call__(self, x: torch.Tensor, state: torch.Tensor, meta: StateMeta) -> torch.Tensor:
        """x [N, C] -> [N, C]. state: [rows, L - 1, C]."""
        return kernels.causal_conv(x, self.weight, self.bias, "silu", state, meta)


class OutputGate(NamedTuple):
    """The gate on the output of Mamba-2 and its RMS norm, over each ``group`` columns."""

    weight: torch.Tensor | None  # [H * P]; None: no norm
    eps: float
    group: int
    norm_first: bool

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate and normalise y, [R, H * P]."""
        return kernels.grouped_gated_norm(
            y, gate, self.weight, self.eps, group=self.group, norm_first=self.norm_first
        )


class HeadMamba:
    """Mamba-2: a selective scan by heads between two projections."""

    def __init__(
        self,
        project: Linear,
        conv: Convolution,
        scan: HeadScan,
        gate: OutputGate,
        out: Linear,
    ) -> None:
        """project: the hidden state to gate, input of the convolution and time steps."""
        self.project = project
        self.conv = conv
        self.scan = scan
        self.gate = gate
        self.out = out

    def __call__(
        self,
        x: torch.Tensor,
        meta: StateMeta,
        cache: tuple[torch.Tensor, ...],
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute the mixer: x [N, hidden] -> [N, hidden], or [R, hidden] for the R tokens in
        ``wanted``. cache: the states of the convolution and of the scan, updated for all N
        tokens."""
        conv_state, state = cache
        num_heads, num_channels = len(self.scan.decay), len(self.conv.weight)
        projected = self.project(x)
        width = projected.shape[1] - num_channels - num_heads
        gate = projected[:, :width]
        xbc = self.conv(projected[:, width : width + num_channels], conv_state, meta)
        y = kernels.head_scan(xbc, projected[:, -num_heads:], self.scan, state, meta)
        if wanted is not None:
            y, gate = y[wanted.rows], gate[wanted.rows]
        return self.out(self.gate(y, gate))


class StepNorms(NamedTuple):
    """RMS norms of the time steps, b and c of a Mamba-1 layer."""

    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    eps: float

    def __call__(self, parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Normalise the three parts, each [N, ...]."""
        pairs = zip(parts, self.weights, strict=True)
        return [kernels.rms_norm(part.contiguous(), weight, self.eps) for part, weight in pairs]


class ChannelMamba:
    """Mamba-1: a selective scan by channels between two projections."""

    def __init__(
        self,
        project: Linear,
        conv: Convolution,
        parameters: Linear,
        steps: Linear,
        norms: StepNorms | None,
        scan: ChannelScan,
        out: Linear,
    ) -> None:
        """project: the hidden state to x and gate. parameters: x to the low-rank time steps, b and
        c; steps: low-rank time steps to those of all channels."""
        self.project = project
        self.conv = conv
        self.parameters = parameters
        self.steps = steps
        self.norms = norms
        self.scan = scan
        self.out = out

    def __call__(
        self,
        x: torch.Tensor,
        meta: StateMeta,
        cache: tuple[torch.Tensor, ...],
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute the mixer; see ``HeadMamba.__call__``."""
        conv_state, state = cache
        projected = self.project(x)
        width, size = len(self.conv.weight), len(self.scan.decay)
        hidden = self.conv(projected[:, :width], conv_state, meta)
        parameters = self.parameters(hidden)
        rank = parameters.shape[1] - 2 * size
        low, bc = parameters[:, :rank], parameters[:, rank:]
        if self.norms is not None:
            low, b, c = self.norms((low, bc[:, :size], bc[:, size:]))
            bc = torch.cat([b, c], 1)
        steps = self.steps(low.contiguous())
        y = kernels.channel_scan(hidden, steps, bc, projected[:, width:], self.scan, state, meta)
        return self.out(y if wanted is None else y[wanted.rows])
