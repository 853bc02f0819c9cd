"""Builds the Mamba layers of a decoder from its spec and weights."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.interface import Linear, Mixer
from engine.layers.mamba import ChannelMamba, HeadMamba, StepNorms
from engine.layers.parallel import GateOfAllHeads
from engine.layers.recurrent import Convolution, Gate, OutputGate
from engine.models.sharding import DecoderSlice
from engine.models.spec import ChannelMambaSpec, DecoderSpec, HeadMambaSpec
from engine.parallel.collectives import Collectives
from kernels.reference.selective_scan import ChannelScan, HeadScan


class Parts(Protocol):
    """Provides the tensors of one decoder."""

    mine: DecoderSlice
    spec: DecoderSpec
    ranks: Collectives | None

    def linear(self, name: str, has_bias: bool = False) -> Linear: ...
    def summed(self, layer: Linear) -> Linear: ...
    def tensor(self, name: str) -> torch.Tensor: ...


def make_mamba(parts: Parts, index: int) -> Mixer:
    """Build the Mamba mixer of a layer."""
    mamba = parts.spec.mamba
    assert mamba is not None
    project = parts.linear(f"{index}.mamba_in", mamba.bias)
    weight = parts.tensor(f"{index}.conv").flatten(1)
    bias = parts.tensor(f"{index}.conv_bias") if mamba.conv_bias else None
    conv = Convolution(weight, bias)
    if isinstance(mamba, HeadMambaSpec):
        return _by_heads(parts, index, mamba, project, conv)
    return _by_channels(parts, index, mamba, project, conv)


def _floats(parts: Parts, name: str) -> torch.Tensor:
    return parts.tensor(name).float().contiguous()


def _by_heads(
    parts: Parts, index: int, mamba: HeadMambaSpec, project: Linear, conv: Convolution
) -> HeadMamba:
    decay = -_floats(parts, f"{index}.a_log").exp()
    skip, dt_bias = (_floats(parts, f"{index}.{name}") for name in ("skip", "dt_bias"))
    weight = parts.tensor(f"{index}.gate_norm") if mamba.has_norm else None
    gate = _gate(parts, mamba, weight)
    out = parts.linear(f"{index}.mamba_out", mamba.out_bias)
    return HeadMamba(project, conv, HeadScan(decay, skip, dt_bias, mamba.dt_limits), gate, out)


def _gate(parts: Parts, mamba: HeadMambaSpec, weight: torch.Tensor | None) -> Gate:
    whole, eps = parts.mine.whole.mamba, parts.spec.norm.eps
    assert isinstance(whole, HeadMambaSpec)
    group = whole.norm_group or whole.width // whole.num_groups
    if weight is None or parts.ranks is None or mamba.width % group == 0:
        return OutputGate(weight, eps, group, mamba.norm_first)
    return GateOfAllHeads(
        weight,
        eps,
        group,
        first=parts.ranks.rank * mamba.width,
        norm_first=mamba.norm_first,
        num_groups=whole.width // group,
        ranks=parts.ranks,
    )


def _by_channels(
    parts: Parts, index: int, mamba: ChannelMambaSpec, project: Linear, conv: Convolution
) -> ChannelMamba:
    decay = -_floats(parts, f"{index}.a_log").exp().T.contiguous()
    skip = _floats(parts, f"{index}.skip")
    parameters, steps = (parts.linear(f"{index}.{name}") for name in ("parameters", "steps"))
    parameters = parts.summed(parameters)
    scan = ChannelScan(decay, skip, _floats(parts, f"{index}.dt_bias"))
    norms = None
    if mamba.norms == "stored":
        dt, b, c = (parts.tensor(f"{index}.{name}_norm") for name in ("dt", "b", "c"))
        norms = StepNorms((dt, b, c), mamba.norm_eps)
    elif mamba.norms == "plain":
        ones = conv.weight.new_ones(max(mamba.rank, mamba.state_size))
        b = ones[: mamba.state_size]
        norms = StepNorms((ones[: mamba.rank], b, b), mamba.norm_eps)
    out = parts.linear(f"{index}.mamba_out", mamba.out_bias)
    return ChannelMamba(project, conv, parameters, steps, norms, scan, out)
