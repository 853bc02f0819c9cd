"""Attention of sequences with many query tokens: tiles of 64 or 128 packed rows on tensor cores.

Bound by arithmetic, so what counts is that a tile is large enough for the warpgroup instructions
and that the loop over keys which all rows see has no mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.meta import AttentionMeta
from kernels.reference import Variant
from kernels.triton.launch import Launch, arch_of
from kernels.triton.tiles import (
    LOG2E,
    Shape,
    attend_range,
    attention_args,
    cache_of,
    head_rows,
    kind_of,
    load_queries,
    scale_of,
    start_state,
    store_rows,
    visible_tiles,
)


@triton.jit
def prefill_kernel(  # noqa: PLR0913
    work, q, kv, tables, query_start, seq_lens, out, sinks, slopes, kv_scales,
    stride_q, stride_block, stride_table, S: tl.constexpr,
):  # fmt: skip
    """Program (item of work, head block); work [items, 2]: sequence (-1: none), first token."""
    seq = tl.load(work + tl.program_id(0) * 2)
    if seq < 0:
        return
    token0 = tl.load(work + tl.program_id(0) * 2 + 1)
    first_head = tl.program_id(1) * S.HEADS
    row0 = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - row0
    num_tokens = tl.minimum(query_len - token0, S.ROWS // S.HEADS)
    rows = head_rows(first_head, num_tokens, S)
    token, head, is_ours = rows
    head = tl.where(is_ours, head, first_head)
    first_pos = tl.load(seq_lens + seq) - query_len + token0
    end_key = first_pos + num_tokens
    first_key = 0
    if S.WINDOW > 0:
        first_key = first_pos - S.WINDOW + 1
    bounds = visible_tiles(first_pos, end_key - 1, S)
    kv_head = first_head // S.GROUP
    queries = load_queries(q, stride_q, row0 + token0, rows, S)
    state = start_state(sinks, head, True, S)
    cache = cache_of(kv, tables + seq.to(tl.int64) * stride_table, stride_block, kv_head, S)
    span = (first_pos + token, first_key, end_key)
    if slopes is not None:
        slopes = tl.load(slopes + head).to(tl.float32) * LOG2E
    bias = (scale_of(kv_scales, kv_head, S), slopes)
    tiles = (bounds[0], bounds[3])
    state = attend_range(state, queries, cache, span, bias, tiles, bounds, S)
    where = (row0 + token0 + token).to(tl.int64) * (S.KV_HEADS * S.GROUP) + head
    store_rows(state, out, None, kv_scales, where, rows, kv_head, S)


def make_work(meta: AttentionMeta, num_tokens: int, tokens_a_program: int) -> torch.Tensor:
    """Items [n, 2] int32 (sequence or -1, first token) of all but the decodes, longest first.

    Made on the device without asking it anything: n is a bound that the host knows.
    """
    query_lens = meta.query_start.diff()
    num_items = (query_lens + tokens_a_program - 1) // tokens_a_program
    num_items[: meta.num_decodes] = 0
    ends = num_items.cumsum(0)
    num_others = len(query_lens) - meta.num_decodes
    bound = (num_tokens - meta.num_decodes) // tokens_a_program + num_others
    item = torch.arange(bound, device=ends.device)
    seq = torch.searchsorted(ends, item, right=True)
    is_real = seq < len(query_lens)
    seq = seq.clamp(max=len(query_lens) - 1)
    token0 = (item - (ends - num_items)[seq]) * tokens_a_program
    keys = meta.seq_lens[seq] - query_lens[seq] + token0
    longest = torch.where(is_real, keys, -1).argsort(descending=True, stable=True)
    return torch.stack((torch.where(is_real, seq, -1), token0), dim=1)[longest].to(torch.int32)


def prefill_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: Variant,
    out: torch.Tensor,
) -> None:
    """Attend every sequence after the first num_decodes. q, out: [N, Hq, D]."""
    prefill_launch(q, kv_layer, meta, variant, out).run()


def prefill_launch(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: Variant,
    out: torch.Tensor,
) -> Launch:
    num_tokens, num_heads, _ = q.shape
    group = num_heads // kv_layer.shape[2]
    arch, kind, is_fixed = arch_of(q), kind_of(q, kv_layer), meta.batch_invariant
    tile = tuning.prefill_tile(arch, kind, meta.max_query_len * group, is_fixed=is_fixed)
    heads = tuning.heads_a_program(group, tile.rows)
    tokens = tile.rows // heads
    key = ("prefill work", tokens)
    if key not in meta.scratch:
        meta.scratch[key] = make_work(meta, num_tokens, tokens)
    shape = Shape.of(q, kv_layer, variant, heads, tile)
    args = attention_args(q, kv_layer, meta, variant, out, shape)
    args["work"] = meta.scratch[key]
    grid = (len(args["work"]), num_heads // heads)
    is_nvidia = arch != "gfx942"
    return Launch(prefill_kernel, grid, args, tile.warps, tile.stages, fills_registers=is_nvidia)
