"""Low-rank adapters, another one in each row: shrink to the rank, expand and add.

Rows are sorted by adapter as pairs are by expert. The long sum of the shrink is cut into parts of a
fixed length, which the expand adds up in order: many programs for few rows, and no atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.groups import Groups, align, align_launches
from kernels.triton.launch import Launch
from kernels.tuning import pad_power

PART = 512  # columns of x that a program multiplies


class Tiles(NamedTuple):
    """What the kernels are compiled for."""

    M: int  # rows
    N: int  # columns of y
    K: int  # columns of x at a time
    PART: int = PART


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(  # noqa: PLR0913
    x, a, low, rows, block_groups, num_rows, stride_x, R: tl.constexpr, PAD_R: tl.constexpr,
    H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (part of H, block): low[part, row] = a[adapter] @ x[row] over the part."""
    part = tl.program_id(0)
    block = tl.program_id(1)
    adapter = tl.load(block_groups + block).to(tl.int64)
    if adapter < 0:
        return
    row = tl.load(rows + block * T.M + tl.arange(0, T.M))
    is_row = row < num_rows
    rank = tl.arange(0, PAD_R)
    inner = tl.arange(0, T.K)
    there = x + row.to(tl.int64)[:, None] * stride_x
    matrix = a + adapter * (R * H) + rank[:, None] * H
    acc = tl.full([T.M, PAD_R], 0.0, tl.float32)
    for k in range(part * T.PART, tl.minimum((part + 1) * T.PART, H), T.K):
        in_k = (k + inner < H)[None, :]
        values = tl.load(there + (k + inner)[None, :], mask=is_row[:, None] & in_k, other=0.0)
        mask = (rank < R)[:, None] & in_k
        factors = tl.load(matrix + (k + inner)[None, :], mask=mask, other=0.0)
        acc = tl.dot(values, tl.trans(factors), acc, input_precision="ieee")
    out = low + (part.to(tl.int64) * num_rows + row)[:, None] * PAD_R + rank[None, :]
    tl.store(out, acc, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(  # noqa: PLR0913
    low, b, y, rows, block_groups, num_rows, stride_y, R: tl.constexpr, PAD_R: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (part of the columns, block): y[row] += b[adapter] @ the sum of low[:, row]."""
    block = tl.program_id(1)
    adapter = tl.load(block_groups + block).to(tl.int64)
    if adapter < 0:
        return
    row = tl.load(rows + block * T.M + tl.arange(0, T.M))
    is_row = (row < num_rows)[:, None]
    rank = tl.arange(0, PAD_R)[None, :]
    values = tl.full([T.M, PAD_R], 0.0, tl.float32)
    for part in range(PARTS):
        there = low + (part * num_rows + row).to(tl.int64)[:, None] * PAD_R + rank
        values += tl.load(there, mask=is_row, other=0.0)
    column = tl.program_id(0) * T.N + tl.arange(0, T.N)
    matrix = b + adapter * (WIDTH * R) + column[:, None] * R + rank
    factors = tl.load(matrix, mask=(column < WIDTH)[:, None] & (rank < R), other=0.0)
    high = values.to(factors.dtype)
    added = tl.dot(high, tl.trans(factors), input_precision="ieee")
    if factors.dtype != tl.float32:
        # In two pieces of b's width, what lies between loses nothing of note.
        rest = (values - high.to(tl.float32)).to(factors.dtype)
        added = tl.dot(rest, tl.trans(factors), added, input_precision="ieee")
    out = y + row.to(tl.int64)[:, None] * stride_y + column[None, :]
    mask = is_row & (column < WIDTH)[None, :]
    before = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, (before + added).to(y.dtype.element_ty), mask=mask)


def block_rows(num_rows: int, itemsize: int) -> int:
    """Rows a program: many would idle in a decode."""
    return 64 if num_rows >= 512 and itemsize == 2 else 16


def tiles_for(num_rows: int, padded_rank: int, itemsize: int) -> tuple[Tiles, int, int]:
    """(tiles, warps, stages)."""
    rows = block_rows(num_rows, itemsize)
    if itemsize == 4:
        return Tiles(rows, 32, 32), 4, 2
    if padded_rank >= 128:
        return Tiles(rows, 64, 64), 8 if rows == 64 else 4, 3
    return Tiles(rows, 64, 64 if rows == 64 else 128), 4, 3


def group_rows(adapters: torch.Tensor, num_adapters: int, itemsize: int) -> Groups:
    """Rows by adapter: once a step, for all the layers. adapters: [N] int32, -1: none."""
    return align(adapters, num_adapters, block_rows(len(adapters), itemsize))


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    """See kernels.reference.grouped.add_lora."""
    if len(x):
        add_grouped(y, x, a, b, group_rows(adapters, len(a), x.element_size()))


def add_grouped(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, groups: Groups
) -> None:
    """As add_lora, with what `group_rows` gave for these rows."""
    for launch in launches(y, x, (a, b), groups):
        launch.run()


def launches(
    y: torch.Tensor, x: torch.Tensor, matrices: tuple[torch.Tensor, torch.Tensor], groups: Groups
) -> list[Launch]:
    a, b = matrices
    (num_rows, hidden), rank, width = x.shape, a.shape[1], b.shape[1]
    padded = pad_power(rank)
    shape, warps, stages = tiles_for(num_rows, padded, x.element_size())
    parts, blocks = triton.cdiv(hidden, shape.PART), len(groups.block_groups)
    common = {
        "low": torch.empty((parts, num_rows, padded), dtype=torch.float32, device=x.device),
        "rows": groups.pairs,
        "block_groups": groups.block_groups,
        "num_rows": num_rows,
        "R": rank,
        "PAD_R": padded,
        "T": shape,
    }
    shrink = {**common, "x": x, "a": a, "stride_x": x.stride(0), "H": hidden}
    expand = {**common, "b": b, "y": y, "stride_y": y.stride(0), "WIDTH": width, "PARTS": parts}
    return [
        Launch(shrink_kernel, (parts, blocks), shrink, warps, stages),
        Launch(expand_kernel, (triton.cdiv(width, shape.N), blocks), expand, warps, 1),
    ]


def configurations() -> Iterator[Launch]:
    """Ranks 8 to 128 on a hidden size of 4096, decodes and prompts."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_rows in (64, 2048):
            for rank in (8, 16, 64, 128):
                x = torch.empty((num_rows, 4096), dtype=dtype, device="meta")
                a, b = x.new_empty((8, rank, 4096)), x.new_empty((8, 4096, rank))
                adapters = torch.empty(num_rows, dtype=torch.int32, device="meta")
                groups, _ = align_launches(adapters, 8, block_rows(num_rows, x.element_size()))
                yield from launches(x, x, (a, b), groups)
