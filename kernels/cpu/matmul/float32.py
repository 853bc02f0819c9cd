"""Products of a few to many float32 rows with a weight matrix of float32 or float16.

The packed layout is ``[panels, in, 64]``: 64 outputs side by side, so that one pass over a panel
reads memory in order and feeds whole vectors, whatever the number of rows. One copy serves a single
row at the speed of memory and thousands at the speed of arithmetic. Of float16, what is read is
widened in registers.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.native import INLINE, Kernel, f32, i64, next_item
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import panel_product

PANEL = 64  # outputs side by side

_ROWS = 6  # rows a tile: with four vectors of outputs, what the registers hold
_BLOCK = 72  # rows at most that go through all panels before the next: x is then read from cache
_DEPTH = 3072  # inputs a pass: that much of a panel stays in the second-level cache
_ENOUGH = 65536  # multiplications worth a second thread
_ITEMS_A_THREAD = 4
_ZERO = np.float32(0)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in, PANEL], zeros after the last output."""
    num_out, num_in = weight.shape
    panels = -(-num_out // PANEL)
    packed = weight.new_empty((panels, num_in, PANEL))
    whole = num_out // PANEL
    packed[:whole].copy_(weight[: whole * PANEL].view(whole, PANEL, num_in).transpose(1, 2))
    if whole < panels:
        packed[whole] = 0
        packed[whole, :, : num_out - whole * PANEL] = weight[whole * PANEL :].T
    return packed


def packed_product(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, num_out: int
) -> torch.Tensor:
    """x [N, in] contiguous float32 -> [N, out] float32; bias: [out] float32."""
    num, num_in = x.shape
    out = x.new_empty((num, num_out))
    threads = num_threads() if num * num_in * num_out >= _ENOUGH else 1
    PACKED[packed.element_size()].run(
        threads,
        x.data_ptr(),
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num,
        num_in,
        num_out,
        rows_an_item(num, packed.shape[0], threads),
    )
    return out


def rows_an_item(num: int, panels: int, threads: int) -> int:
    """A block that stays in the second-level cache, less if that leaves too few to share out."""
    if threads == 1 or panels >= threads * _ITEMS_A_THREAD:
        return max(1, min(num, _BLOCK))
    pieces = -(-threads * _ITEMS_A_THREAD // panels)
    return min(_BLOCK, max(1, -(-num // (pieces * _ROWS))) * _ROWS)


@njit(**INLINE)
def _begin(c, ldc, num, width, bias):
    """Rows of sums start at the bias, or at zero."""
    for row in range(num):
        sums = f32(c + row * ldc, (width,))
        if bias:
            values = f32(bias, (width,))
            for i in range(width):
                sums[i] = values[i]
        else:
            for i in range(width):
                sums[i] = _ZERO


@njit(inline="always")
def _add_rows(a, lda, b, c, ldc, span, size):
    """c[num, PANEL] += a[num, depth] @ b[depth, PANEL]; span: num and depth, size: bytes of an
    element of b, a literal."""
    num, depth = span
    row, ldb = 0, PANEL * size
    while row + _ROWS <= num:
        panel_product(a + row * lda, lda, b, ldb, c + row * ldc, ldc, depth, 6, 4, 16, 0, size)
        row += _ROWS
    a, c = a + row * lda, c + row * ldc
    if num - row == 5:
        panel_product(a, lda, b, ldb, c, ldc, depth, 5, 4, 16, 0, size)
    elif num - row == 4:
        panel_product(a, lda, b, ldb, c, ldc, depth, 4, 4, 16, 0, size)
    elif num - row == 3:
        panel_product(a, lda, b, ldb, c, ldc, depth, 3, 4, 16, 0, size)
    elif num - row == 2:
        panel_product(a, lda, b, ldb, c, ldc, depth, 2, 4, 16, 0, size)
    elif num - row == 1:
        panel_product(a, lda, b, ldb, c, ldc, depth, 1, 4, 16, 0, size)


def _packed_body(size: int):
    """A body for the bytes of an element of the weights."""

    def body(row):
        p = i64(row, (9,))
        num, num_in, num_out, rows = p[5], p[6], p[7], p[8]
        panels, blocks = (num_out + PANEL - 1) // PANEL, (num + rows - 1) // rows
        edge = np.empty((rows, PANEL), np.float32)
        while True:
            item = next_item(row)
            if item >= panels * blocks:
                break
            block = item // panels
            panel = item - block * panels
            first = block * rows
            count, width = min(rows, num - first), min(PANEL, num_out - panel * PANEL)
            out = p[4] + (first * num_out + panel * PANEL) * 4
            target, stride = out, num_out * 4
            if width < PANEL:
                target, stride = edge.ctypes.data, PANEL * 4
            _begin(target, stride, count, width, p[3] + panel * PANEL * 4 if p[3] else 0)
            for start in range(0, num_in, _DEPTH):
                depth = min(_DEPTH, num_in - start)
                a = p[1] + (first * num_in + start) * 4
                b = p[2] + (panel * num_in + start) * (PANEL * size)
                _add_rows(a, num_in * 4, b, target, stride, (count, depth), size)
            if width < PANEL:
                for i in range(count):
                    values = f32(out + i * num_out * 4, (width,))
                    for j in range(width):
                        values[j] = edge[i, j]

    return body


# By bytes of an element of the weights.
PACKED = {size: Kernel(_packed_body(size), heavy=True) for size in (4, 2)}
