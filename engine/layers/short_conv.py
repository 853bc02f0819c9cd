"""The short convolution of LFM2, a mixer whose state is the last inputs of each sequence."""

from __future__ import annotations

import torch

import kernels
from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from kernels.meta import StateMeta


class ShortConv:
    """Input projection to b, c and x; c * (causal convolution of b * x); output projection."""

    def __init__(
        self, project: Linear, weight: torch.Tensor, bias: torch.Tensor | None, out: Linear
    ) -> None:
        """weight: [H, L] of the convolution, the current input last; bias: [H]."""
        self.project = project
        self.weight = weight
        self.bias = bias
        self.out = out

    def __call__(
        self,
        x: torch.Tensor,
        meta: StateMeta,
        cache: tuple[torch.Tensor, ...],
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute the mixer: x [N, H] -> [N, H], or [R, H] for the R tokens in ``wanted``. cache:
        one tensor [rows, L - 1, H], updated for all N tokens."""
        (state,) = cache
        gate_in, gate_out, values = self.project(x).chunk(3, dim=1)
        values = kernels.apply_gate(values, gate_in, "")
        y = kernels.causal_conv(values, self.weight, self.bias, "", state, meta)
        if wanted is not None:
            y, gate_out = y[wanted.rows], gate_out[wanted.rows]
        return self.out(kernels.apply_gate(y, gate_out, ""))
