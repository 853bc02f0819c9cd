"""Low-rank products of rows with the adapters that they use; see `kernels.low_rank`.

All that a launch reads about adapters is in memory at fixed addresses: records of products with
their addresses and ranks, and blocks of rows with one adapter. So a launch that was recorded once
serves any adapters. Grids are upper bounds; programs without work return.

The sums over the inputs are divided into parts of a fixed length, which the second kernel adds in
order, without atomics. Tiles are the same for any number of rows: the bits of a row depend neither
on other rows nor on other adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.low_rank import (
    DEVICE_ROWS,
    PANEL,
    RANKS,
    AdaptedRows,
    DeviceRows,
    DeviceTable,
    ProductTable,
)
from kernels.triton.launch import Launch

MOST_SHARES = 8  # programs that share the ranks of an adapter


class Tiles(NamedTuple):
    """What the kernels are compiled for."""

    M: int  # rows
    R: int  # ranks
    K: int  # inputs at a time
    PART: int  # inputs of a program
    N: int  # outputs of a program
    PANEL: int = PANEL


@triton.jit
def block_of(words, M: tl.constexpr):
    """The block of rows of program (., block): its adapter slot, its rows, their places in the
    order of all rows, and which of them are there."""
    block = words + 2 + tl.program_id(1) * 3
    lane = tl.arange(0, M)
    is_row = lane < tl.load(block + 2)
    place = tl.load(block + 1) + lane
    row = tl.load(words + tl.load(words + 1) + place, mask=is_row, other=0)
    return tl.load(block), row.to(tl.int64), place.to(tl.int64), is_row


@triton.jit
def products_of(entries, slot):
    """The number of products of an adapter slot, and their records."""
    entry = entries + slot * 2
    return tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.pointer_type(tl.int64))


@triton.jit
def matrix_at(word, offset, dtype: tl.constexpr):
    """The matrix whose address is in a word, from an element on that begins at a multiple of 16
    bytes, as the matrix does."""
    return tl.multiple_of(tl.load(word).to(tl.pointer_type(dtype)) + offset, 16)


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(  # noqa: PLR0913
    x, sums, entries, words, num_rows, num_in, num_ranks, T: tl.constexpr
):
    """Program (part of the inputs, block of rows, share of the ranks):
    sums[part, place of the row, rank] = a @ x[row] over the part."""
    if tl.program_id(1) >= tl.load(words):
        return
    part = tl.program_id(0)
    slot, row, place, is_row = block_of(words, T.M)
    num_products, records = products_of(entries, slot)
    rows = x + row[:, None] * num_in
    inner, lane = tl.arange(0, T.K), tl.arange(0, T.R)
    out = sums + (part.to(tl.int64) * num_rows + place)[:, None] * num_ranks + lane[None, :]
    tile = 0  # of RANKS ranks, over all products
    for number in range(num_products):
        record = records + number * 8
        rank = tl.load(record + 2).to(tl.int32)
        a = matrix_at(record + 3, 0, x.dtype.element_ty)
        for first in range(0, rank, T.R):
            if tile % tl.num_programs(2) == tl.program_id(2):
                is_rank = first + lane < rank
                columns = a + (first + lane).to(tl.int64)[:, None] * num_in
                acc = tl.full([T.M, T.R], 0.0, tl.float32)
                for start in range(0, T.PART, T.K):
                    at = part * T.PART + start + inner
                    is_in = (at < num_in)[None, :]
                    left = tl.load(rows + at[None, :], mask=is_row[:, None] & is_in, other=0.0)
                    right = tl.load(columns + at[None, :], mask=is_rank[:, None] & is_in, other=0.0)
                    acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
                tl.store(out + tile * T.R, acc, mask=is_row[:, None])
            tile += 1


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(  # noqa: PLR0913
    sums, y, entries, words, num_rows, stride_y, num_ranks, DTYPE: tl.constexpr,
    PARTS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (tile of a product's outputs, block of rows):
    y[row] = y[row] * factors + added + scale * b @ (the sum of sums[:, place of the row])."""
    if tl.program_id(1) >= tl.load(words):
        return
    slot, row, place, is_row = block_of(words, T.M)
    num_products, records = products_of(entries, slot)
    lane, column = tl.arange(0, T.R), tl.arange(0, T.N)
    begin = tl.program_id(0) * T.N  # among the outputs of the product
    first_rank = 0
    for number in range(num_products):
        record = records + number * 8
        num, rank = tl.load(record + 1).to(tl.int32), tl.load(record + 2).to(tl.int32)
        if (begin >= 0) & (begin < num):
            scale = tl.load((record + 5).to(tl.pointer_type(tl.float64))).to(tl.float32)
            is_column = begin + column < num
            is_panel = (
                begin + column // T.PANEL * T.PANEL < num
            )  # the last one has zeros at its end
            panel = matrix_at(record + 4, begin.to(tl.int64) * rank, DTYPE)
            panel += column // T.PANEL * (rank * T.PANEL) + column % T.PANEL
            total = tl.full([T.M, T.N], 0.0, tl.float32)
            for first in range(0, rank, T.R):
                values = tl.full([T.M, T.R], 0.0, tl.float32)
                for part in range(PARTS):
                    there = sums + (part * num_rows.to(tl.int64) + place)[:, None] * num_ranks
                    there += (first_rank + first + lane)[None, :]
                    values += tl.load(there, mask=is_row[:, None], other=0.0)
                values *= scale
                mask = (first + lane < rank)[:, None] & is_panel[None, :]
                b = tl.load(
                    panel[None, :] + (first + lane)[:, None] * T.PANEL, mask=mask, other=0.0
                )
                high = values.to(DTYPE)
                total = tl.dot(high, b, total, input_precision="ieee")
                if tl.float32 != DTYPE:  # what the type of b cannot hold, in a second product
                    rest = (values - high.to(tl.float32)).to(DTYPE)
                    total = tl.dot(rest, b, total, input_precision="ieee")
            out = y + row[:, None] * stride_y + (tl.load(record) + begin + column)[None, :]
            mask = is_row[:, None] & is_column[None, :]
            before = tl.load(out, mask=mask, other=0.0).to(tl.float32)
            factors, added = tl.load(record + 6), tl.load(record + 7)
            place_of = factors.to(tl.pointer_type(tl.float32)) + begin + column
            factor = tl.load(place_of, mask=is_column & (factors != 0), other=1.0)
            place_of = added.to(tl.pointer_type(tl.float32)) + begin + column
            more = tl.load(place_of, mask=is_column & (added != 0), other=0.0)
            total += before * factor[None, :] + more[None, :]
            tl.store(out, total.to(y.dtype.element_ty), mask=mask)
        begin -= tl.cdiv(num, T.N) * T.N
        first_rank += tl.cdiv(rank, T.R) * T.R


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, table: ProductTable, rows: AdaptedRows
) -> torch.Tensor:
    """Add products to y in place; see `kernels.ops.add_low_rank`. Table and rows must be on the
    device."""
    assert table.on_device is not None and isinstance(rows, DeviceRows)
    for launch in launches(y, x, table.on_device, rows.on_device) if len(x) else ():
        launch.run()
    return y


def tiles_for(itemsize: int) -> Tiles:
    """Tiles for inputs of this many bytes."""
    return Tiles(DEVICE_ROWS, RANKS, 256 // itemsize, 1024, 2 * PANEL)


def launches(
    y: torch.Tensor, x: torch.Tensor, table: DeviceTable, words: torch.Tensor
) -> list[Launch]:
    (num_rows, num_in), num_out, num_ranks = x.shape, y.shape[1], table.most_ranks
    assert x.is_contiguous() and y.stride(1) == 1
    tiles, num_slots = tiles_for(x.element_size()), len(table.entries)
    parts = triton.cdiv(num_in, tiles.PART)
    # Each adapter may end with a block that is not full.
    num_blocks = (num_rows + min(num_rows, num_slots) * (tiles.M - 1)) // tiles.M
    sums = {
        "sums": torch.empty((parts, num_rows, num_ranks), dtype=torch.float32, device=x.device),
        "entries": table.entries,
        "words": words,
        "num_rows": num_rows,
        "num_ranks": num_ranks,
        "T": tiles,
    }
    shrink = {"x": x, "num_in": num_in, **sums}
    dtype = getattr(tl, str(x.dtype).removeprefix("torch."))
    expand = {"y": y, "stride_y": y.stride(0), "DTYPE": dtype, "PARTS": parts, **sums}
    # Each product may end with a tile that is not full.
    num_tiles = triton.cdiv(num_out, tiles.N) + table.most_products - 1
    shares = min(num_ranks // tiles.R, MOST_SHARES)
    return [
        Launch(shrink_kernel, (parts, num_blocks, shares), shrink, 4, 3),
        Launch(expand_kernel, (num_tiles, num_blocks), expand, 4, 1),
    ]


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: decodes and prompts, layers of Llama 8B and of odd sizes, outputs
    in the inputs' type and in float32."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_in, num_out, num_products in ((4096, 6144, 3), (14336, 4096, 1), (1100, 1000, 2)):
            for num_rows, wide in ((64, dtype), (2048, torch.float32)):
                x = torch.empty((num_rows, num_in), dtype=dtype, device="meta")
                y = torch.empty((num_rows, num_out), dtype=wide, device="meta")
                entries = torch.empty((8, 2), dtype=torch.int64, device="meta")
                words = torch.empty(2 + 4 * num_rows, dtype=torch.int32, device="meta")
                yield from launches(y, x, DeviceTable(entries, num_products, 64), words)
