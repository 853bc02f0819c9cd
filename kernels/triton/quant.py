"""Products with quantised weights: integers of 4 and 8 bits, 8-bit floats, scales by group.

Few rows: weights are dequantised in registers, on their way to the product; a group's scale meets
the sums, so what is multiplied are whole numbers, exact in 16 bits. Many rows: a pass dequantises
the weight into scratch memory, and the library multiplies. Sums over parts of the inputs are added
in order: no atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from kernels.quant_tuning import MOST_FUSED_ROWS, Tile, num_splits, product_tile
from kernels.quantized import Packed, Quantized, pack
from kernels.triton.launch import Launch, arch_of

FP8 = torch.float8_e4m3fn
SUM_TILE = 1024
DEQUANTISED_OUTPUTS = 32  # a program


class Shape(NamedTuple):
    """What the kernels are compiled for."""

    K: int  # inputs
    WIDTH: int  # bytes of a row of the matrix
    BITS: int
    GROUP: int
    GROUPS: int
    PIECE: int
    M: int = 0  # rows of x, a program
    N: int = 0  # outputs, a program


@triton.jit
def as_float(nibble, dtype: tl.constexpr):
    """Numbers below 16, of 16 bits plus a power of two: they become bits of the mantissa.

    The power cancels against that of the zero, and nothing is converted, which is slow.
    """
    if dtype == tl.bfloat16:
        return (nibble.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (nibble.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return nibble.to(tl.float32)


@triton.jit
def piece_of(
    raw, half: tl.constexpr, zeros, there, is_column, dtype: tl.constexpr, S: tl.constexpr
):
    """Values minus their zeros: [N, PIECE] of dtype, exact; 8-bit floats have no zeros."""
    if raw.dtype != tl.uint8:
        return raw.to(tl.float32).to(dtype)
    else:
        if zeros is None:
            zero = tl.full([S.N], 1 << (S.BITS - 1), tl.uint8)
        else:
            zero = tl.load(zeros + there, mask=is_column, other=0)
        if S.BITS == 4:
            value = as_float((raw >> (4 * half)) & 15, dtype) - as_float(zero, dtype)[:, None]
        else:
            value = raw.to(tl.float32) - zero.to(tl.float32)[:, None]
        return value.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(  # noqa: PLR0913
    x, values, scales, zeros, order, bias, out, num_rows, stride_x, num_outputs, num_steps,
    steps_a_split, S: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, split): out[split, row, output] = x @ weight.T over its inputs."""
    column = tl.program_id(0) * S.N + tl.arange(0, S.N)
    row = tl.program_id(1) * S.M + tl.arange(0, S.M)
    split = tl.program_id(2)
    is_column, is_row = column < num_outputs, row < num_rows
    rows = x + row.to(tl.int64)[:, None] * stride_x
    matrix = values + column.to(tl.int64)[:, None] * S.WIDTH
    inner = tl.arange(0, S.PIECE)
    acc = tl.full([S.M, S.N], 0.0, tl.float32)
    last = tl.minimum((split + 1) * steps_a_split, num_steps)
    for step in range(split * steps_a_split, last):
        byte = step * S.PIECE + inner
        is_there = is_column[:, None] & (byte < S.WIDTH)[None, :]
        raw = tl.load(matrix + byte[None, :], mask=is_there, other=0.0)
        for half in tl.static_range(8 // S.BITS):
            k = (step * (8 // S.BITS) + half) * S.PIECE
            place, in_k = k + inner, k + inner < S.K
            if order is not None:
                place = tl.load(order + k + inner, mask=in_k, other=0)
            a = tl.load(rows + place[None, :], mask=is_row[:, None] & in_k[None, :], other=0.0)
            there = tl.minimum(k // S.GROUP, S.GROUPS - 1) * num_outputs + column
            weight = piece_of(raw, half, zeros, there, is_column, x.dtype.element_ty, S)
            part = tl.dot(a, tl.trans(weight), input_precision="ieee")
            scale = tl.load(scales + there, mask=is_column, other=0.0)
            acc += part * scale.to(tl.float32)[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = (split * num_rows + row).to(tl.int64)[:, None] * num_outputs + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["size"])
def sum_kernel(parts, bias, out, size, num_outputs, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Program tile of out, flattened: the sum of its parts, in their order, and the bias."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < size
    total = tl.zeros([TILE], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % num_outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(values, scales, zeros, out, num_outputs, S: tl.constexpr):
    """Program (outputs, step): out[output, column] = (value - zero) * scale, columns as packed."""
    column = tl.program_id(0) * S.N + tl.arange(0, S.N)
    is_column = column < num_outputs
    step = tl.program_id(1)
    inner = tl.arange(0, S.PIECE)
    byte = step * S.PIECE + inner
    is_there = is_column[:, None] & (byte < S.WIDTH)[None, :]
    matrix = values + column.to(tl.int64)[:, None] * S.WIDTH
    raw = tl.load(matrix + byte[None, :], mask=is_there, other=0.0)
    for half in tl.static_range(8 // S.BITS):
        k = (step * (8 // S.BITS) + half) * S.PIECE
        there = tl.minimum(k // S.GROUP, S.GROUPS - 1) * num_outputs + column
        weight = piece_of(raw, half, zeros, there, is_column, out.dtype.element_ty, S)
        scale = tl.load(scales + there, mask=is_column, other=0.0)
        weight = weight.to(tl.float32) * scale.to(tl.float32)[:, None]
        place = out + column.to(tl.int64)[:, None] * S.K + (k + inner)[None, :]
        mask = is_column[:, None] & (k + inner < S.K)[None, :]
        tl.store(place, weight.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(x, scale, out, scales, stride_x, K: tl.constexpr, TILE: tl.constexpr):
    """Program row: x / scale as 8-bit floats, by the scale given or the row's largest number."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, TILE)
    if scale is None:
        largest = tl.zeros([TILE], tl.float32)
        for k in range(0, K, TILE):
            part = tl.load(x + row * stride_x + k + inner, mask=k + inner < K, other=0.0)
            largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
        found = tl.maximum(tl.max(largest) / 448.0, 1e-30)
    else:
        found = tl.load(scale)
    tl.store(scales + row, found)
    for k in range(0, K, TILE):
        part = tl.load(x + row * stride_x + k + inner, mask=k + inner < K, other=0.0)
        scaled = tl.minimum(tl.maximum(part.to(tl.float32) / found, -448.0), 448.0)
        tl.store(out + row * K + k + inner, scaled.to(tl.float8e4nv), mask=k + inner < K)


def shape_of(packed: Packed, rows: int, outputs: int) -> Shape:
    return Shape(
        K=packed.num_inputs,
        WIDTH=packed.values.shape[1],
        BITS=packed.bits,
        GROUP=packed.group_size,
        GROUPS=len(packed.scales),
        PIECE=packed.piece,
        M=rows,
        N=outputs,
    )


def weight_only_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See kernels.reference.quant.weight_only_product."""
    if len(x) > MOST_FUSED_ROWS:
        weight = dequantized(packed, x.dtype)
        columns = x if packed.order is None else x.index_select(1, packed.order)
        return F.linear(columns, weight, bias)
    out = x.new_empty((len(x), packed.num_outputs))
    if len(x):
        for launch in product_launches(x, packed, bias, out):
            launch.run()
    return out


def product_launches(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor
) -> list[Launch]:
    """Of at most MOST_FUSED_ROWS rows."""
    tile = product_tile(len(x), x.element_size())
    programs = triton.cdiv(packed.num_outputs, tile.outputs)
    num_steps = triton.cdiv(packed.values.shape[1], packed.piece)
    splits = num_splits(arch_of(x), programs, num_steps)
    if splits == 1:
        return [product_launch((x, packed, bias, out), tile, num_steps, 1)]
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    return [
        product_launch((x, packed, None, parts), tile, num_steps, splits),
        sum_launch(parts, bias, out),
    ]


def product_launch(
    tensors: tuple[torch.Tensor, Packed, torch.Tensor | None, torch.Tensor],
    tile: Tile,
    num_steps: int,
    splits: int,
) -> Launch:
    """tensors: x [M, K], the matrix, bias [N] and out [splits, M, N]."""
    x, packed, bias, out = tensors
    steps = triton.cdiv(num_steps, splits)
    args = {
        "x": x,
        "values": packed.values,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "order": packed.order,
        "bias": bias,
        "out": out,
        "num_rows": len(x),
        "stride_x": x.stride(0),
        "num_outputs": packed.num_outputs,
        "num_steps": num_steps,
        "steps_a_split": steps,
        "S": shape_of(packed, tile.rows, tile.outputs),
    }
    programs = triton.cdiv(packed.num_outputs, tile.outputs), triton.cdiv(len(x), tile.rows)
    return Launch(product_kernel, (*programs, splits), args, tile.warps, tile.stages)


def sum_launch(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """parts: [splits, M, N] float32."""
    args = {
        "parts": parts,
        "bias": bias,
        "out": out,
        "size": out.numel(),
        "num_outputs": out.shape[1],
        "SPLITS": len(parts),
        "TILE": SUM_TILE,
    }
    return Launch(sum_kernel, (triton.cdiv(out.numel(), SUM_TILE),), args, 4, 1)


def dequantized(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K], its columns in the order they are packed in."""
    shape = (packed.num_outputs, packed.num_inputs)
    out = torch.empty(shape, dtype=dtype, device=packed.values.device)
    dequantize_launch(packed, out).run()
    return out


def dequantize_launch(packed: Packed, out: torch.Tensor) -> Launch:
    args = {
        "values": packed.values,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "out": out,
        "num_outputs": packed.num_outputs,
        "S": shape_of(packed, 0, DEQUANTISED_OUTPUTS),
    }
    steps = triton.cdiv(packed.values.shape[1], packed.piece)
    grid = (triton.cdiv(packed.num_outputs, DEQUANTISED_OUTPUTS), steps)
    return Launch(dequantize_kernel, grid, args, 4, 1)


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.reference.quant.quantize_rows."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        quantize_launch(x, scale, out, scales).run()
    return out, scales


def quantize_launch(
    x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor
) -> Launch:
    args = {
        "x": x,
        "scale": scale,
        "out": out,
        "scales": scales,
        "stride_x": x.stride(0),
        "K": x.shape[1],
        "TILE": min(2048, triton.next_power_of_2(x.shape[1])),
    }
    return Launch(quantize_kernel, (len(x),), args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Groups of 32, 128 and whole rows, zeros and none, sorted inputs, decodes to prompts."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for packed in list(examples())[:: 5 if dtype is torch.float16 else 1]:
            yield from of_rows(packed, dtype)
        x = torch.empty((64, 4096), dtype=dtype, device="meta")
        eights, scales = torch.empty_like(x, dtype=FP8), x.new_empty((64, 1), dtype=torch.float32)
        for scale in (None, scales[0]):
            yield quantize_launch(x, scale, eights, scales)


def of_rows(packed: Packed, dtype: torch.dtype) -> Iterator[Launch]:
    x = torch.empty((64, packed.num_inputs), dtype=dtype, device="meta")
    out, bias = x.new_empty((64, packed.num_outputs)), x.new_empty(packed.num_outputs)
    for num_rows in (1, 64):
        yield from product_launches(x[:num_rows], packed, bias, out[:num_rows])
    tensors = (x[:32], packed, bias, out[:32])
    yield product_launch(tensors, product_tile(32, dtype.itemsize), 8, 1)
    yield dequantize_launch(packed, x.new_empty((packed.num_outputs, packed.num_inputs)))


def examples() -> Iterator[Packed]:
    """Matrices as files of each kind hold them, 4096 by 4096."""
    for dtype, bits, group_size, has_zeros, is_sorted in (
        (torch.uint8, 4, 128, True, False),
        (torch.uint8, 4, 128, False, True),
        (torch.uint8, 4, 32, True, False),
        (torch.uint8, 8, 128, True, True),
        (torch.uint8, 8, 4096, False, False),
        (FP8, 8, 128, False, False),
    ):
        values = torch.empty((4096, 4096), dtype=dtype, device="meta")
        scales = torch.empty((4096, 4096 // group_size), dtype=torch.float16, device="meta")
        zeros = torch.empty_like(scales, dtype=torch.uint8) if has_zeros else None
        packed = pack(Quantized(values, scales, bits, group_size, zeros))
        order = torch.empty(4096, dtype=torch.int32, device="meta")
        yield packed._replace(order=order if is_sorted else None)
