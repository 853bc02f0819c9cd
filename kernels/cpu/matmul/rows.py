"""Reads rows of weights by their numbers: the embeddings of tokens."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.native import EXACT, Kernel, i32, i64, next_item, u16, u32
from kernels.cpu.threads import num_threads

_ENOUGH = 64  # with fewer rows, one thread is faster
_WORD = 4  # bytes that are copied together: a float32, or a pair of 16-bit numbers


@njit(**EXACT)
def id_at(ids, n, size):
    """Returns element n of the row numbers at the address `ids`, of `size` bytes each (4 or 8)."""
    if size == 4:
        return np.int64(i32(ids, (n + 1,))[n])
    return i64(ids, (n + 1,))[n]


def gathered_rows(table: torch.Tensor, ids: torch.Tensor, num_in: int) -> torch.Tensor:
    """Rows ``ids`` [I] int32 or int64 of a weight, [I, num_in] of the table's dtype. table: of
    float32 [panels, inputs, rows of a panel], or of 16 bits with pairs of inputs as a last axis:
    [panels, inputs / 2, rows of a panel, 2]."""
    ids = ids.contiguous()
    out = table.new_empty((len(ids), num_in))
    GATHER.run(
        num_threads() if len(ids) >= _ENOUGH else 1,
        table.data_ptr(),
        ids.data_ptr(),
        out.data_ptr(),
        len(ids),
        ids.element_size(),
        table.shape[1],
        table.shape[2],
        num_in * out.element_size(),
    )
    return out


def as_table(weight: torch.Tensor) -> torch.Tensor | None:
    """View a plain weight [N, K] as a table for `gathered_rows`; ``None`` if that is impossible."""
    size = weight.element_size()
    if not weight.is_contiguous() or size not in (2, 4) or weight.shape[1] * size % _WORD:
        return None
    pairs = (2,) if size == 2 else ()
    return weight.view(len(weight), -1, 1, *pairs)


def _gather_body(row):
    # Parameters: 1 table, 2 row numbers, 3 target, 4 number of rows, 5 bytes of a row number,
    # 6 words of a row in a panel, 7 rows of a panel, 8 bytes of a row of the target.
    p = i64(row, (9,))
    depth, width, size = p[6], p[7], p[8]
    words = size // _WORD
    while True:
        n = next_item(row)
        if n >= p[4]:
            break
        index = id_at(p[2], n, p[5])
        source = p[1] + (index // width * depth * width + index % width) * _WORD
        if width == 1:
            line, target = u32(source, (words,)), u32(p[3] + n * size, (words,))
            for i in range(words):
                target[i] = line[i]
            continue
        for i in range(words):
            word = u16(source + i * width * _WORD, (2,))
            halves = u16(p[3] + n * size + i * _WORD, (2,))
            halves[0], halves[1] = word[0], word[1]
        if size % _WORD:
            last = u16(p[3] + n * size + words * _WORD, (1,))
            last[0] = u16(source + words * width * _WORD, (1,))[0]


GATHER = Kernel(_gather_body)
