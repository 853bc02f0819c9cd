"""Vectors of tokens in a table of which each rank has some rows."""

from __future__ import annotations

import torch

from kernels.cpu.matmul.rows import id_at
from kernels.cpu.native import Kernel, i32, i64, next_item, u8
from kernels.cpu.threads import num_threads

_ENOUGH = 64  # with fewer rows, one thread is faster


def own_rows(ids: torch.Tensor, mine: range) -> torch.Tensor:
    """See `kernels.ops.own_rows`. ids: contiguous, int32 or int64."""
    rows = torch.empty_like(ids)
    OWN_ROWS.run(
        1,
        ids.data_ptr(),
        rows.data_ptr(),
        len(ids),
        ids.element_size(),
        mine.start,
        len(mine),
    )
    return rows


def clear_others(x: torch.Tensor, ids: torch.Tensor, mine: range) -> torch.Tensor:
    """See `kernels.ops.clear_others`. x, ids: contiguous."""
    CLEAR_OTHERS.run(
        num_threads() if len(ids) >= _ENOUGH else 1,
        x.data_ptr(),
        ids.data_ptr(),
        len(ids),
        ids.element_size(),
        mine.start,
        len(mine),
        x.shape[1] * x.element_size(),
    )
    return x


def _own_rows_body(row):
    # Parameters: 1 tokens, 2 rows, 3 their number, 4 bytes of each, 5 first token, 6 number of
    # tokens of this rank.
    p = i64(row, (7,))
    while True:
        if next_item(row):
            break
        for n in range(p[3]):
            place = id_at(p[1], n, p[4]) - p[5]
            place = place if 0 <= place < p[6] else 0
            if p[4] == 4:
                i32(p[2], (p[3],))[n] = place
            else:
                i64(p[2], (p[3],))[n] = place


def _clear_others_body(row):
    # Parameters: 1 vectors, 2 tokens, 3 their number, 4 bytes of a token, 5 first token, 6 number
    # of tokens of this rank, 7 bytes of a vector.
    p = i64(row, (8,))
    size = p[7]
    while True:
        n = next_item(row)
        if n >= p[3]:
            break
        if not 0 <= id_at(p[2], n, p[4]) - p[5] < p[6]:
            line = u8(p[1] + n * size, (size,))
            for i in range(size):
                line[i] = 0


OWN_ROWS = Kernel(_own_rows_body)
CLEAR_OTHERS = Kernel(_clear_others_body)
