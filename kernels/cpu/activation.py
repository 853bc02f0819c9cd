"""Activations without a gate, of float32 or bfloat16 elements."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.cells import read_cells, write_cells
from kernels.cpu.mathlib import gelu, gelu_tanh, silu
from kernels.cpu.native import INLINE, Kernel, i64, next_item
from kernels.cpu.threads import num_threads

_ENOUGH = 16384  # with fewer elements one thread is faster
_CHUNK = 1024  # elements per item
_ZERO = np.float32(0)
CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """act(x) of a contiguous tensor, a new tensor. act: a key of CODES."""
    out, num = torch.empty_like(x), x.numel()
    threads = num_threads() if num >= _ENOUGH else 1
    ACTIVATE[x.element_size()].run(threads, x.data_ptr(), out.data_ptr(), num, CODES[act])
    return out


@njit(**INLINE)
def activate_row(values, act):
    """Apply the activation with this number in ``CODES`` to float32 values in place."""
    if act == 0:
        for i in range(values.shape[0]):
            values[i] = silu(values[i])
    elif act == 1:
        for i in range(values.shape[0]):
            values[i] = gelu_tanh(values[i])
    elif act == 2:
        for i in range(values.shape[0]):
            values[i] = gelu(values[i])
    else:
        for i in range(values.shape[0]):
            values[i] = _ZERO if values[i] < _ZERO else values[i]


def _body(cell: int):
    def body(row):
        p, values = i64(row, (5,)), np.empty(_CHUNK, np.float32)
        while True:
            first = next_item(row) * _CHUNK
            if first >= p[3]:
                break
            part = values[: min(_CHUNK, p[3] - first)]
            read_cells(p[1] + first * cell, part, cell)
            activate_row(part, p[4])
            write_cells(p[2] + first * cell, part, cell)

    return body


ACTIVATE = {cell: Kernel(_body(cell)) for cell in (4, 2)}  # by bytes of an element
