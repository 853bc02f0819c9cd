"""Causal convolution of each channel over the tokens of a sequence, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.meta import StateMeta
from kernels.reference.pointwise import wide

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
        for back, row in written_rows(meta, s):
            stop = len(window) - back
            state[row] = window[stop - (taps - 1) : stop]
    return out


def states_before(state: torch.Tensor, meta: StateMeta) -> list[torch.Tensor]:
    """Returns a copy of each sequence's state before the step; zeros where it has none."""
    rows = meta.state_reads.tolist()
    return [state[row].clone() if row >= 0 else torch.zeros_like(state[0]) for row in rows]


def written_rows(meta: StateMeta, seq: int) -> list[tuple[int, int]]:
    """Returns the rows to which a sequence's states are written, each after the number of tokens of
    the step that follow the state."""
    rows = [row for row in meta.state_writes[seq].tolist() if row >= 0]
    return list(enumerate(reversed(rows)))
