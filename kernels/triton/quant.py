"""Products with quantised weights: integers of 4 and 8 bits, 8-bit floats, scales by group.

Weights are dequantised in registers (unpack.py). For very many rows, they are dequantised to
scratch memory, and torch multiplies. Sums over parts of the inputs are added in order, without
atomics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from kernels.quant_tuning import QuantTile, most_fused_rows, num_splits, product_tile
from kernels.quantized import Packed, Quantized, pack
from kernels.triton.launch import Launch, arch_of
from kernels.triton.unpack import bytes_of, of_group, packed_sums, piece_of, shape_of

FP8 = torch.float8_e4m3fn
SUM_TILE = 1024
DEQUANTISED_OUTPUTS = 32  # per program
MOST_GATHERED_ROWS = 16  # for more rows, columns of x are reordered once for all programs


@triton.jit(do_not_specialize=["num_rows", "num_steps", "steps_a_split"])
def packed_product_kernel(  # noqa: PLR0913
    x, values, scales, zeros, order, bias, out, num_rows, stride_x, num_outputs, num_steps,
    steps_a_split, S: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, tile of outputs, split of the inputs): out[split, row, output]
    = x @ weight.T over the inputs of the split. Programs with the same weights are adjacent, so
    that the weights are read from memory once."""
    row = tl.program_id(0) * S.M + tl.arange(0, S.M)
    output = tl.program_id(1) * S.N + tl.arange(0, S.N)
    split = tl.program_id(2)
    is_row, column = row < num_rows, tl.minimum(output, num_outputs - 1)
    rows = x + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * stride_x
    matrix = values + column.to(tl.int64)[:, None] * S.WIDTH
    first = split * steps_a_split
    steps = first, tl.minimum(first + steps_a_split, num_steps)
    tables = scales, zeros, column, num_outputs
    acc = packed_sums((rows, is_row, order), matrix, tables, steps, S)
    if bias is not None:
        acc += tl.load(bias + column).to(tl.float32)[:, None]
    place = (split * num_rows + row).to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = is_row[:, None] & (output < num_outputs)[None, :]
    tl.store(out + place, tl.trans(acc).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size", "num_splits"])
def sum_kernel(parts, bias, out, size, num_outputs, num_splits, TILE: tl.constexpr):
    """One program per TILE of the flattened output: adds all splits, in order, and the bias."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < size
    total = tl.zeros([TILE], tl.float32)
    for split in range(num_splits):
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % num_outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(values, scales, zeros, out, num_outputs, S: tl.constexpr):
    """One program per (tile of outputs, step over the inputs): out[output, column] = (value - zero)
    * scale. Columns are in packed order."""
    column = tl.program_id(0) * S.N + tl.arange(0, S.N)
    is_column, there = column < num_outputs, tl.minimum(column, num_outputs - 1)
    step = tl.program_id(1)
    inner = tl.arange(0, S.PIECE)
    raw = bytes_of(values + there.to(tl.int64)[:, None] * S.WIDTH, step, S)
    for half in tl.static_range(8 // S.BITS):
        k = step * S.STEP + half * S.PIECE
        scale, zero = of_group((scales, zeros, there, num_outputs), k, S)
        weight = piece_of(raw, half, zero, out.dtype.element_ty, S)
        weight = weight.to(tl.float32) * scale[:, None]
        place = out + column.to(tl.int64)[:, None] * S.K + (k + inner)[None, :]
        mask = is_column[:, None] & (k + inner < S.K)[None, :]
        tl.store(place, weight.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(x, scale, out, scales, stride_x, K: tl.constexpr, TILE: tl.constexpr):
    """One program per row converts x / scale to 8-bit floats. Without `scale`, the row's scale is
    its largest magnitude / 448. Values are clamped; NaN stays NaN, so that errors show in the
    product. Quotients are rounded to nearest, because 16-bit inputs make many ties, and the faster
    division rounds a tie up or down: it changes the value by up to an eighth."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, TILE)
    if scale is None:
        largest = tl.zeros([TILE], tl.float32)
        for k in range(0, K, TILE):
            part = tl.load(x + row * stride_x + k + inner, mask=k + inner < K, other=0.0)
            largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
        found = tl.maximum(tl.div_rn(tl.max(largest), 448.0), 1e-30)
    else:
        found = tl.load(scale)
    tl.store(scales + row, found)
    for k in range(0, K, TILE):
        part = tl.load(x + row * stride_x + k + inner, mask=k + inner < K, other=0.0)
        scaled = tl.div_rn(part.to(tl.float32), found)
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + row * K + k + inner, scaled.to(tl.float8e4nv), mask=k + inner < K)


def weight_only_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias with a packed weight; see kernels.reference.quant.weight_only_product."""
    if packed.order is not None and len(x) > MOST_GATHERED_ROWS:
        x, packed = x.index_select(1, packed.order), packed._replace(order=None)
    if len(x) > most_fused_rows(x.element_size()):
        return F.linear(x, dequantized(packed, x.dtype), bias)
    out = x.new_empty((len(x), packed.num_outputs))
    if len(x):
        for launch in product_launches(x, packed, bias, out):
            launch.run()
    return out


def product_launches(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, out: torch.Tensor
) -> list[Launch]:
    """Returns the launches of a product of at least one row with weights unpacked in registers."""
    tile = product_tile(arch_of(x), len(x), x.element_size())
    programs = triton.cdiv(packed.num_outputs, tile.outputs) * triton.cdiv(len(x), tile.rows)
    num_steps = triton.cdiv(packed.values.shape[1], packed.piece)
    splits = num_splits(arch_of(x), tile, programs, num_steps)
    if splits == 1:
        return [product_launch((x, packed, bias, out), tile, num_steps, 1)]
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    return [
        product_launch((x, packed, None, parts), tile, num_steps, splits),
        sum_launch(parts, bias, out),
    ]


def product_launch(
    tensors: tuple[torch.Tensor, Packed, torch.Tensor | None, torch.Tensor],
    tile: QuantTile,
    num_steps: int,
    splits: int,
) -> Launch:
    """Returns the launch of `packed_product_kernel`. tensors: (x [M, K], the weight, bias [N], out
    [splits, M, N]); num_steps: steps over the inputs, of all splits."""
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
    programs = triton.cdiv(len(x), tile.rows), triton.cdiv(packed.num_outputs, tile.outputs)
    return Launch(packed_product_kernel, (*programs, splits), args, tile.warps, tile.stages)


def sum_launch(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """The launch of `sum_kernel`. parts: [splits, M, N] float32."""
    args = {
        "parts": parts,
        "bias": bias,
        "out": out,
        "size": out.numel(),
        "num_outputs": out.shape[1],
        "num_splits": len(parts),
        "TILE": SUM_TILE,
    }
    return Launch(sum_kernel, (triton.cdiv(out.numel(), SUM_TILE),), args, 4, 1)


def dequantized(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Returns the dequantised weight [N, K]; its K columns stay in packed order."""
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
    """Quantise the rows of x [M, K] to float8_e4m3fn; see kernels.quant.quantize_rows."""
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
    """Launches to compile ahead: each matrix of `examples` for one to 512 rows, and the
    quantisation of inputs."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for packed in list(examples())[:: 5 if dtype is torch.float16 else 1]:
            yield from of_rows(packed, dtype)
        x = torch.empty((64, 4096), dtype=dtype, device="meta")
        eights, scales = torch.empty_like(x, dtype=FP8), x.new_empty((64, 1), dtype=torch.float32)
        for scale in (None, scales[0]):
            yield quantize_launch(x, scale, eights, scales)


def of_rows(packed: Packed, dtype: torch.dtype) -> Iterator[Launch]:
    x = torch.empty((512, packed.num_inputs), dtype=dtype, device="meta")
    out, bias = x.new_empty((512, packed.num_outputs)), x.new_empty(packed.num_outputs)
    for num_rows in (1, 32, 64, 128, 512):
        is_ordered = num_rows <= MOST_GATHERED_ROWS
        one = packed if is_ordered else packed._replace(order=None)
        yield from product_launches(x[:num_rows], one, bias, out[:num_rows])
        tile = product_tile(arch_of(x), num_rows, dtype.itemsize)
        yield product_launch((x[:num_rows], one, bias, out[:num_rows]), tile, 8, 1)
    yield dequantize_launch(packed, x.new_empty((packed.num_outputs, packed.num_inputs)))


def examples() -> Iterator[Packed]:
    """An example matrix in each format, 4096 by 4096."""
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
