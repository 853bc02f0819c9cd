"""The gated delta rule of Qwen3-Next, a mixer whose state is a matrix for each head."""

from __future__ import annotations

import torch

import kernels
from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from engine.layers.sublayers import RMSNorm
from kernels.meta import StateMeta


class GatedDelta:
    """Input projections; a causal convolution of queries, keys and values; the gated delta rule; a
    gated norm of each head; output projection."""

    def __init__(
        self,
        project: Linear,
        gates: Linear,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        norm: RMSNorm,
        out: Linear,
    ) -> None:
        """project: to queries, keys, values and the norm's gate; gates: to the columns of b and a.
        weights: of the convolution, [C, L], for C columns of queries, keys and values; rate and
        bias of the decay, see ``kernels.gated_delta_rule``. norm: of one head."""
        self.project = project
        self.gates = gates
        self.conv, self.rate, self.bias = weights
        self.eps = norm.eps
        self.group = len(norm.weight)
        self.norm_weight = norm.weight.repeat(len(self.rate))  # of all heads
        self.out = out

    def __call__(
        self,
        x: torch.Tensor,
        meta: StateMeta,
        cache: tuple[torch.Tensor, ...],
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute the mixer: x [N, H] -> [N, H], or [R, H] for the R tokens in ``wanted``. cache:
        the last inputs of the convolution [rows, L - 1, C] and the matrices [rows, Hv, Dk, Dv],
        updated for all N tokens."""
        window, matrices = cache
        width, projected = len(self.conv), self.project(x)
        qkv = kernels.causal_conv(projected[:, :width], self.conv, None, "silu", window, meta)
        y = kernels.gated_delta_rule(qkv, self.gates(x), self.rate, self.bias, matrices, meta)
        gate = projected[:, width:]
        if wanted is not None:
            y, gate = y[wanted.rows], gate[wanted.rows]
        y = kernels.grouped_gated_norm(
            y, gate, self.norm_weight, self.eps, group=self.group, norm_first=True
        )
        return self.out(y)
