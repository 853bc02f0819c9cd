"""Layer norms of float32 or bfloat16 rows, perhaps of the sum of two matrices."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.cells import elements, get, read_cells, write_cells
from kernels.cpu.native import INLINE, Kernel, bits, f32, f64, i64, next_item
from kernels.cpu.threads import num_threads

_ENOUGH = 16384  # with fewer elements one thread is faster
_ROWS = 4  # rows per item
_ZERO = np.float32(0)


def layer_norm(
    inputs: tuple[torch.Tensor, torch.Tensor | None],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layer norm of x, or of x + residual, [N, H] contiguous; see kernels.ops.layer_norm. inputs: x
    and the residual; weight, bias: [H] float32; total: where to write x + residual, which is then
    rounded before it is normalised."""
    x, residual = inputs
    num, width = x.shape
    y = torch.empty_like(x)
    NORM[x.element_size()].run(
        num_threads() if num * width >= _ENOUGH else 1,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        0 if total is None else total.data_ptr(),
        num,
        width,
        bits(eps),
    )
    return y


@njit(**INLINE)
def _normalise(line, eps):
    """Shift and scale the row `line` to mean 0 and variance 1, in place."""
    mean, squares = _ZERO, _ZERO
    for i in range(line.shape[0]):
        mean += line[i]
    mean /= np.float32(line.shape[0])
    for i in range(line.shape[0]):
        line[i] -= mean
        squares += line[i] * line[i]
    scale = np.float32(1 / np.sqrt(squares / line.shape[0] + eps))
    for i in range(line.shape[0]):
        line[i] *= scale


@njit(**INLINE)
def _stretch(line, weight, bias):
    """Multiply a row by the weights at an address, and add the biases at another (0: none)."""
    factors = f32(weight, line.shape)
    if bias:
        shifts = f32(bias, line.shape)
        for i in range(line.shape[0]):
            line[i] = line[i] * factors[i] + shifts[i]
    else:
        for i in range(line.shape[0]):
            line[i] *= factors[i]


def _body(cell: int):
    def body(row):
        p, eps = i64(row, (10,)), f64(row, (10,))[9]
        num, width = p[7], p[8]
        size, line = width * cell, np.empty(width, np.float32)
        while True:
            first = next_item(row) * _ROWS
            if first >= num:
                break
            for n in range(first, min(first + _ROWS, num)):
                read_cells(p[1] + n * size, line, cell)
                if p[2]:
                    residual = elements(p[2] + n * size, (width,), cell)
                    for i in range(width):
                        line[i] += get(residual, i)
                if p[6]:
                    write_cells(p[6] + n * size, line, cell)
                    read_cells(p[6] + n * size, line, cell)
                _normalise(line, eps)
                _stretch(line, p[3], p[4])
                write_cells(p[5] + n * size, line, cell)

    return body


NORM = {cell: Kernel(_body(cell)) for cell in (4, 2)}  # by bytes of an element
