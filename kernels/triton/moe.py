"""Mixtures of experts: pairs of token and expert, sorted into blocks of one expert (groups.py).

Experts are plain or packed. A token's expert outputs are added in order and without atomics, so two
runs of a batch are bit-identical. The total number of pairs decides the number of pairs per
program, which may change the last bits of a token's result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quant_tuning import QuantTile, product_tile
from kernels.quantized import Packed, Quantized, pack, stack
from kernels.reference.grouped import Experts
from kernels.triton.activation import act_mul
from kernels.triton.groups import Groups, align, align_launches
from kernels.triton.launch import Launch, arch_of
from kernels.triton.unpack import packed_sums, shape_of
from kernels.tuning import pad_power


class Tiles(NamedTuple):
    """Size of the tile that one program of `product_kernel` computes."""

    M: int  # pairs
    N: int  # outputs
    K: int  # inputs per step


@triton.jit(do_not_specialize=["num_pairs"])
def product_kernel(  # noqa: PLR0913
    a, matrices, out, pairs, block_groups, weights, num_pairs, stride_a, stride_matrix,
    N: tl.constexpr, K: tl.constexpr, FAN: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One program per (tile of outputs, block of pairs): out[pair] = matrix of the block's expert @
    a[pair // FAN], multiplied by the pair's weight unless weights is None."""
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


@triton.jit(do_not_specialize=["num_pairs", "num_steps"])
def packed_experts_kernel(  # noqa: PLR0913
    a, values, scales, zeros, order, out, pairs, block_groups, weights, num_pairs, stride_a,
    num_outputs, num_steps, FAN: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """`product_kernel` for packed matrices. One program per (tile of outputs, block of pairs)."""
    block = tl.program_id(1)
    group = tl.load(block_groups + block).to(tl.int64)
    if group < 0:
        return
    pair = tl.load(pairs + block * S.M + tl.arange(0, S.M))
    is_pair = pair < num_pairs
    output = tl.program_id(0) * S.N + tl.arange(0, S.N)
    column = tl.minimum(output, num_outputs - 1)
    rows = a + (tl.minimum(pair, num_pairs - 1) // FAN).to(tl.int64)[None, :] * stride_a
    matrix = values + (group * num_outputs + column)[:, None] * S.WIDTH
    table = group * S.GROUPS * num_outputs
    if zeros is not None:
        zeros += table
    if order is not None:
        order += group * S.K
    tables = scales + table, zeros, column, num_outputs
    acc = packed_sums((rows, is_pair, order), matrix, tables, (0, num_steps), S)
    # Read again, to save registers during the loop.
    pair = tl.load(pairs + block * S.M + tl.arange(0, S.M), cache_modifier=".cg")
    is_pair, sums = pair < num_pairs, tl.trans(acc)
    if weights is not None:
        sums = sums * tl.load(weights + pair, mask=is_pair, other=0.0)[:, None]
    there = out + pair.to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = is_pair[:, None] & (output < num_outputs)[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(parts, chosen, out, H: tl.constexpr, FAN: tl.constexpr, TILE: tl.constexpr):
    """One program per (token, block of columns): adds a token's expert outputs in a fixed order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for i in range(FAN):
        pair = token * FAN + i
        mask = (column < H) & (tl.load(chosen + pair) >= 0)
        total += tl.load(parts + pair * H + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)


# Bytes of an element of x -> pairs per program -> (tiles, warps, stages).
_TILES = {
    2: {
        16: (Tiles(16, 64, 128), 4, 3),
        64: (Tiles(64, 128, 64), 4, 3),
        128: (Tiles(128, 128, 64), 8, 3),
    },
    4: {16: (Tiles(16, 64, 32), 4, 2), 32: (Tiles(32, 64, 32), 4, 2)},
}


def block_rows(num_pairs: int, num_groups: int, itemsize: int) -> int:
    """Returns the number of (token, expert) pairs per program, by the average number of pairs per
    expert. num_groups: number of experts; itemsize: bytes of an element of x."""
    a_group = num_pairs // num_groups
    if itemsize == 4:
        return 16 if a_group < 32 else 32
    return 16 if a_group < 32 else 64 if a_group < 128 else 128


def rows_a_program(x: torch.Tensor, rows: int, experts: Experts) -> int:
    """Returns how many (token, expert) pairs a program computes: `rows` or, for packed experts, as
    many as their tile for `rows` pairs has."""
    return tile_of(x, rows, experts).rows if isinstance(experts, Packed) else rows


def tile_of(x: torch.Tensor, rows: int, experts: Packed) -> QuantTile:
    is_gathered = experts.order is not None
    return product_tile(arch_of(x), rows, x.element_size(), is_gathered=is_gathered)


def mixture(
    x: torch.Tensor,
    gate_up: Experts,
    down: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    act: str,
) -> torch.Tensor:
    """x [N, H] -> [N, H]: weighted sum of each token's expert outputs. chosen, weights: [N, k]."""
    out = torch.empty_like(x)
    if not out.numel():
        return out
    (num_groups, width), fan = sizes_of(gate_up), chosen.shape[1]
    rows = block_rows(chosen.numel(), num_groups, x.element_size())
    rows = min(rows_a_program(x, rows, experts) for experts in (gate_up, down))
    groups = align(chosen, num_groups, rows)
    hidden = x.new_empty((chosen.numel(), width))
    experts_launch((x, gate_up, hidden), groups, None, fan).run()
    inner = act_mul(hidden, act)
    parts = x.new_empty((chosen.numel(), x.shape[1]))
    experts_launch((inner, down, parts), groups, weights.contiguous(), 1).run()
    sum_launch(parts, chosen.contiguous(), out).run()
    return out


def sizes_of(experts: Experts) -> tuple[int, int]:
    """Returns (number of experts, number of outputs of each expert)."""
    values = experts.values if isinstance(experts, Packed) else experts
    return values.shape[0], values.shape[1]


def experts_launch(
    tensors: tuple[torch.Tensor, Experts, torch.Tensor],
    groups: Groups,
    weights: torch.Tensor | None,
    fan: int,
) -> Launch:
    """Returns the launch that multiplies each pair's row by its expert's matrix. tensors: rows [P /
    fan, K], experts with N outputs and K inputs, out [P, N], for P (token, expert) pairs; fan:
    pairs per row."""
    a, experts, out = tensors
    if isinstance(experts, Packed):
        return packed_launch((a, out), experts, groups, weights, fan)
    return product_launch((a, experts, out), groups, weights, fan)


def packed_launch(
    tensors: tuple[torch.Tensor, torch.Tensor],
    experts: Packed,
    groups: Groups,
    weights: torch.Tensor | None,
    fan: int,
) -> Launch:
    a, out = tensors
    tile = tile_of(a, groups.block, experts)
    args = {
        "a": a,
        "values": experts.values,
        "scales": experts.scales,
        "zeros": experts.zeros,
        "order": experts.order,
        "out": out,
        "pairs": groups.pairs,
        "block_groups": groups.block_groups,
        "weights": weights,
        "num_pairs": groups.num_pairs,
        "stride_a": a.stride(0),
        "num_outputs": experts.num_outputs,
        "num_steps": triton.cdiv(experts.values.shape[-1], experts.piece),
        "FAN": fan,
        "S": shape_of(experts, groups.block, tile.outputs),
    }
    grid = (triton.cdiv(experts.num_outputs, tile.outputs), len(groups.block_groups))
    return Launch(packed_experts_kernel, grid, args, tile.warps, tile.stages)


def product_launch(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    groups: Groups,
    weights: torch.Tensor | None,
    fan: int,
) -> Launch:
    a, matrices, out = tensors
    _, width, depth = matrices.shape
    shape, warps, stages = _TILES[a.element_size()][groups.block]
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
    """Yield kernel launches to compile ahead of use: 128 experts, with plain and packed weights."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_tokens in (64, 1024, 8192):
            x = torch.empty((num_tokens, 2048), dtype=dtype, device="meta")
            yield from of_experts(x, x.new_empty((128, 1536, 2048)), x.new_empty((128, 2048, 768)))
            if dtype is torch.bfloat16:
                for form in forms():
                    yield from of_experts(x, *form)


def of_experts(x: torch.Tensor, gate_up: Experts, down: Experts) -> Iterator[Launch]:
    chosen = torch.empty((len(x), 8), dtype=torch.int32, device="meta")
    rows = block_rows(chosen.numel(), 128, x.element_size())
    rows = rows_a_program(x, rows, gate_up)
    groups, launches = align_launches(chosen.reshape(-1), 128, rows)
    hidden = x.new_empty((chosen.numel(), 1536))
    inner, parts = hidden[:, :768], x.new_empty((chosen.numel(), 2048))
    if not isinstance(gate_up, Packed):
        yield from launches
        yield sum_launch(parts, chosen, x)
    yield experts_launch((x, gate_up, hidden), groups, None, 8)
    yield experts_launch((inner, down, parts), groups, chosen.float(), 1)


def forms() -> Iterator[tuple[Packed, Packed]]:
    """Yields examples of packed experts (gate_up, down) in the formats of AWQ, GPTQ with groups of
    32, GPTQ with sorted inputs, and block-wise 8-bit floats."""
    for dtype, bits, group_size, has_zeros, is_sorted in (
        (torch.uint8, 4, 128, True, False),
        (torch.uint8, 4, 32, False, False),
        (torch.uint8, 4, 128, True, True),
        (torch.float8_e4m3fn, 8, 128, False, False),
    ):
        pair = []
        for shape in ((1536, 2048), (2048, 768)):
            values = torch.empty(shape, dtype=dtype, device="meta")
            scales = values.new_empty((shape[0], shape[1] // group_size), dtype=torch.float16)
            zeros = torch.empty_like(scales, dtype=torch.uint8) if has_zeros else None
            packed = pack(Quantized(values, scales, bits, group_size, zeros))
            order = torch.empty(shape[1], dtype=torch.int32, device="meta")
            pair.append(packed._replace(order=order if is_sorted else None))
        yield stack([pair[0]] * 128), stack([pair[1]] * 128)
