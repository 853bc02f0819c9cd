"""Attention of sequences with few query tokens: the keys are split among programs, then merged.

Bound by the bytes of the cache, so what counts is that enough programs read at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.meta import AttentionMeta
from kernels.reference import Variant
from kernels.triton.launch import Launch, arch_of
from kernels.triton.merge import Parts
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
    split_of,
    start_state,
    store_rows,
    visible_tiles,
)


@triton.jit(do_not_specialize=["out_row0", "num_rows", "num_splits", "min_tiles", "most_tokens"])
def decode_kernel(  # noqa: PLR0913
    q, kv, tables, query_start, seq_lens, out, lse, sinks, slopes, kv_scales,
    stride_q, stride_block, stride_table, out_row0, num_rows, num_splits, min_tiles, most_tokens,
    S: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head block, split) -> out [splits, num_rows, Hq, D].

    Of several splits also lse [splits, num_rows, Hq], logarithms of the sums of the softmax. What
    has more than most_tokens is left to the other kernel.
    """
    seq = tl.program_id(0)
    first_head = tl.program_id(1) * S.HEADS
    split = tl.program_id(2)
    row0 = tl.load(query_start + seq)
    num_tokens = tl.load(query_start + seq + 1) - row0
    if (num_tokens == 0) | (num_tokens > most_tokens):
        return
    rows = head_rows(first_head, num_tokens, S)
    token, head, is_ours = rows
    head = tl.where(is_ours, head, first_head)
    # A sequence without keys is padding: its row comes out as zeros.
    end_key = tl.load(seq_lens + seq)
    first_pos = end_key - num_tokens
    bounds = visible_tiles(first_pos, end_key - 1, S)
    tiles = split_of(split, bounds, num_splits, min_tiles)
    where = split.to(tl.int64) * num_rows + row0 - out_row0 + token
    where = where * (S.KV_HEADS * S.GROUP) + head
    if split > 0 and tiles[0] >= bounds[3]:
        if lse is not None:
            tl.store(lse + where, tl.full([S.ROWS], float("-inf"), tl.float32), mask=is_ours)
        return
    kv_head = first_head // S.GROUP
    queries = load_queries(q, stride_q, row0, rows, S)
    state = start_state(sinks, head, split == 0, S)
    cache = cache_of(kv, tables + seq.to(tl.int64) * stride_table, stride_block, kv_head, S)
    first_key = 0
    if S.WINDOW > 0:
        first_key = first_pos - S.WINDOW + 1
    span = (first_pos + token, first_key, end_key)
    if slopes is not None:
        slopes = tl.load(slopes + head).to(tl.float32) * LOG2E
    bias = (scale_of(kv_scales, kv_head, S), slopes)
    state = attend_range(state, queries, cache, span, bias, tiles, bounds, S)
    store_rows(state, out, lse, kv_scales, where, rows, kv_head, S)


def decode_launches(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: Variant,
    num_seqs: int,
    out: torch.Tensor,
) -> list[Launch]:
    """Of the first num_seqs sequences, which own q's first rows.

    q, out: [n, Hq, D] of those rows alone. Rows no sequence owns stay as they are. Each sequence
    has at most MAX_DECODE_TOKENS query tokens.
    """
    is_single = num_seqs == meta.num_decodes
    tokens = 1 if is_single else meta.max_query_len
    tile, heads = tile_of(q, kv_layer, tokens)
    programs = num_seqs * (q.shape[1] // heads)
    splits = tuning.decode_splits(
        arch_of(q), programs, meta.max_seq_len, is_fixed=meta.batch_invariant
    )
    parts = Parts.of(out, splits, owns_all=is_single)  # no program writes padding rows
    # Single tokens are bound by memory: there, more programs a processor are worth more.
    fills = not is_single and arch_of(q) != "gfx942"
    launch = decode_launch((q, kv_layer, meta, variant), (num_seqs, tokens), (tile, heads), parts)
    return [launch._replace(fills_registers=fills), *parts.merges]


def tile_of(q: torch.Tensor, kv_layer: torch.Tensor, tokens: int) -> tuple[tuning.Tile, int]:
    """Tile and query heads of a program, for sequences of up to so many tokens."""
    arch, kind = arch_of(q), kind_of(q, kv_layer)
    group, most = q.shape[1] // kv_layer.shape[2], tuning.most_decode_rows(arch, kind) // tokens
    heads = tuning.heads_a_program(group, most)
    return tuning.decode_tile(arch, kind, tuning.pad_power(tokens * heads)), heads


def decode_launch(
    step: tuple[torch.Tensor, torch.Tensor, AttentionMeta, Variant],
    sizes: tuple[int, int],
    tile_heads: tuple[tuning.Tile, int],
    parts: Parts,
) -> Launch:
    """step: queries, cache, sequences, variant; sizes: sequences, and tokens of one at most."""
    q, kv_layer, meta, variant = step
    (num_seqs, most_tokens), (tile, heads) = sizes, tile_heads
    shape = Shape.of(q, kv_layer, variant, heads, tile)
    args = attention_args(q, kv_layer, meta, variant, shape) | parts.args(tile.keys)
    args["most_tokens"] = most_tokens
    grid = (num_seqs, q.shape[1] // heads, parts.splits.num)
    return Launch(decode_kernel, grid, args, tile.warps, tile.stages)
