"""Products of float32 inputs with float32 or float16 weights.

Weights are packed as ``[panels, in, 64]``: a panel of 64 outputs is read in memory order in full
vectors for any number of rows. The same packed copy is used for one row, at the speed of memory,
and for thousands of rows, at the speed of arithmetic. Float16 weights are widened in registers.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from kernels.cpu.activation import CODES, activate_row
from kernels.cpu.matmul.blocks import PANEL as HALF
from kernels.cpu.matmul.blocks import UNIT
from kernels.cpu.matmul.dequantized import fill_floats
from kernels.cpu.native import INLINE, Kernel, f32, i64, next_item
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import LINE, panel_product

PANEL = 64  # outputs per panel
NUM_PARAMETERS = 10

_ROWS = 6  # rows per register tile; with four vectors of outputs they fill the registers
_BLOCK = 288  # maximum rows per item, so that x stays in the cache for all panels
_DEPTH = 128  # inputs per pass: so much of a panel stays in the L1 cache
_ENOUGH = 65536  # with fewer multiplications, one thread is faster
_ITEMS_A_THREAD = 4
_PANELS = 3  # panels per item if there are few, so that the next one can be prefetched
_ZERO = np.float32(0)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack [out, in] to [panels, in, PANEL], padded with zeros."""
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
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    num_out: int,
    act: str = "",
) -> torch.Tensor:
    """act(x @ weight.T + bias): x [N, in] contiguous float32 -> [N, num_out] float32; packed: as
    `pack` returned it; bias: [num_out] float32; act: a key of ``kernels.cpu.activation.CODES``, or
    "" for none."""
    kernel = PACKED[packed.element_size()]
    return _product(kernel, x, packed.data_ptr(), bias, num_out, CODES[act] + 1 if act else 0)


def dequantized_product(
    x: torch.Tensor, table: NDArray[np.int64], bias: torch.Tensor | None, num_out: int
) -> torch.Tensor:
    """`packed_product` with the packed weight in blocks of this table (see
    ``kernels.cpu.matmul.dequantized``); the same bits as with the dequantised weight."""
    return _product(BLOCKS, x, table.ctypes.data, bias, num_out)


def _product(
    kernel: Kernel,
    x: torch.Tensor,
    weights: int,
    bias: torch.Tensor | None,
    num_out: int,
    act: int = 0,
) -> torch.Tensor:
    """Run a product. weights: address of the packed weights or of their table; act: 0 for none,
    else a number of ``CODES`` plus 1."""
    num, num_in = x.shape
    out, panels = x.new_empty((num, num_out)), -(-num_out // PANEL)
    threads = num_threads() if num * num_in * num_out >= _ENOUGH else 1
    rows = rows_an_item(num, panels, threads)
    items = -(-num // max(rows, 1)) * panels
    kernel.run(
        threads,
        x.data_ptr(),
        weights,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num,
        num_in,
        num_out,
        rows,
        panels_an_item(panels, items, threads),
        act,
    )
    return out


def rows_an_item(num: int, panels: int, threads: int) -> int:
    """Rows per work item: as many as stay in the L2 cache, fewer if there would be too few items
    for all threads."""
    if threads == 1 or panels >= threads * _ITEMS_A_THREAD:
        return max(1, min(num, _BLOCK))
    pieces = -(-threads * _ITEMS_A_THREAD // panels)
    return min(_BLOCK, max(1, -(-num // (pieces * _ROWS))) * _ROWS)


def panels_an_item(panels: int, items: int, threads: int) -> int:
    """Returns the number of panels per work item: as many as possible, since memory is fastest when
    read in order, but few enough that all threads get items."""
    at_least = min(_PANELS, panels // threads)
    return max(1, at_least, min(panels, items // (threads * _ITEMS_A_THREAD)))


@njit(**INLINE)
def _begin(c, ldc, num, width, bias):
    """Initialise `num` rows of sums at address c with the bias at address `bias`; 0: with zeros."""
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
def _add_rows(left, b, target, span, ahead, size):
    """Add a[:num, :depth] @ b[:depth] to c[:num] for a panel b of weights. left, target: (address,
    row stride in bytes) of a and c; span: (num, depth); size: bytes of an element of b, a literal.
    ahead: (address, cache lines) to prefetch; returns what is left of it."""
    (a, lda), (c, ldc), (num, depth), (wanted, lines) = left, target, span, ahead
    row, ldb = 0, PANEL * size
    while row + _ROWS <= num:
        # Rows after the first find b in the cache, and leave the way to memory free.
        if row > 0 and lines > 0:
            panel_product(a, lda, b, ldb, c, ldc, depth, wanted, 6, size)
            wanted += depth * LINE
            lines -= depth
        else:
            panel_product(a, lda, b, ldb, c, ldc, depth, b, 6, size)
        a, c = a + _ROWS * lda, c + _ROWS * ldc
        row += _ROWS
    if num - row == 5:
        panel_product(a, lda, b, ldb, c, ldc, depth, b, 5, size)
    elif num - row == 4:
        panel_product(a, lda, b, ldb, c, ldc, depth, b, 4, size)
    elif num - row == 3:
        panel_product(a, lda, b, ldb, c, ldc, depth, b, 3, size)
    elif num - row == 2:
        panel_product(a, lda, b, ldb, c, ldc, depth, b, 2, size)
    elif num - row == 1:
        panel_product(a, lda, b, ldb, c, ldc, depth, b, 1, size)
    return wanted, lines


def _packed_body(size: int, is_table: int = 0):
    """Make the kernel body (see kernels.cpu.native) for weights with `size` bytes per element.
    is_table: 1 for packed weights in blocks (parameter 2 is the address of their table), which are
    dequantised to float32."""

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        num, num_out, rows, per = p[5], p[7], p[8], p[9]
        panels, blocks = (num_out + PANEL - 1) // PANEL, (num + rows - 1) // rows
        groups = (panels + per - 1) // per
        edge = np.empty((rows, PANEL), np.float32)
        scratch = np.empty((_DEPTH if is_table else 1, PANEL), np.float32)
        while True:
            item = next_item(row)
            if item >= groups * blocks:
                break
            block = item // groups
            first, start = block * rows, (item - block * groups) * per
            count, end = min(rows, num - first), min(start + per, panels)
            for panel in range(start, end):
                place = panel, panel + 1 < end and not is_table, scratch.ctypes.data
                _panel_rows(p, (first, count), place, edge, size, is_table)

    return body


@njit(inline="always")
def _panel_rows(p, rows, place, edge, size, is_table):
    """Multiply rows of x by one panel of weights and write the outputs. rows: (first row, number of
    rows); place: (index of the panel, whether to prefetch the next panel, address of memory for the
    inputs of one pass if weights are dequantised); edge: scratch memory [rows, 64] for the sums of
    an incomplete panel; size, is_table: literals, as in `_packed_body`."""
    (first, count), (panel, has_next, scratch), num_in, num_out = rows, place, p[6], p[7]
    start, width = panel * PANEL, min(PANEL, num_out - panel * PANEL)
    out, stride = p[4] + (first * num_out + start) * 4, num_out * 4
    if width < PANEL:
        out, stride = edge.ctypes.data, PANEL * 4
    _begin(out, stride, count, width, p[3] + start * 4 if p[3] else 0)
    a, b, line = p[1] + first * num_in * 4, p[2] + start * num_in * size, PANEL * size
    ahead = b + num_in * line, num_in * line // LINE if has_next else 0
    for k in range(0, num_in, _DEPTH):
        span = count, min(_DEPTH, num_in - k)
        left, right = (a + k * 4, num_in * 4), b + k * line
        if is_table:
            right = scratch
            _fill(p[2], (panel, k, span[1]), num_out, scratch)
        ahead = _add_rows(left, right, (out, stride), span, ahead, size)
    if p[10]:
        for i in range(count):
            activate_row(f32(out + i * stride, (width,)), p[10] - 1)
    if width < PANEL:
        for i in range(count):
            values = f32(p[4] + ((first + i) * num_out + start) * 4, (width,))
            for j in range(width):
                values[j] = edge[i, j]


@njit(inline="always")
def _fill(table, place, num_out, scratch):
    """Dequantise some inputs of a panel of 64 outputs. place: (index of the panel, first input,
    number of inputs)."""
    panel, first, num = place
    span = first // UNIT, (num + UNIT - 1) // UNIT
    fill_floats(table, 2 * panel, span, scratch, PANEL * 4)
    if panel * PANEL + HALF < num_out:
        fill_floats(table, 2 * panel + 1, span, scratch + HALF * 4, PANEL * 4)


# By bytes of a weight element.
PACKED = {size: Kernel(_packed_body(size), heavy=True) for size in (4, 2)}
BLOCKS = Kernel(_packed_body(4, 1), heavy=True)
