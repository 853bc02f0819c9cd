"""The gated delta rule, a recurrence whose state is a matrix for each head, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.meta import StateMeta
from kernels.reference.pointwise import wide
from kernels.reference.states import advance_states

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
    computed in float64, all else in float32."""
    _, heads, key_dim, dim = state.shape
    query, key, value = split_heads(wide(qkv), state.shape)
    query, key = (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (query, key)
    )
    query = query * key_dim**-0.5
    beta, step = wide(gates).chunk(2, dim=-1)
    beta = beta.sigmoid()
    decay = (rate.to(step.dtype) * F.softplus(step + bias.to(step.dtype))).exp()

    def advance(matrix: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = matrix * decay[token, :, None, None]
        expected = torch.einsum("hkv,hk->hv", matrix, key[token])
        change = (value[token] - expected) * beta[token, :, None]
        matrix = matrix + key[token, :, :, None] * change[:, None]
        return matrix, torch.einsum("hkv,hk->hv", matrix, query[token]).flatten()

    out = qkv.new_zeros((len(qkv), heads * dim))
    return advance_states(advance, out, state, meta)


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
