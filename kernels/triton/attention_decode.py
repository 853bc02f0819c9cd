"""Attention of sequences with few query tokens: the keys of a sequence are divided among several
programs, and the programs' results are merged.

Reading the cache takes most of the time, so there must be enough programs with equal numbers of
keys. `shares.py` plans once per step which program reads which keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.meta import AttentionMeta
from kernels.reference import AttentionOptions
from kernels.triton.launch import Launch, arch_of
from kernels.triton.merge import spans_launch
from kernels.triton.shares import SharesPlan
from kernels.triton.tiles import (
    Shape,
    attend_range,
    attention_args,
    biases_of,
    cache_of,
    head_rows,
    kind_of,
    load_queries,
    places_of,
    scale_of,
    start_state,
    store_rows,
    visible_tiles,
)


@triton.jit(do_not_specialize=["most_tokens"])
def decode_kernel(  # noqa: PLR0913
    items, q, kv, tables, query_start, seq_lens, out, parts, lse, sinks, slopes, kv_scales,
    stride_q, stride_block, stride_table, most_tokens,
    S: tl.constexpr,
):  # fmt: skip
    """One program per (work item of the plan, block of heads); without a plan (items None), per
    (sequence, block of heads). An item is all or a part of the keys of a sequence.

    A sequence with one item is written to out [tokens, Hq, D]. Otherwise each item is written to
    parts [slots, most_tokens, Hq, D], and the logarithms of its softmax sums to lse [slots,
    most_tokens, Hq]. Sequences with more than most_tokens query tokens are skipped.
    """
    item = tl.program_id(0)
    seq = item
    if items is not None:
        seq = tl.load(items + item * 4)
        if seq < 0:
            return
    first_head = tl.program_id(1) * S.HEADS
    row0 = tl.load(query_start + seq)
    num_tokens = tl.load(query_start + seq + 1) - row0
    if (num_tokens == 0) | (num_tokens > most_tokens):
        return
    rows = head_rows(first_head, num_tokens, S)
    token, head, is_ours = rows
    head = tl.where(is_ours, head, first_head)
    # A sequence without keys is padding; its output is zeros.
    end_key = tl.load(seq_lens + seq)
    first_pos = end_key - num_tokens
    bounds = visible_tiles(first_pos, end_key - 1, end_key, S)
    tiles = (bounds[0] + 0, bounds[3])
    if items is not None:
        tiles = (tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2))
    kv_head = first_head // S.GROUP
    queries = load_queries(q, stride_q, row0, rows, S)
    state = start_state(sinks, head, tiles[0] == bounds[0], S)
    cache = cache_of(kv, tables + seq.to(tl.int64) * stride_table, stride_block, kv_head, S)
    first_key = 0
    if S.WINDOW > 0:
        first_key = first_pos - S.WINDOW + 1
    span = (first_pos + token, first_key, end_key)
    if slopes is not None:
        slopes = biases_of(slopes, head, S)
    bias = (scale_of(kv_scales, kv_head, S), slopes)
    state = attend_range(state, queries, cache, span, bias, tiles, bounds, S)
    where = places_of(row0, first_head, S)
    if items is None:
        store_rows(state, out, None, kv_scales, where, rows, kv_head, S)
    else:
        slot = tl.load(items + item * 4 + 3)
        if slot < 0:
            store_rows(state, out, None, kv_scales, where, rows, kv_head, S)
        else:
            where = places_of(slot * most_tokens, first_head, S)
            store_rows(state, parts, lse, kv_scales, where, rows, kv_head, S)


def decode_launches(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: AttentionOptions,
    num_seqs: int,
    out: torch.Tensor,
) -> list[Launch]:
    """Returns the launches for the first num_seqs sequences, each with at most MAX_DECODE_TOKENS
    query tokens. q, out: [n, Hq, D], the rows of these sequences. Rows of no sequence are not
    written."""
    is_single = num_seqs == meta.num_decodes
    tokens = 1 if is_single else meta.max_query_len
    # Single tokens are bound by memory, so more programs per processor are better than more
    # registers, except for long 8-bit rows, which are widened in registers.
    fills = not is_single or kind_of(q, kv_layer) == (2, 1, 256)
    return launches_of((q, kv_layer, meta, variant), (num_seqs, tokens), out, fills=fills)


def tile_of(
    q: torch.Tensor, kv_layer: torch.Tensor, sizes: tuple[int, int]
) -> tuple[tuning.Tile, int]:
    """Return the tile sizes of the decode kernel and the number of query heads per program. sizes:
    (number of sequences, maximum query tokens of a sequence)."""
    num_seqs, tokens = sizes
    arch, kind = arch_of(q), kind_of(q, kv_layer)
    group, most = q.shape[1] // kv_layer.shape[2], tuning.most_decode_rows(arch, kind) // tokens
    heads = tuning.heads_a_program(group, most)
    is_lone = tuning.is_lone(arch, num_seqs * q.shape[1] // heads)
    rows = tuning.pad_power(tokens * heads)
    return tuning.decode_tile(arch, kind, rows, is_lone=is_lone), heads


def launches_of(
    step: tuple[torch.Tensor, torch.Tensor, AttentionMeta, AttentionOptions],
    sizes: tuple[int, int],
    out: torch.Tensor,
    *,
    fills: bool,
) -> list[Launch]:
    """Return the kernel launches of decode attention: planning (once per step), attention, and
    merging if keys of a sequence may be split among programs.

    step: (queries, cache, meta, options); sizes: (number of sequences, maximum query tokens of a
    sequence); fills: let the attention kernel use all registers."""
    q, kv_layer, meta, variant = step
    num_seqs, most_tokens = sizes
    arch, (tile, heads) = arch_of(q), tile_of(q, kv_layer, sizes)
    shape = Shape.of(q, kv_layer, variant, heads, tile)
    blocks = q.shape[1] // heads
    shares = tuning.decode_shares(arch, num_seqs * blocks, blocks, meta.max_seq_len)
    args = attention_args(q, kv_layer, meta, variant, shape)
    args |= {"items": None, "out": out, "parts": None, "lse": None, "most_tokens": most_tokens}
    attend = Launch(decode_kernel, (num_seqs, blocks), args, tile.warps, tile.stages)
    attend = attend._replace(fills_registers=fills and arch != "gfx942")
    if shares is None:
        return [attend]
    plan, made_by = SharesPlan.of(meta, shares, sizes, tile.keys, variant.window)
    parts = q.new_empty((plan.num_slots, most_tokens, *q.shape[1:]), dtype=torch.float32)
    lse = parts.new_empty(parts.shape[:-1])
    args |= {"items": plan.items, "parts": parts, "lse": lse}
    attend = attend._replace(grid=(len(plan.items), blocks))
    return [*made_by, attend, spans_launch(parts, lse, plan.spans, meta.query_start, out)]
