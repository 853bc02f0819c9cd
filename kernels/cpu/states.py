"""Recurrent states: what compiled loops read of the sequences of a step."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.cells import elements, put
from kernels.cpu.native import EXACT, i32
from kernels.meta import StateMeta

_ZERO = np.float32(0)


def step_parameters(meta: StateMeta) -> tuple[int, ...]:
    """Returns five parameters of a body that `sequences_of` reads. The number of sequences is read
    from memory, since recordings of a launch serve any number."""
    return (
        meta.query_start.data_ptr(),
        meta.state_reads.data_ptr(),
        meta.state_writes.data_ptr(),
        meta.state_writes.shape[1],
        meta.num_seqs.data_ptr(),
    )


@njit(**EXACT)
def sequences_of(p, first):
    """Returns query_start, state_reads and state_writes of a step, see `StateMeta`, from the
    parameters of a body. first: index of the first of `step_parameters`."""
    num = i32(p[first + 4], (1,))[0]
    starts, reads = i32(p[first], (num + 1,)), i32(p[first + 1], (num,))
    return starts, reads, i32(p[first + 2], (num, p[first + 3]))


@njit(**EXACT)
def count_written(rows):
    """Returns the number of states that a sequence writes: the rows before the first -1."""
    num = 0
    while num < rows.shape[0] and rows[num] >= 0:
        num += 1
    return num


@njit(**EXACT)
def clear_rows(target, stride, first, end, count, cell):
    """Fill elements 0 to `count` of the rows from `first` to `end` at an address with zeros."""
    for n in range(first, end):
        row = elements(target + n * stride, (count,), cell)
        for i in range(count):
            put(row, i, _ZERO)
