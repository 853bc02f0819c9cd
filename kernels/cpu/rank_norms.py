"""RMS norms over columns of which each rank has some: sums of squares, which the ranks add up, and
the scaling by them."""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.cells import elements, get, put
from kernels.cpu.native import Kernel, bits, f32, f64, i64, next_item
from kernels.cpu.threads import num_threads
from kernels.meta import ColumnGroups

_ENOUGH = 16384  # with fewer elements one thread is faster
_ZERO = np.float32(0)


def sums_of_squares(x: torch.Tensor, groups: ColumnGroups) -> torch.Tensor:
    """See `kernels.ops.sums_of_squares`. x: contiguous."""
    num, width = x.shape
    sums = x.new_empty((num, len(groups.counts)), dtype=torch.float32)
    SQUARES[x.element_size()].run(
        num_threads() if num * width >= _ENOUGH else 1,
        x.data_ptr(),
        sums.data_ptr(),
        groups.runs.data_ptr(),
        num,
        width,
        len(groups.counts),
        len(groups.runs),
    )
    return sums


def scale_groups(
    x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, groups: ColumnGroups, eps: float
) -> torch.Tensor:
    """See `kernels.ops.scale_groups`. x, sums: contiguous; weight: float32."""
    num, width = x.shape
    SCALE[x.element_size()].run(
        num_threads() if num * width >= _ENOUGH else 1,
        x.data_ptr(),
        sums.data_ptr(),
        groups.runs.data_ptr(),
        groups.counts.data_ptr(),
        weight.data_ptr(),
        num,
        width,
        len(groups.counts),
        len(groups.runs),
        bits(eps),
    )
    return x


def _squares_body(cell: int):
    def body(row):
        p = i64(row, (8,))
        num, width, num_groups, num_runs = p[4], p[5], p[6], p[7]
        runs = i64(p[3], (num_runs, 3))
        while True:
            n = next_item(row)
            if n >= num:
                break
            x = elements(p[1] + n * width * cell, (width,), cell)
            sums = f32(p[2] + n * num_groups * 4, (num_groups,))
            for group in range(num_groups):
                sums[group] = _ZERO
            for run in range(num_runs):
                total = _ZERO
                for i in range(runs[run, 0], runs[run, 1]):
                    total += get(x, i) * get(x, i)
                sums[runs[run, 2]] += total

    return body


def _scale_body(cell: int):
    def body(row):
        p = i64(row, (11,))
        num, width, num_groups, num_runs = p[6], p[7], p[8], p[9]
        runs, eps = i64(p[3], (num_runs, 3)), f64(row, (11,))[10]
        counts, weight = f32(p[4], (num_groups,)), f32(p[5], (width,))
        while True:
            n = next_item(row)
            if n >= num:
                break
            x = elements(p[1] + n * width * cell, (width,), cell)
            sums = f32(p[2] + n * num_groups * 4, (num_groups,))
            for run in range(num_runs):
                group = runs[run, 2]
                scale = np.float32(1 / np.sqrt(sums[group] / counts[group] + eps))
                for i in range(runs[run, 0], runs[run, 1]):
                    put(x, i, get(x, i) * scale * weight[i])

    return body


SQUARES = {cell: Kernel(_squares_body(cell)) for cell in (2, 4)}
SCALE = {cell: Kernel(_scale_body(cell)) for cell in (2, 4)}
