"""Mixtures of experts: pairs of token and expert, sorted into blocks of one expert, multiplied.

The order of the pairs is that of the tokens and nothing is added atomically: a token's result does
not depend on the rest of the batch. Grids are upper bounds that the host knows without the routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.activation import act_mul
from kernels.triton.launch import Launch
from kernels.tuning import pad_power

SCAN = 1024  # pairs an expert looks at together


class Tiles(NamedTuple):
    """What a product's program takes."""

    M: int  # pairs
    N: int  # columns of the result
    K: int  # columns multiplied at a time


class Groups(NamedTuple):
    """Pairs by group, each group's padded to whole blocks of M. P pairs, B blocks at most."""

    pairs: torch.Tensor  # [B * M] int32: the pairs; P where a block is padded
    block_groups: torch.Tensor  # [B] int32: the group of each block; -1 behind the last
    num_pairs: int


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(groups, counts, num_pairs, SCAN: tl.constexpr):
    """Program group: how many pairs it has."""
    group = tl.program_id(0)
    count = 0
    for start in range(0, num_pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        found = tl.load(groups + pair, mask=pair < num_pairs, other=-1)
        count += tl.sum((found == group).to(tl.int32))
    tl.store(counts + group, count)


@triton.jit(do_not_specialize=["num_pairs", "num_groups", "num_blocks"])
def place_kernel(  # noqa: PLR0913
    groups, counts, pairs, block_groups, num_pairs, num_groups, num_blocks,
    M: tl.constexpr, PAD: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Program group, in ascending order of its pairs; the one after the last ends the list."""
    group = tl.program_id(0)
    other = tl.arange(0, PAD)
    count = tl.load(counts + other, mask=other < num_groups, other=0)
    first = tl.sum(tl.where(other < group, (count + M - 1) // M, 0))
    mine = tl.sum(tl.where(other == group, (count + M - 1) // M, 0))
    end = first + mine
    label = group
    if group == num_groups:
        end = num_blocks
        label = -1
    place = first * M
    for start in range(0, tl.where(mine > 0, num_pairs, 0), SCAN):
        pair = start + tl.arange(0, SCAN)
        is_mine = tl.load(groups + pair, mask=pair < num_pairs, other=-1) == group
        there = place + tl.cumsum(is_mine.to(tl.int32)) - 1
        tl.store(pairs + there, pair, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32))
    for block in range(first, end):
        tl.store(block_groups + block, label)
        padding = block * M + tl.arange(0, M)
        tl.store(pairs + padding, tl.zeros([M], tl.int32) + num_pairs, mask=padding >= place)


@triton.jit(do_not_specialize=["num_pairs"])
def product_kernel(  # noqa: PLR0913
    a, matrices, out, pairs, block_groups, weights, num_pairs, stride_a, stride_matrix,
    N: tl.constexpr, K: tl.constexpr, FAN: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (part of the columns, block): out[pair] = matrix @ a[pair // FAN] (* weight)."""
    block = tl.program_id(1)
    group = tl.load(block_groups + block).to(tl.int64)
    if group < 0:
        return
    pair = tl.load(pairs + block * T.M + tl.arange(0, T.M))
    is_pair = pair < num_pairs
    column = tl.program_id(0) * T.N + tl.arange(0, T.N)
    inner = tl.arange(0, T.K)
    rows = a + (pair // FAN).to(tl.int64)[:, None] * stride_a
    columns = matrices + group * stride_matrix + column.to(tl.int64)[:, None] * K
    acc = tl.full([T.M, T.N], 0.0, tl.float32)
    for k in range(0, K, T.K):
        in_k = k + inner < K
        x = tl.load(rows + (k + inner)[None, :], mask=is_pair[:, None] & in_k[None, :], other=0.0)
        mask = (column < N)[:, None] & in_k[None, :]
        w = tl.load(columns + (k + inner)[None, :], mask=mask, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if weights is not None:
        acc = acc * tl.load(weights + pair, mask=is_pair, other=0.0)[:, None]
    there = out + pair.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(there, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & (column < N)[None, :])


@triton.jit
def sum_kernel(parts, chosen, out, H: tl.constexpr, FAN: tl.constexpr, TILE: tl.constexpr):
    """Program (token, part of the columns): the sum over its experts, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for i in range(FAN):
        pair = token * FAN + i
        mask = (column < H) & (tl.load(chosen + pair) >= 0)
        total += tl.load(parts + pair * H + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)


def tiles_for(num_pairs: int, num_groups: int, itemsize: int) -> tuple[Tiles, int, int]:
    """(tiles, warps, stages) for so many pairs: few of them leave tensor cores idle anyway."""
    a_group = num_pairs // num_groups
    if itemsize == 4:
        return Tiles(16 if a_group < 32 else 32, 64, 32), 4, 2
    if a_group < 32:
        return Tiles(16, 64, 128), 4, 3
    if a_group < 128:
        return Tiles(64, 128, 64), 4, 3
    return Tiles(128, 128, 64), 8, 3


def align(chosen: torch.Tensor, num_groups: int, block: int) -> Groups:
    """Sort pairs by group. chosen: int32 of any shape, flattened to P pairs; -1 has no group."""
    groups, launches = align_launches(chosen.reshape(-1), num_groups, block)
    for launch in launches:
        launch.run()
    return groups


def align_launches(
    chosen: torch.Tensor, num_groups: int, block: int
) -> tuple[Groups, list[Launch]]:
    num_pairs = len(chosen)
    # Every group but one may end in a block that holds a single pair.
    num_blocks = (num_pairs + min(num_pairs, num_groups) * (block - 1)) // block
    groups = Groups(chosen.new_empty(num_blocks * block), chosen.new_empty(num_blocks), num_pairs)
    count = {
        "groups": chosen,
        "counts": chosen.new_empty(num_groups),
        "num_pairs": num_pairs,
        "SCAN": SCAN,
    }
    place = {
        **count,
        "pairs": groups.pairs,
        "block_groups": groups.block_groups,
        "num_groups": num_groups,
        "num_blocks": num_blocks,
        "M": block,
        "PAD": pad_power(num_groups),
    }
    launches = [
        Launch(count_kernel, (num_groups,), count, 4, 1),
        Launch(place_kernel, (num_groups + 1,), place, 4, 1),
    ]
    return groups, launches


def mixture(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    act: str,
) -> torch.Tensor:
    """See kernels.reference.grouped.mixture."""
    out = torch.empty_like(x)
    if not out.numel():
        return out
    num_pairs, fan = chosen.numel(), chosen.shape[1]
    tiles = tiles_for(num_pairs, len(gate_up), x.element_size())
    groups = align(chosen, len(gate_up), tiles[0].M)
    hidden = x.new_empty((num_pairs, gate_up.shape[1]))
    product_launch((x, gate_up, hidden), groups, None, fan, tiles).run()
    inner = act_mul(hidden, act)
    parts = x.new_empty((num_pairs, down.shape[1]))
    product_launch((inner, down, parts), groups, weights.contiguous(), 1, tiles).run()
    sum_launch(parts, chosen.contiguous(), out).run()
    return out


def product_launch(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    groups: Groups,
    weights: torch.Tensor | None,
    fan: int,
    tiles: tuple[Tiles, int, int],
) -> Launch:
    """tensors: rows [P / fan, K], matrices [E, N, K] and out [P, N]."""
    a, matrices, out = tensors
    _, width, depth = matrices.shape
    shape, warps, stages = tiles
    args = {
        "a": a,
        "matrices": matrices,
        "out": out,
        "pairs": groups.pairs,
        "block_groups": groups.block_groups,
        "weights": weights,
        "num_pairs": groups.num_pairs,
        "stride_a": a.stride(0),
        "stride_matrix": matrices.stride(0),
        "N": width,
        "K": depth,
        "FAN": fan,
        "T": shape,
    }
    grid = (triton.cdiv(width, shape.N), len(groups.block_groups))
    return Launch(product_kernel, grid, args, warps, stages)


def sum_launch(parts: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> Launch:
    num_tokens, fan = chosen.shape
    width = parts.shape[1]
    tile = min(1024, pad_power(width))
    args = {
        "parts": parts,
        "chosen": chosen,
        "out": out,
        "H": width,
        "FAN": fan,
        "TILE": tile,
    }
    return Launch(sum_kernel, (num_tokens, triton.cdiv(width, tile)), args, 4, 1)


def configurations() -> Iterator[Launch]:
    """128 experts of which 8 are taken, decodes to long prompts."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_tokens in (64, 1024, 8192):
            x = torch.empty((num_tokens, 2048), dtype=dtype, device="meta")
            chosen = torch.empty((num_tokens, 8), dtype=torch.int32, device="meta")
            tiles = tiles_for(chosen.numel(), 128, x.element_size())
            groups, launches = align_launches(chosen.reshape(-1), 128, tiles[0].M)
            yield from launches
            gate_up = x.new_empty((128, 1536, 2048))
            hidden = x.new_empty((chosen.numel(), 1536))
            yield product_launch((x, gate_up, hidden), groups, None, 8, tiles)
            down = x.new_empty((128, 2048, 768))
            inner, parts = hidden[:, :768], x.new_empty((chosen.numel(), 2048))
            weights = chosen.float()
            yield product_launch((inner, down, parts), groups, weights, 1, tiles)
            yield sum_launch(parts, chosen, x)
