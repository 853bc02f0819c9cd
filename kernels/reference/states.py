"""Layers with a recurrent state, which they read from one row of a state tensor and write to
others."""

from __future__ import annotations

import torch

from kernels.meta import StateMeta


def short_conv(
    bcx: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Gated causal convolution over each sequence, [N, 3C] -> [N, C]; see `kernels.ops.short_conv`.
    Rows that belong to no sequence are zeros. Float64 is computed in float64, all else in
    float32."""
    gate_in, gate_out, x = bcx.chunk(3, dim=-1)
    product = gate_in * x
    wide = torch.float64 if bcx.dtype is torch.float64 else torch.float32
    out = torch.zeros_like(gate_out)
    taps = weight.shape[1]
    bounds, reads = meta.query_start.tolist(), meta.state_reads.tolist()
    # Read all states before any is written.
    before = [state[row].clone() if row >= 0 else torch.zeros_like(state[0]) for row in reads]
    for s, old in enumerate(before):
        first, end = bounds[s], bounds[s + 1]
        window = torch.cat([old, product[first:end]])  # [L - 1 + tokens, C]
        folded = window.to(wide).unfold(0, taps, 1)  # [tokens, C, L]
        total = (folded * weight.to(wide)).sum(-1)
        if bias is not None:
            total += bias.to(wide)
        out[first:end] = gate_out[first:end] * total.to(bcx.dtype)
        rows = [row for row in meta.state_writes[s].tolist() if row >= 0]
        for back, row in enumerate(reversed(rows)):
            stop = len(window) - back
            state[row] = window[stop - (taps - 1) : stop]
    return out
