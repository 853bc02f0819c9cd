"""Attention of sequences with many query tokens, on tensor cores. A tile has 64 or 128 rows, one
per query token and query head of one KV head.

Arithmetic takes most of the time. So tiles are large enough for warpgroup instructions, and keys to
which all rows attend are read in a loop without a mask. A few query tokens after a long context
make too few tiles to fill a device; then their keys are split among programs, as for decodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.meta import AttentionMeta
from kernels.reference import AttentionOptions
from kernels.triton.launch import Launch, arch_of
from kernels.triton.merge import Parts
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
    split_of,
    start_state,
    store_rows,
    visible_tiles,
)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "min_tiles", "out_row0"])
def prefill_kernel(  # noqa: PLR0913
    work, q, kv, tables, query_start, seq_lens, out, lse, sinks, slopes, kv_scales,
    stride_q, stride_block, stride_table, out_row0, num_rows, num_splits, min_tiles,
    S: tl.constexpr,
):  # fmt: skip
    """One program per (work item, block of heads, split of the keys). Writes out [splits, num_rows,
    Hq, D] and, if keys are split, the logarithms of softmax sums: lse [splits, num_rows, Hq].

    work [items, 2]: sequence (-1: none) and first query token of each item. Row 0 of out is for row
    out_row0 of q.
    """
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
    last_pos = first_pos + num_tokens - 1
    end_key = last_pos + 1
    if not S.CAUSAL:
        end_key = tl.load(seq_lens + seq)
        if S.WINDOW > 0:
            end_key = tl.minimum(last_pos + S.WINDOW, end_key)
    first_key = 0
    if S.WINDOW > 0:
        first_key = first_pos - S.WINDOW + 1
    bounds = visible_tiles(first_pos, last_pos, end_key, S)
    split = tl.program_id(2)
    tiles = split_of(split, bounds, num_splits, min_tiles)
    if split > 0 and tiles[0] >= bounds[3]:
        return  # its part of lse is initialised to -inf
    kv_head = first_head // S.GROUP
    queries = load_queries(q, stride_q, row0 + token0, rows, S)
    state = start_state(sinks, head, split == 0, S)
    cache = cache_of(kv, tables + seq.to(tl.int64) * stride_table, stride_block, kv_head, S)
    span = (first_pos + token, first_key, end_key)
    if slopes is not None:
        slopes = biases_of(slopes, head, S)
    bias = (scale_of(kv_scales, kv_head, S), slopes)
    state = attend_range(state, queries, cache, span, bias, tiles, bounds, S)
    where = places_of(row0 - out_row0 + token0, first_head, S)
    where += split.to(tl.int64) * num_rows * (S.KV_HEADS * S.GROUP)
    store_rows(state, out, lse, kv_scales, where, rows, kv_head, S)


def make_work(meta: AttentionMeta, num_tokens: int, tokens_a_program: int) -> torch.Tensor:
    """Returns the work items of all sequences that are not decodes: [n, 2] int32, sequence and
    first query token, items with most keys first. Only the device knows the number of items: n is
    an upper bound, and surplus items have sequence -1."""
    query_lens = meta.query_start.diff()
    num_items = (query_lens + tokens_a_program - 1) // tokens_a_program
    num_others = len(query_lens) - meta.num_decodes
    if meta.is_mixed:
        num_items[query_lens <= tuning.MAX_DECODE_TOKENS] = 0
        least = tuning.MAX_DECODE_TOKENS + 1  # tokens of a chunk
        num_others = min(num_others, num_tokens // least)
    else:
        num_items[: meta.num_decodes] = 0
    ends = num_items.cumsum(0)
    bound = (num_tokens - meta.num_decodes) // tokens_a_program + num_others
    item = torch.arange(bound, device=ends.device)
    seq = torch.searchsorted(ends, item, right=True)
    is_real = seq < len(query_lens)
    seq = seq.clamp(max=len(query_lens) - 1)
    token0 = (item - (ends - num_items)[seq]) * tokens_a_program
    keys = meta.seq_lens[seq] - query_lens[seq] + token0
    longest = torch.where(is_real, keys, -1).argsort(descending=True, stable=True)
    return torch.stack((torch.where(is_real, seq, -1), token0), dim=1)[longest].to(torch.int32)


class Chunks(NamedTuple):
    """How prompt chunks are divided among programs: tile and query heads of a program, work items
    of the step, splits of the keys."""

    tile: tuning.Tile
    heads: int
    work: torch.Tensor
    splits: tuning.Splits


def cut(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: AttentionOptions
) -> Chunks:
    """Returns how a step's prompt chunks are divided among programs. The first call of a step
    computes it for all layers with window, softcap or ALiBi, or for all without."""
    is_bare = not variant.window and not variant.softcap
    is_bare &= variant.alibi is None and variant.distances is None
    key = ("chunks", q.shape[1:], kv_layer.shape[2], kv_layer.dtype, is_bare)
    if key not in meta.scratch:
        meta.scratch[key] = _cut(q, kv_layer, meta, is_bare)
    found: Chunks = meta.scratch[key]
    return found


def _cut(q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, is_bare: bool) -> Chunks:
    arch, kind, num_heads = arch_of(q), kind_of(q, kv_layer), q.shape[1]
    group = num_heads // kv_layer.shape[2]
    is_fixed = meta.batch_invariant
    tile = tuning.prefill_tile(arch, kind, meta.max_query_len * group, is_fixed=is_fixed)
    heads = tuning.heads_a_program(group, tile.rows)
    work = _work(meta, len(q), tile.rows // heads)
    # Most items of a recorded step may be empty; the number of splits must suit a single chunk.
    num_items = -(-len(q) * heads // tile.rows) if meta.is_mixed else len(work)
    narrow = tuning.split_tile(arch, kind, tile) if is_bare else tile
    num_programs = num_items * num_heads // heads
    splits = tuning.prefill_splits(arch, narrow, num_programs, meta.max_seq_len, is_fixed=is_fixed)
    if meta.is_mixed:
        room = tuning.pad_power(max(1, tuning.MOST_PART_ROWS // len(q)), 1)
        splits = splits._replace(num=min(splits.num, room))
    return Chunks(narrow if splits.num > 1 else tile, heads, work, splits)


def _work(meta: AttentionMeta, num_tokens: int, tokens_a_program: int) -> torch.Tensor:
    """Returns the work items of `make_work` for this step, which are made at the first call."""
    key = ("work", tokens_a_program)
    if key not in meta.scratch:
        meta.scratch[key] = make_work(meta, num_tokens, tokens_a_program)
    found: torch.Tensor = meta.scratch[key]
    return found


def prefill_launches(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: AttentionOptions,
    out: torch.Tensor,
) -> list[Launch]:
    """Returns the launches for all sequences but the first num_decodes. q, out: [N, Hq, D]."""
    chunks = cut(q, kv_layer, meta, variant)
    first = meta.num_decodes if chunks.splits.num > 1 else 0
    parts = Parts.of(out[first:], chunks.splits, first_row=first)
    return [prefill_launch((q, kv_layer, meta, variant), chunks, parts), *parts.merges]


def prefill_launch(
    step: tuple[torch.Tensor, torch.Tensor, AttentionMeta, AttentionOptions],
    chunks: Chunks,
    parts: Parts,
) -> Launch:
    """Returns the launch of `prefill_kernel`. step: (queries, cache, meta, options); parts: where
    the kernel writes."""
    q, kv_layer, meta, variant = step
    tile = chunks.tile
    shape = Shape.of(q, kv_layer, variant, chunks.heads, tile)
    args = attention_args(q, kv_layer, meta, variant, shape) | parts.args(tile.keys)
    args["work"] = chunks.work
    grid = (len(chunks.work), q.shape[1] // chunks.heads, parts.splits.num)
    is_nvidia = arch_of(q) != "gfx942"
    return Launch(prefill_kernel, grid, args, tile.warps, tile.stages, fills_registers=is_nvidia)
