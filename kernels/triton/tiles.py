"""Common parts of prefill and decode attention: tiles of keys, their masks, the running softmax.

All rows of a program are of one KV head: row m is token m // HEADS, query head m % HEADS. The
softmax is in base 2. Keys are read in ascending order, so a row's sums do not depend on the batch.
Three loops read the tiles that only some rows attend to because of the window, the tiles that all
rows attend to completely, and the tiles around the query positions; the middle loop, with nearly
all of the work, needs no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.meta import AttentionMeta
from kernels.reference import AttentionOptions
from kernels.tuning import Kind, Tile, pad_power

LOG2E = tl.constexpr(1.4426950408889634)


class Shape(NamedTuple):
    """Compile-time parameters of an attention kernel."""

    D: int  # head size
    PAD_D: int  # head size padded to a power of two
    PAGE: int  # tokens per cache block
    KV_HEADS: int
    GROUP: int  # query heads per KV head
    HEADS: int  # query heads per program, a divisor of GROUP
    ROWS: int  # packed query rows per program, a power of two
    KEYS: int  # keys per tile
    SCALE: float
    WINDOW: int  # 0: none
    SOFTCAP: float  # 0: none
    CAUSAL: bool
    DISTANCES: int  # scores by distance of a head, 0: none

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        variant: AttentionOptions,
        heads: int,
        tile: Tile,
    ):
        """Returns the kernel's parameters for queries q [N, Hq, D] and kv_layer [blocks, 2, Hkv,
        page, D]. heads: query heads per program."""
        _, num_heads, dim = q.shape
        _, _, kv_heads, page, _ = kv_layer.shape
        group = num_heads // kv_heads
        return cls(
            *(dim, pad_power(dim), page, kv_heads, group, heads, tile.rows, tile.keys),
            SCALE=variant.scale,
            WINDOW=variant.window,
            SOFTCAP=variant.softcap,
            CAUSAL=variant.causal,
            DISTANCES=0 if variant.distances is None else variant.distances.shape[1],
        )


def kind_of(q: torch.Tensor, kv_layer: torch.Tensor) -> Kind:
    return Kind(q.element_size(), kv_layer.element_size(), pad_power(q.shape[-1], 64))


def attention_args(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: AttentionOptions,
    shape: Shape,
) -> dict[str, Any]:
    """The arguments that the prefill and the decode kernel have in common, except outputs."""
    if not kv_layer[0].is_contiguous() or not q[0].is_contiguous():
        raise ValueError("attention needs contiguous query rows and contiguous cache blocks")
    return {
        "q": q,
        "kv": kv_layer,
        "tables": meta.block_tables,
        "query_start": meta.query_start,
        "seq_lens": meta.seq_lens,
        "sinks": variant.sinks,
        "slopes": variant.alibi if variant.distances is None else variant.distances,
        "kv_scales": variant.kv_scales,
        "stride_q": q.stride(0),
        "stride_block": kv_layer.stride(0),
        "stride_table": meta.block_tables.stride(0),
        "S": shape,
    }


@triton.jit
def head_rows(first_head, num_tokens, S: tl.constexpr):
    """Returns, for each row of a program: its token, its query head, and True if it is used."""
    row = tl.arange(0, S.ROWS)
    return row // S.HEADS, first_head + row % S.HEADS, row < num_tokens * S.HEADS


@triton.jit
def places_of(first_token, first_head, S: tl.constexpr):
    """Returns each row's index in an output [tokens * query heads, D]. first_token: the token of
    row 0."""
    # Computed again after the loops, to save registers.
    row = first_token * S.HEADS + tl.arange(0, S.ROWS)
    head = first_head + row % S.HEADS
    return (row // S.HEADS).to(tl.int64) * (S.KV_HEADS * S.GROUP) + head


@triton.jit
def load_queries(q, stride_q, row0, rows, S: tl.constexpr):
    token, head, is_ours = rows
    dims = tl.arange(0, S.PAD_D)
    where = (row0 + token).to(tl.int64) * stride_q + head * S.D
    mask = is_ours[:, None] & (dims < S.D)[None, :]
    return tl.load(q + where[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def visible_tiles(first_pos, last_pos, end_key, S: tl.constexpr):
    """Returns which tiles of keys the rows at positions first_pos .. last_pos attend to: (first
    tile, first tile that needs no mask, end of the tiles that need none, end). end_key: end of the
    keys to which any of these rows attends."""
    end = (end_key + S.KEYS - 1) // S.KEYS
    first = 0
    whole_from = 0
    if S.WINDOW > 0:
        first = tl.maximum(first_pos - S.WINDOW + 1, 0) // S.KEYS
        whole_from = (tl.maximum(last_pos - S.WINDOW + 1, 0) + S.KEYS - 1) // S.KEYS
        whole_from = tl.minimum(whole_from, end)
    seen_by_first = first_pos + 1
    if not S.CAUSAL:
        seen_by_first = end_key
        if S.WINDOW > 0:
            seen_by_first = tl.minimum(first_pos + S.WINDOW, end_key)
    whole_to = tl.maximum(seen_by_first // S.KEYS, whole_from)
    return first, whole_from, whole_to, end


@triton.jit
def blocks_at(table, tile, end_key, S: tl.constexpr):
    """Returns the cache block that holds a tile of keys, or a block per key for larger tiles."""
    if S.PAGE % S.KEYS == 0:
        blocks = tl.load(table + tile * S.KEYS // S.PAGE)
    else:
        place = tl.minimum(tile * S.KEYS + tl.arange(0, S.KEYS), tl.maximum(end_key - 1, 0))
        blocks = tl.load(table + place // S.PAGE)
    return blocks


@triton.jit
def cache_rows(stride_block, tile, blocks, S: tl.constexpr):
    """Returns the offset of a tile of keys in one head of the KV cache, or the offsets of its keys
    if the tile is small or spans blocks."""
    # Offsets within a block computed only once save instructions but take registers, which decodes
    # need in order to have many programs per processor.
    if S.PAGE % S.KEYS == 0 and S.ROWS >= 64:
        rows = blocks.to(tl.int64) * stride_block + (tile * S.KEYS % S.PAGE) * S.D
    else:
        place = tile * S.KEYS + tl.arange(0, S.KEYS)
        rows = blocks.to(tl.int64) * stride_block + (place % S.PAGE) * S.D
    return rows


@triton.jit
def load_tile(base, rows, is_seen, S: tl.constexpr, MASKED: tl.constexpr):
    """Load the keys or values of a tile, [KEYS, PAD_D]. If MASKED, only where `is_seen` is True."""
    dims = tl.arange(0, S.PAD_D)
    if S.PAGE % S.KEYS == 0 and S.ROWS >= 64:
        where = base + rows + ((tl.arange(0, S.KEYS) * S.D)[:, None] + dims[None, :])
    else:
        where = base + rows[:, None] + dims[None, :]
    if MASKED:
        tile = tl.load(where, mask=is_seen[:, None] & (dims < S.D)[None, :], other=0.0)
    elif S.D < S.PAD_D:
        tile = tl.load(where, mask=(dims < S.D)[None, :], other=0.0)
    else:
        tile = tl.load(where)
    return tile


@triton.jit
def biases_of(slopes, head, S: tl.constexpr):
    """Returns what `scores_of` needs of each row's head: its slope, or where its scores by distance
    begin."""
    if S.DISTANCES > 0:
        result = slopes + head * S.DISTANCES
    else:
        result = tl.load(slopes + head).to(tl.float32) * LOG2E
    return result


@triton.jit
def scores_of(products, scale, slopes, row_pos, key_pos, S: tl.constexpr):
    """Returns (scores, factor) after softcap, and ALiBi or scores by distance. The softmax weight
    of a key is proportional to 2 ** (score * factor)."""
    # The factor is applied by the multiply-add that subtracts the largest score. This saves an
    # instruction, and tiles with and without mask round the same way, whatever the compiler fuses.
    factor = scale * LOG2E
    scores = products
    if S.SOFTCAP > 0:
        # tanh by a form that saturates instead of overflowing.
        grown = tl.exp2(products * (scale * (2 * LOG2E / S.SOFTCAP)))
        scores = 1 - 2 / (grown + 1)
        factor = tl.full([], S.SOFTCAP * LOG2E, tl.float32)
    if slopes is not None:
        distance = key_pos[None, :] - row_pos[:, None]
        if S.DISTANCES > 0:
            place = distance + S.DISTANCES // 2
            is_known = (place >= 0) & (place < S.DISTANCES)
            bias = tl.load(slopes[:, None] + place, mask=is_known, other=0.0) * LOG2E
        else:
            bias = slopes[:, None] * distance.to(tl.float32)
        scores = tl.fma(scores, factor, bias)
        factor = tl.full([], 1.0, tl.float32)
    return scores, factor


@triton.jit
def attend_tiles(  # noqa: PLR0913
    state, q, cache, span, bias, tiles, S: tl.constexpr, MASKED: tl.constexpr
):
    """Add the keys of tiles tiles[0] .. tiles[1] - 1 to the softmax state and return it. MASKED:
    apply the mask, since some rows do not attend to all of these keys."""
    # A tile's block is looked up one round earlier, because an address loaded in the same round
    # would prevent the prefetch of keys and values.
    acc, peak, total = state
    keys, values, table, stride_block = cache
    row_pos, first_key, end_key = span
    scale, slopes = bias
    last = tl.maximum(tiles[1] - 1, 0)
    blocks = blocks_at(table, tl.minimum(tiles[0], last), end_key, S)
    for tile in tl.range(tiles[0], tiles[1]):
        key_pos = tile * S.KEYS + tl.arange(0, S.KEYS)
        is_seen = (key_pos >= first_key) & (key_pos < end_key)
        rows = cache_rows(stride_block, tile, blocks, S)
        blocks = blocks_at(table, tl.minimum(tile + 1, last), end_key, S)
        k = load_tile(keys, rows, is_seen, S, MASKED).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, factor = scores_of(products, scale, slopes, row_pos, key_pos, S)
        if MASKED:
            seen = is_seen[None, :]
            if S.CAUSAL:
                seen = seen & (key_pos[None, :] <= row_pos[:, None])
            elif S.WINDOW > 0:
                seen = seen & (key_pos[None, :] < row_pos[:, None] + S.WINDOW)
            if S.WINDOW > 0:
                seen = seen & (key_pos[None, :] > row_pos[:, None] - S.WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = new_peak
        if MASKED:  # a row may have no keys yet
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        decay = tl.exp2(peak - base)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        v = load_tile(values, rows, is_seen, S, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def start_state(sinks, head, is_first, S: tl.constexpr):
    """Returns the softmax state before any key: (sums of values, largest score, sum of weights). It
    contains the head's attention sink only if is_first, so that a sink counts once."""
    acc = tl.full([S.ROWS, S.PAD_D], 0.0, tl.float32)
    total = tl.full([S.ROWS], 0.0, tl.float32)
    peak = tl.full([S.ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        peak = tl.where(is_first, tl.load(sinks + head).to(tl.float32) * LOG2E, peak)
        total = tl.where(is_first, 1.0, total)
    return acc, peak, total


@triton.jit
def attend_range(  # noqa: PLR0913
    state, q, cache, span, bias, tiles, bounds, S: tl.constexpr
):
    """Add the keys of tiles tiles[0] .. tiles[1] - 1 to the softmax state and return it. Tiles that
    `bounds` (from visible_tiles) reports as visible to all rows are not masked."""
    first, end = tiles
    whole_from = bounds[1]
    whole_to = bounds[2]
    if S.WINDOW > 0:
        cut = (first, tl.minimum(end, whole_from))
        state = attend_tiles(state, q, cache, span, bias, cut, S, True)
    whole = (tl.maximum(first, whole_from), tl.minimum(end, whole_to))
    state = attend_tiles(state, q, cache, span, bias, whole, S, False)
    tail = (tl.maximum(first, whole_to), end)
    return attend_tiles(state, q, cache, span, bias, tail, S, True)


@triton.jit
def split_of(split, bounds, num_splits, min_tiles):
    """Divides the tiles of `bounds` (from visible_tiles) into equal splits of at least min_tiles;
    returns (first tile, end) of split `split`, which is empty if first >= end."""
    num_tiles = bounds[3] - bounds[0]
    share = tl.maximum((num_tiles + num_splits - 1) // num_splits, min_tiles)
    first = bounds[0] + split * share
    return first, tl.minimum(first + share, bounds[3])


@triton.jit
def cache_of(kv, table, stride_block, kv_head, S: tl.constexpr):
    """Returns what `attend_tiles` needs to read a KV head from the cache: (address of its keys,
    address of its values, block table, stride_block)."""
    keys = kv + kv_head * (S.PAGE * S.D)
    return keys, keys + S.KV_HEADS * S.PAGE * S.D, table, stride_block


@triton.jit
def scale_of(kv_scales, kv_head, S: tl.constexpr):
    """Returns the factor on products of queries and keys: softmax scale times the keys' scale."""
    scale = tl.full([], S.SCALE, tl.float32)
    if kv_scales is not None:
        scale = scale * tl.load(kv_scales + kv_head)
    return scale


@triton.jit
def store_rows(  # noqa: PLR0913
    state, out, lse, kv_scales, where, rows, kv_head, S: tl.constexpr
):
    """Divide the results of a program's rows by the softmax sums and store them in out, and the
    sums' logarithms in lse. where: each row's index in out [tokens * query heads, D]."""
    acc, peak, total = state
    _, _, is_ours = rows
    safe = tl.where(total == 0, 1.0, total)
    if kv_scales is not None:
        acc = acc * tl.load(kv_scales + S.KV_HEADS + kv_head)
    dims = tl.arange(0, S.PAD_D)
    mask = is_ours[:, None] & (dims < S.D)[None, :]
    there = out + where[:, None] * S.D + dims[None, :]
    tl.store(there, (acc / safe[:, None]).to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        logs = tl.where(total == 0, float("-inf"), (peak + tl.log2(safe)) / LOG2E)
        tl.store(lse + where, logs, mask=is_ours)
