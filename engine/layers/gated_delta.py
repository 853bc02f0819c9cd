"""The gated delta rule of Qwen3-Next, a mixer whose state is a matrix for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kernels
from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from engine.layers.recurrent import Convolution, OutputGate, StateTensors
from kernels.meta import StateMeta


@dataclass(eq=False)
class GatedDelta:
    """Input projections; a causal convolution of queries, keys and values; the gated delta rule; a
    gated norm of each head; output projection."""

    project: Linear  # hidden state to queries, keys, values and the gate of the output
    gates: Linear  # hidden state to b and a, see ``kernels.gated_delta_rule``
    conv: Convolution
    rate: torch.Tensor  # [heads] float32, rate and bias of the decay
    bias: torch.Tensor
    gate: OutputGate
    out: Linear

    def __call__(
        self, x: torch.Tensor, meta: StateMeta, cache: StateTensors, wanted: Wanted | None = None
    ) -> torch.Tensor:
        """Compute the mixer; see ``Mixer``. cache: the state of the convolution and the matrices
        [rows, Hv, Dk, Dv]."""
        conv_state, matrices = cache
        width, projected = len(self.conv.weight), self.project(x)
        qkv = self.conv(projected[:, :width], conv_state, meta)
        y = kernels.gated_delta_rule(qkv, self.gates(x), self.rate, self.bias, matrices, meta)
        return self.out(self.gate(y, projected[:, width:], wanted))
