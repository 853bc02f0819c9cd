"""The operations of layers; the device of the tensors selects the implementation.

N tokens, H hidden size, Hq query heads, Hkv key and value heads, D head size. Arithmetic is in
float32 for every dtype; values are rounded at the same points as in transformers, so that greedy
tokens agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from kernels import cpu, reference
from kernels.bodies import triton_for
from kernels.cpu import rank_norms, vocabulary
from kernels.cpu.cells import DTYPES as CELLS
from kernels.low_rank import AdaptedRows, ProductTable
from kernels.meta import AttentionMeta, ColumnGroups, StateMeta
from kernels.reference import grouped
from kernels.reference.selective_scan import ChannelScan, HeadScan


def _bodies(x: torch.Tensor):
    return triton_for(x) or cpu


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add_one: bool = False
) -> torch.Tensor:
    """x / rms(x) * weight over the last axis. add_one: the factor is 1 + weight, as in Gemma.

    x: [..., H], weight: [H]. Returns a new tensor of x's shape and dtype.
    """
    return _bodies(x).rms_norm(x, weight, eps, add_one=add_one)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    add_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual), both new tensors. x, residual: [N, H]."""
    return _bodies(x).add_rms_norm(x, residual, weight, eps, add_one=add_one)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """(y - mean(y)) / std(y) * weight + bias over the last axis, for y = x, or x + residual.

    x, residual: [N, H]; weight, bias: [H] float32. Returns a new tensor of x's shape and dtype.
    """
    return _bodies(x).layer_norm(x, weight, bias, eps, residual)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (layer_norm(x + residual), x + residual), both new tensors [N, H]."""
    return _bodies(x).add_layer_norm(x, residual, weight, bias, eps)


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """act(x), a new tensor: x [N, F]. act: "silu", "gelu_tanh", "gelu" or "relu"."""
    return _bodies(x).activate(x, act)


def act_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """act(first half of the last axis) * second half: [N, 2F] -> [N, F].

    act: "silu", "gelu_tanh" or "gelu".
    """
    return _bodies(gate_up).act_mul(gate_up, act)


def join_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate matrices [N, C] along their columns. Returns a new contiguous tensor; one matrix
    is copied."""
    return cpu.join_columns(parts) if _bodies(parts[0]) is cpu else torch.cat(list(parts), 1)


def scale_in_place(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply x [N, H] by a factor in place. Returns x."""
    return cpu.scale_in_place(x, factor) if _bodies(x) is cpu else x.mul_(factor)


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add y [N, H] to x [N, H] in place. Returns x."""
    return cpu.add_in_place(x, y) if _bodies(x) is cpu else x.add_(y)


def own_rows(ids: torch.Tensor, mine: range) -> torch.Tensor:
    """Rows of tokens ids [N] in a table that has only the rows of the tokens ``mine``; 0 for other
    tokens. Returns a new tensor of the dtype of ids, int32 or int64."""
    if _bodies(ids) is cpu and ids.is_contiguous():
        return vocabulary.own_rows(ids, mine)
    rows = ids - mine.start
    return rows.masked_fill_((rows < 0) | (rows >= len(mine)), 0)


def clear_others(x: torch.Tensor, ids: torch.Tensor, mine: range) -> torch.Tensor:
    """Set the rows of x [N, H] to zero, in place, whose tokens in ids [N] are not among ``mine``.
    Returns x."""
    if _bodies(x) is cpu and x.is_contiguous() and ids.is_contiguous():
        return vocabulary.clear_others(x, ids, mine)
    return x.masked_fill_(((ids < mine.start) | (ids >= mine.stop))[:, None], 0)


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, table: ProductTable, rows: AdaptedRows
) -> torch.Tensor:
    """Add the low-rank products of each row's adapter to y [N, out] in place. Returns y.

    x: [N, in], the inputs of the linear layer whose outputs are y; table: the layer's products by
    adapter slot; rows: which rows use which slot; both are on the device of x. Other rows are
    unchanged. A row's result depends on no other row.
    """
    return _bodies(x).add_low_rank(y, x, table, rows)


def sums_of_squares(x: torch.Tensor, groups: ColumnGroups) -> torch.Tensor:
    """Sums of the squares of each group's columns in x [N, C]. Returns [N, G] float32."""
    if _bodies(x) is cpu and x.dtype in CELLS and x.is_contiguous():
        return rank_norms.sums_of_squares(x, groups)
    return reference.sums_of_squares(x, groups)


def scale_groups(
    x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, groups: ColumnGroups, eps: float
) -> torch.Tensor:
    """x / rms(x) * weight over each group of columns, in place; other columns are unchanged.
    Returns x.

    x: [N, C]; sums: [N, G] float32, of the squares of all columns of a group; weight: [C] float32.
    """
    if _bodies(x) is cpu and x.dtype in CELLS and x.is_contiguous():
        return rank_norms.scale_groups(x, sums, weight, groups, eps)
    return reference.scale_groups(x, sums, weight, groups, eps)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) ** 2: x [N, F] -> a new [N, F]."""
    return _bodies(x).relu_squared(x)


def apply_gate(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """x * activation(gate), a new tensor: x [N, F]; gate [N, F] or [N, 1]. Rows of both may be
    apart. activation: "sigmoid", or "" for none."""
    return _bodies(x).apply_gate(x, gate, activation)


def grouped_gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group: int,
    norm_first: bool = False,
) -> torch.Tensor:
    """RMS norm of x * silu(gate) over each `group` columns, times weight. Returns [N, H].

    x, gate: [N, H], whose rows may be apart. weight: [H]; None: no norm, only the gate.
    norm_first: x is normalised, and the result is multiplied by silu(gate).
    """
    body = _bodies(x)
    return body.grouped_gated_norm(x, gate, weight, eps, group=group, norm_first=norm_first)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias: x [.., K], weight [N, K], bias [N] -> [.., N] of x's dtype."""
    # torch reaches only 50 to 90 % of the bandwidth in this memory-bound product of one row.
    body = triton_for(x)
    if body is not None and is_one_row(x, weight):
        return body.matvec(x, weight, bias)
    return F.linear(x, weight, bias)


def is_one_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if x is a single row for which `linear` on a GPU uses our kernel instead of torch."""
    is_one = x.numel() == x.shape[-1] and x.is_contiguous()
    return is_one and weight.dtype.itemsize == 2 and weight.stride(1) == 1


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Like `linear`, but a row's result is bit-identical whatever the other rows are. Only for
    GPUs; on CPUs, `linear` itself has this property."""
    body = triton_for(x)
    assert body is not None, "invariant_linear() is only for GPUs"
    return body.invariant_linear(x, weight, bias)


def mixture(
    x: torch.Tensor,
    gate_up: grouped.Experts,
    down: grouped.Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    act: str,
) -> torch.Tensor:
    """Mixture of experts: the weighted sum of each token's expert outputs, x [N, H] -> [N, H]. The
    arguments are described in `kernels.reference.grouped.mixture`."""
    body = triton_for(x) or grouped
    return body.mixture(x, gate_up, down, chosen, weights, act)


def qkv_rope_write(  # noqa: PLR0913
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_add_one: bool = False,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and write K and V to the cache. Returns q [N, Hq, D].

    qkv: [N, (Hq + 2 Hkv) * D]. kv_layer: [num_blocks, 2, Hkv, block_size, D] (int8: D + 4, see
    `kernels.reference.kv_rows`), written at meta.slots (-1: not written). cos_sin: [max_pos, rot],
    each row cosines, then sines, rot <= D; None: no rotation. interleaved: rotated pairs are (2i,
    2i + 1) instead of (i, i + rot / 2). q_norm, k_norm: norm weights, [D] for each head, or [Hq *
    D] and [Hkv * D] for all heads together (OLMo-2). kv_scales: [2, Hkv] float32, scales of keys
    and values; a cache of 8-bit floats stores x / scale, clamped to 448.
    """
    rope = reference.Rope(cos_sin, interleaved)
    norm = reference.HeadNorm(q_norm, k_norm, norm_eps, norm_add_one)
    heads = (num_heads, num_kv_heads, head_dim)
    return _bodies(qkv).qkv_rope_write(qkv, kv_layer, meta, heads, rope, norm, kv_scales)


def paged_attention(  # noqa: PLR0913
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens over the cache, which already contains their K and V.

    q: [N, Hq, D]; returns [N, Hq * D]. Sequences may be decodes (one token) or prompt chunks with
    any context. window: the query at position p attends to keys p - window + 1 .. p; 0: all.
    softcap: scores become cap * tanh(score / cap); 0: unchanged. causal: False lets a query attend
    to later keys in the cache, too: with a window to p - window + 1 .. p + window - 1, else to all.
    sinks: [Hq], for each head the logit of a key without a value. alibi: [Hq] slopes; slope *
    (query position - key position) is subtracted from scores; only causal. kv_scales: as in
    qkv_rope_write. distances: [Hq, 2 L + 1] float32; its entry key position - query position + L is
    added to scores; sequences have at most L - 15 tokens, and are computed in one step. Rows after
    the last sequence are zeros.
    """
    options = reference.AttentionOptions(
        scale, window, softcap, causal, sinks, alibi, kv_scales, distances
    )
    return _bodies(q).paged_attention(q, kv_layer, meta, options)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Causal convolution of each channel over the tokens of its sequence, then the activation.

    x: [N, C], whose rows may be apart. weight: [C, L], the last tap is the token's own. bias: [C].
    activation: "silu", or "" for none. state: [rows, L - 1, C], the inputs before the step, oldest
    first; read and written at the rows that `meta` names. Returns [N, C]; rows that belong to no
    sequence are zeros. Results do not depend on how a sequence is divided into steps.
    """
    return _bodies(x).causal_conv(x, weight, bias, activation, state, meta)


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """The gated delta rule over each sequence: Hv value heads, Hk key heads, which serve Hv / Hk
    adjacent value heads each, Dk and Dv their sizes.

    A token multiplies a head's state, a matrix [Dk, Dv], by exp(rate * softplus(a + bias)), adds k
    (x) sigmoid(b) * (v - k @ state), and outputs q @ state; q and k have l2 norm 1, and q is
    scaled by Dk ** -0.5. qkv: [N, 2 Hk Dk + Hv Dv], the columns of q, k and v. gates: [N, 2 Hv],
    the columns of b and a. rate, bias: [Hv] float32. state: [rows, Hv, Dk, Dv], read and written at
    the rows that ``meta`` names. Returns [N, Hv Dv] of qkv's dtype; rows that belong to no sequence
    are zeros. A sequence's results are the same bits however it is cut into steps; on a GPU this
    needs `meta.batch_invariant`.
    """
    return _bodies(qkv).gated_delta_rule(qkv, gates, rate, bias, state, meta)


def head_scan(
    xbc: torch.Tensor, dt: torch.Tensor, layer: HeadScan, state: torch.Tensor, meta: StateMeta
) -> torch.Tensor:
    """Selective scan by heads (Mamba-2) over the tokens of each sequence.

    For each head and token: state = exp(t * A) * state + t * b x, then y = c state + D * x, with
    the time step t = softplus(dt + dt_bias), limited. H heads of width P, states of size S; the
    heads are divided into G groups, which share b and c.

    xbc: [N, H * P + 2 * G * S], x of all heads, then b and c of all groups. dt: [N, H]. Rows of
    both may be apart. state: [rows, H, S, P], read and written at the rows that `meta` names.
    Returns y [N, H * P]; rows that belong to no sequence are zeros. Results do not depend on how a
    sequence is divided into steps; on a GPU this needs `meta.batch_invariant`.
    """
    return _bodies(xbc).head_scan(xbc, dt, layer, state, meta)


def channel_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    bc: torch.Tensor,
    gate: torch.Tensor,
    layer: ChannelScan,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Selective scan by channels (Mamba-1) over the tokens of each sequence, then the gate.

    For each channel and token: state = exp(t * A) * state + t * x * b, then y = (c state + D * x) *
    silu(gate), with the time step t = softplus(dt + dt_bias).

    x, dt, gate: [N, C]; bc: [N, 2 * S], b and c of all channels. Rows may be apart. state: [rows,
    S, C], read and written at the rows that `meta` names. Returns y [N, C]; rows that belong to no
    sequence are zeros. Results do not depend on how a sequence is divided into steps.
    """
    return _bodies(x).channel_scan(x, dt, bc, gate, layer, state, meta)
