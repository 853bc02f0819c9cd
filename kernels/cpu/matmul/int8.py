"""8-bit products: weights have one scale per output, inputs are quantised per row.

A row is stored as unsigned bytes, x = scale * (byte - 128), because the processor's instruction
multiplies unsigned by signed bytes. The 128 is corrected with the sum of each output's weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from kernels.cpu.matmul.float32 import PANEL, rows_an_item
from kernels.cpu.native import INLINE, Kernel, f32, float_of_bits, i32, i64, next_item, u8
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import HAS_BYTE_PRODUCT, byte_tile_product

IS_SUPPORTED = HAS_BYTE_PRODUCT

_ROWS = 6
_DEEP = 4  # inputs per lane and instruction
_ZERO_POINT = 128
_ENOUGH = 262144  # with fewer multiplications, one thread is faster
_ZERO, _LARGEST = np.float32(0), np.float32(127)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ROUND = np.float32(_ZERO_POINT + 0.5)


class Int8Weight(NamedTuple):
    """A weight [out, in] = scale * integer, packed for :func:`int8_product`."""

    packed: torch.Tensor  # [panels, ceil(in / 4), PANEL, 4] int8
    scales: torch.Tensor  # [out] float32
    sums: torch.Tensor  # [panels * PANEL] int32, 128 times the sum of each output's integers


def quantize(weight: torch.Tensor) -> Int8Weight:
    """Quantise a weight [out, in] symmetrically, with one scale per output."""
    num_out, num_in = weight.shape
    scales = weight.abs().amax(dim=1).float().div_(127).clamp_(min=1e-30)
    panels, depth = -(-num_out // PANEL), -(-num_in // _DEEP)
    packed = torch.zeros((panels, depth, PANEL, _DEEP), dtype=torch.int8)
    sums = torch.zeros(panels * PANEL, dtype=torch.int32)
    for panel in range(panels):
        rows = slice(panel * PANEL, min((panel + 1) * PANEL, num_out))
        integers = (weight[rows].float() / scales[rows, None]).round_().to(torch.int8)
        sums[rows] = integers.sum(dim=1, dtype=torch.int32) * _ZERO_POINT
        padded = torch.nn.functional.pad(integers, (0, depth * _DEEP - num_in))
        count = len(integers)
        packed[panel, :, :count] = padded.view(count, depth, _DEEP).transpose(0, 1)
    return Int8Weight(packed, scales, sums)


def int8_product(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias: x [N, in] contiguous float32 -> [N, out] float32. Rows with numbers that
    are not finite get results that are not finite."""
    num, num_in = x.shape
    num_out = len(weight.scales)
    depth = weight.packed.shape[1]
    threads = num_threads() if num * num_in * num_out >= _ENOUGH else 1
    rows = torch.empty((num, depth * _DEEP), dtype=torch.uint8)
    scales = torch.empty(num, dtype=torch.float32)
    _QUANTIZE.run(
        threads if num >= 8 else 1,
        x.data_ptr(),
        rows.data_ptr(),
        scales.data_ptr(),
        num,
        num_in,
        depth * _DEEP,
    )
    out = x.new_empty((num, num_out))
    _BYTES.run(
        threads,
        rows.data_ptr(),
        weight.packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        scales.data_ptr(),
        weight.scales.data_ptr(),
        weight.sums.data_ptr(),
        num,
        depth,
        num_out,
        rows_an_item(num, weight.packed.shape[0], threads),
    )
    return out


def _quantize_body(row):
    p = i64(row, (7,))
    num, width, padded = p[4], p[5], p[6]
    scales = f32(p[3], (num,))
    while True:
        n = next_item(row)
        if n >= num:
            break
        x, integers = f32(p[1] + n * width * 4, (width,)), u8(p[2] + n * padded, (padded,))
        # Without the sign bit, floats are ordered like their bits, and NaN is the largest.
        words, most = i32(p[1] + n * width * 4, (width,)), np.int32(0)
        for i in range(width):
            most = max(most, words[i] & _MAGNITUDE)
        largest = float_of_bits(np.int32(most))
        scales[n] = largest / _LARGEST
        inverse = _LARGEST / largest if largest > 0 else _ZERO
        for i in range(width):
            integers[i] = np.uint8(np.int32(x[i] * inverse + _ROUND))
        for i in range(width, padded):
            integers[i] = np.uint8(_ZERO_POINT)


@njit(**INLINE)
def _tile(a, lda, b, c, depth, count):
    """Multiply `count` (at most 6) quantised rows a by one panel b; c gets the integer sums."""
    if count == 6:
        byte_tile_product(a, lda, b, PANEL * 4, c, PANEL * 4, depth, 6, 4, 16, 1)
    elif count == 5:
        byte_tile_product(a, lda, b, PANEL * 4, c, PANEL * 4, depth, 5, 4, 16, 1)
    elif count == 4:
        byte_tile_product(a, lda, b, PANEL * 4, c, PANEL * 4, depth, 4, 4, 16, 1)
    elif count == 3:
        byte_tile_product(a, lda, b, PANEL * 4, c, PANEL * 4, depth, 3, 4, 16, 1)
    elif count == 2:
        byte_tile_product(a, lda, b, PANEL * 4, c, PANEL * 4, depth, 2, 4, 16, 1)
    else:
        byte_tile_product(a, lda, b, PANEL * 4, c, PANEL * 4, depth, 1, 4, 16, 1)


def _bytes_body(row):
    p = i64(row, (12,))
    num, depth, num_out, rows = p[8], p[9], p[10], p[11]
    panels, blocks = (num_out + PANEL - 1) // PANEL, (num + rows - 1) // rows
    totals = np.empty((_ROWS, PANEL), np.int32)
    while True:
        item = next_item(row)
        if item >= panels * blocks:
            break
        panel = item // blocks
        first = (item - panel * blocks) * rows
        b = p[2] + panel * depth * (PANEL * _DEEP)
        for n in range(first, min(first + rows, num), _ROWS):
            count = min(_ROWS, first + rows - n, num - n)
            _tile(p[1] + n * depth * _DEEP, depth * _DEEP, b, totals.ctypes.data, depth, count)
            _finish(p, totals, n, count, panel * PANEL, num_out)


@njit(**INLINE)
def _finish(p, totals, first_row, count, first, num_out):
    """Convert integer sums to float outputs: scale them, add the bias, store them. totals[0, 0] is
    the sum of row first_row of x and output `first`."""
    width = min(PANEL, num_out - first)
    scales, sums = f32(p[6] + first * 4, (width,)), i32(p[7] + first * 4, (width,))
    row_scales = f32(p[5] + first_row * 4, (count,))
    for i in range(count):
        out = f32(p[4] + ((first_row + i) * num_out + first) * 4, (width,))
        for j in range(width):
            out[j] = np.float32(np.int32(totals[i, j] - sums[j])) * (row_scales[i] * scales[j])
        if p[3]:
            bias = f32(p[3] + first * 4, (width,))
            for j in range(width):
                out[j] += bias[j]


_QUANTIZE = Kernel(_quantize_body)
_BYTES = Kernel(_bytes_body, heavy=True)
