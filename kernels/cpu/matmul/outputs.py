"""Writes the sums of one panel of a matrix product: all outputs, or each row's largest one.

`p` holds the parameters of the product's kernel (indices: 3 bias, 4 outputs, 5 rows, 8 outputs per
row, 10 panels per item, 11 bytes of an output, 12 indices of the largest outputs, 13 gate panels,
14 activation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from kernels.cpu import sweeps
from kernels.cpu.activation import activate_row
from kernels.cpu.atomics import call_body, lay_out
from kernels.cpu.cells import write_cells
from kernels.cpu.mathlib import gelu, gelu_tanh, silu
from kernels.cpu.native import INLINE, Kernel, f32, f64, i32, i64

_LOWEST, _INFINITY = np.float32(-np.inf), np.float32(np.inf)


class Change(NamedTuple):
    """What is done to the sums of gates and ups before the activation: a function, which `change`
    calls, and two addresses for it. 0: nothing."""

    function: int = 0
    table: int = 0
    rows: int = 0


NO_CHANGE = Change()


class Target(NamedTuple):
    """The addresses to which a product writes: all outputs, of `size` bytes each; or, if `ids` is
    not 0, only the largest output and its index, by group of panels and row [groups, N]."""

    out: int
    size: int
    bias: int = 0
    ids: int = 0
    gates: int = 0  # number of gate panels; as many up panels follow them
    act: int = 0  # without gates 0 for none, else a number of kernels.cpu.activation.CODES plus 1
    change: Change = NO_CHANGE


class Scores(NamedTuple):
    """Where to write the largest output of each row, and its index plus `first`, as `sample_part`
    of `kernels.slots` does."""

    found: torch.Tensor  # [N, 3] float64
    first: int


def largest_ids(
    num: int, groups: int, run: Callable[[Target], None], scores: Scores | None = None
) -> torch.Tensor:
    """Index of the largest output of each of `num` rows, [num] int32; -1 for rows with NaN, +inf or
    only -inf. run: computes the product; groups: number of groups of panels of its items."""
    values = torch.empty((groups, num), dtype=torch.float32)
    ids = torch.empty((groups, num), dtype=torch.int32)
    found = torch.empty(num, dtype=torch.int32)
    if groups:
        run(Target(values.data_ptr(), 0, ids=ids.data_ptr()))
    place, first = (0, 0) if scores is None else (scores.found.data_ptr(), scores.first)
    LARGEST.run(1, values.data_ptr(), ids.data_ptr(), found.data_ptr(), groups, num, place, first)
    return found


def _largest_body(row):
    """The kernel that finds the largest of the outputs of all groups. Parameters: 1 largest outputs
    [groups, rows], 2 their indices, 3 where to write the index for each row, 4 groups, 5 rows; 6, 7
    a ``Scores`` or 0."""
    p = i64(row, (8,))
    groups, num = p[4], p[5]
    values, ids, found = f32(p[1], (groups, num)), i32(p[2], (groups, num)), i32(p[3], (num,))
    for n in range(num):
        best, index, is_sound = _LOWEST, -1, True
        for group in range(groups):
            value = values[group, n]
            is_sound = is_sound and value < _INFINITY  # False for NaN, too
            if value > best:
                best, index = value, ids[group, n]
        found[n] = index if is_sound else -1
        if p[6]:
            score = f64(p[6] + n * 24, (3,))
            score[0] = best if is_sound else np.nan
            score[1] = -1 if found[n] < 0 else index + p[7]
            score[2] = 0  # there is no noise


LARGEST = Kernel(_largest_body, exact=True)


@njit(**INLINE)
def finish(p, sums, first, count, panel):
    """Write one panel's sums to the output; if only each row's largest output is wanted, update
    that instead. p: the product's parameters."""
    if p[12]:
        _compare(p, sums, first, count, panel)
    else:
        _write(p, sums, first, count, panel)


@njit(**INLINE)
def change(given, sums, rows, start):
    """Let a function change float32 sums of the outputs from ``start`` on. given: a ``Change``
    with a function; sums: (address, outputs of a row); rows: (first, number)."""
    (function, table, places), (address, width), (first, count) = given, sums, rows
    call_body(function, lay_out((table, places, address, width, first, count, start)))


@njit(**INLINE)
def gate(p, sides, rows, panel, at):
    """Compute gates = activation(gates) * ups, in place, for the rows (first, number). p: the
    product's parameters, with those of a ``Change`` from index ``at`` on; sides: sums of a panel of
    gates and of one of ups."""
    (gates, ups), (_, count) = sides, rows
    if p[at]:
        given, width = (p[at], p[at + 1], p[at + 2]), gates.shape[1]
        change(given, (gates.ctypes.data, width), rows, panel * width)
        change(given, (ups.ctypes.data, width), rows, (panel + p[13]) * width)
    for i in range(count):
        gate, up = gates[i], ups[i]
        if p[14] == 0:
            for j in range(gate.shape[0]):
                gate[j] = silu(gate[j]) * up[j]
        elif p[14] == 1:
            for j in range(gate.shape[0]):
                gate[j] = gelu_tanh(gate[j]) * up[j]
        else:
            for j in range(gate.shape[0]):
                gate[j] = gelu(gate[j]) * up[j]


@njit(**INLINE)
def keep_largest(outputs, start, values, ids, i):
    """Update the largest value of row i, values[i], and its index, ids[i], with the outputs from
    index `start` on. NaN marks a row with an invalid output."""
    where = sweeps.argmax(outputs)
    if where >= 0:
        if outputs[where] > values[i]:
            values[i], ids[i] = outputs[where], start + where
    elif not sweeps.is_lowest(outputs):
        values[i] = np.nan


@njit(**INLINE)
def _compare(p, sums, first, count, panel):
    """Update the largest output of each row with the sums of one panel. Each work item has its own
    largest outputs; NaN marks a row with an invalid output."""
    num, num_out, start = p[5], p[8], panel * sums.shape[1]
    place = (panel // p[10]) * num + first
    values, ids = f32(p[4] + place * 4, (count,)), i32(p[12] + place * 4, (count,))
    is_first = panel % p[10] == 0
    for i in range(count):
        if is_first:
            values[i], ids[i] = -np.inf, 0
        keep_largest(sums[i, : min(sums.shape[1], num_out - start)], start, values, ids, i)


@njit(**INLINE)
def _write(p, sums, first, count, panel):
    """Write a panel's sums, plus the bias and then activated, for `count` rows from row `first`
    on."""
    num_out, size, start = p[8], p[11], panel * sums.shape[1]
    width = min(sums.shape[1], num_out - start)
    if p[3]:
        bias = f32(p[3] + start * 4, (width,))
        for i in range(count):
            for j in range(width):
                sums[i, j] += bias[j]
    if p[14] and not p[13]:
        for i in range(count):
            activate_row(sums[i, :width], p[14] - 1)
    for i in range(count):
        out = p[4] + ((first + i) * num_out + start) * size
        if size == 4:
            write_cells(out, sums[i, :width], 4)
        else:
            write_cells(out, sums[i, :width], 2)
