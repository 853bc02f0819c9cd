"""Causal convolution of each channel over the tokens of a sequence, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.meta import StateMeta
from kernels.reference.pointwise import wide
from kernels.reference.states import states_before, written_rows

ACTIVATIONS = ("", "silu")


def check_activation(activation: str) -> None:
    """Raise ``ValueError`` for an activation that `causal_conv` does not support."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation {activation!r} of a causal convolution is unknown; use 'silu' or '' (none)"
        )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Causal depthwise convolution of each sequence, [N, C] -> [N, C]; see
    `kernels.ops.causal_conv`."""
    check_activation(activation)
    before = states_before(state, meta)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    taps, bounds = weight.shape[1], meta.query_start.tolist()
    for s, old in enumerate(before):
        first, end = bounds[s], bounds[s + 1]
        if first == end:
            continue
        window = torch.cat([old, x[first:end]])  # [L - 1 + tokens, C]
        total = (wide(window).unfold(0, taps, 1) * wide(weight)).sum(-1)
        if bias is not None:
            total = total + wide(bias)
        out[first:end] = F.silu(total) if activation else total
        for back, row in written_rows(meta, s).items():
            stop = len(window) - back
            state[row] = window[stop - (taps - 1) : stop]
    return out
