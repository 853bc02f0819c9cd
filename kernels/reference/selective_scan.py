"""Selective scans over the tokens of each sequence, in plain torch: Mamba-2 by heads, Mamba-1 by
channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from kernels.meta import StateMeta
from kernels.reference.pointwise import wide
from kernels.reference.states import advance_states


class HeadScan(NamedTuple):
    """The parameters of a scan by heads. All tensors are float32, [H]."""

    decay: torch.Tensor  # A, negative
    skip: torch.Tensor  # D, how much of x is added to the output
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float] = (0.0, float("inf"))  # of the time step after softplus


class ChannelScan(NamedTuple):
    """The parameters of a scan by channels. All tensors are float32."""

    decay: torch.Tensor  # A, negative, [S, C]
    skip: torch.Tensor  # D, [C]
    dt_bias: torch.Tensor  # [C]


def head_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    layer: HeadScan,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Scan by heads: [N, H * P + 2 * G * S] -> [N, H * P]; see `kernels.ops.head_scan`."""
    _, heads, size, width = state.shape
    num_groups = (xbc.shape[1] - heads * width) // (2 * size)
    x, b, c = wide(xbc).split([heads * width, num_groups * size, num_groups * size], dim=1)
    x = x.reshape(len(x), heads, width)
    b, c = (
        part.reshape(len(x), num_groups, size).repeat_interleave(heads // num_groups, 1)
        for part in (b, c)
    )
    steps = F.softplus(wide(dt) + layer.dt_bias.to(x.dtype)).clamp(*layer.dt_limits)
    decays = (steps * layer.decay.to(x.dtype)).exp()

    def advance(held: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        moved = x[token] * steps[token, :, None]
        held = held * decays[token, :, None, None] + b[token, :, :, None] * moved[:, None]
        y = (c[token, :, :, None] * held).sum(1) + x[token] * layer.skip.to(x.dtype)[:, None]
        return held, y.flatten()

    out = xbc.new_zeros((len(xbc), heads * width))
    return advance_states(advance, out, state, meta)


def channel_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    bc: torch.Tensor,
    gate: torch.Tensor,
    layer: ChannelScan,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Scan by channels: [N, C] -> [N, C]; see `kernels.ops.channel_scan`."""
    values, gates = wide(x), F.silu(wide(gate))
    b, c = wide(bc).chunk(2, dim=1)
    steps = F.softplus(wide(dt) + layer.dt_bias.to(values.dtype))
    decay, skip = layer.decay.to(values.dtype), layer.skip.to(values.dtype)

    def advance(held: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        moved = values[token] * steps[token]
        held = held * (steps[token] * decay).exp() + b[token, :, None] * moved
        y = (c[token, :, None] * held).sum(0) + values[token] * skip
        return held, y * gates[token]

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    return advance_states(advance, out, state, meta)
