"""The gated delta rule, a recurrence whose state is a matrix for each head, and the gates of its
families."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.meta import StateMeta
from kernels.reference.pointwise import wide

NORM_EPS = 1e-6  # in the l2 norm of queries and keys


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Compute the recurrence token by token; see `kernels.ops.gated_delta_rule`. Float64 is
    computed in float64, all else in float32. Rows that belong to no sequence are zeros."""
    _, heads, key_dim, dim = state.shape
    query, key, value = split_heads(wide(qkv), state.shape)
    query, key = (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (query, key)
    )
    query = query * key_dim**-0.5
    beta, step = wide(gates).chunk(2, dim=-1)
    beta = beta.sigmoid()
    decay = (rate.to(step.dtype) * F.softplus(step + bias.to(step.dtype))).exp()
    out = torch.zeros_like(value)
    bounds, writes = meta.query_start.tolist(), meta.state_writes.tolist()
    # Read all states before any is written.
    before = [
        state[row].to(value.dtype) if row >= 0 else value.new_zeros(heads, key_dim, dim)
        for row in meta.state_reads.tolist()
    ]
    for s, matrix in enumerate(before):
        rows = [row for row in writes[s] if row >= 0]
        first_written = bounds[s + 1] - len(rows)
        for t in range(bounds[s], bounds[s + 1]):
            matrix = matrix * decay[t, :, None, None]
            expected = torch.einsum("hkv,hk->hv", matrix, key[t])
            change = (value[t] - expected) * beta[t, :, None]
            matrix = matrix + key[t, :, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", matrix, query[t])
            if t >= first_written:
                state[rows[t - first_written]] = matrix.to(state.dtype)
    return out.flatten(1).to(qkv.dtype)


def split_heads(
    qkv: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the columns of ``qkv`` into queries and keys [N, heads, key_dim], repeated for the
    value heads that share them, and values [N, heads, dim]. shape: of a state tensor."""
    _, heads, key_dim, dim = shape
    keys = (qkv.shape[1] - heads * dim) // 2
    query, key, value = qkv.split((keys, keys, heads * dim), dim=-1)
    query, key = (
        x.unflatten(1, (-1, key_dim)).repeat_interleave(heads * key_dim // keys, 1)
        for x in (query, key)
    )
    return query, key, value.unflatten(1, (heads, dim))


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate); see `kernels.ops.sigmoid_mul`."""
    return (wide(x) * wide(gate).sigmoid()).to(x.dtype)
