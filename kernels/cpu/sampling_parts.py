"""Sampling where each rank of a group has the logits of a part of the vocabulary. Results and noise
equal those of `kernels.cpu.sampling` over the whole vocabulary."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import njit

from kernels.cpu import sweeps
from kernels.cpu.native import INNER, Kernel, f32, f64, i32, i64, next_item, u64
from kernels.cpu.sampling import SERIAL_SIZE, allowed, race, row_key
from kernels.cpu.threads import num_threads
from kernels.reference.sampling import Rows, SamplingColumns


def sample_part(
    rows: Rows,
    columns: SamplingColumns,
    first: int,
    masks: torch.Tensor | None = None,
    mask_of_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best of a part's tokens for each row; see `kernels.reference.sampling`. Scores are
    logit + temperature * noise."""
    logits, slots, positions = rows
    num, width = logits.shape
    if positions.dtype is not torch.int32:
        positions = positions.int()
    found = torch.empty((num, 3), dtype=torch.float64)
    masked = (0, 0, 0)
    if masks is not None and mask_of_row is not None:
        masked = masks.data_ptr(), mask_of_row.data_ptr(), masks.shape[1]
    DRAW.run(
        num_threads() if num * width > SERIAL_SIZE else 1,
        logits.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        columns.temperature.data_ptr(),
        columns.seeds.data_ptr(),
        _ids(first, width).data_ptr(),
        found.data_ptr(),
        num,
        width,
        *masked,
    )
    return found


def best_of_parts(found: torch.Tensor, differs: torch.Tensor) -> torch.Tensor:
    """The best of all parts; see `kernels.reference.sampling`."""
    num_parts, num, _ = found.shape
    chosen = torch.empty(num, dtype=torch.int32)
    addresses = found.data_ptr(), chosen.data_ptr(), differs.data_ptr()
    MERGE.run(1, *addresses, num_parts, num)
    return chosen


_BYTES = 24  # of a row's score, token and key


@cache
def _ids(first: int, num: int) -> torch.Tensor:
    return torch.arange(first, first + num, dtype=torch.int32)


def _draw_body(row):
    p = i64(row, (13,))
    num, width, num_words = p[8], p[9], p[12]
    slots, positions, every_id = i32(p[2], (num,)), i32(p[3], (num,)), i32(p[6], (width,))
    while True:
        n = next_item(row)
        if n >= num:
            break
        pair, slot = f64(p[7] + n * _BYTES, (2,)), slots[n]
        pair[0], pair[1] = -np.inf, -1
        bits = u64(p[7] + n * _BYTES + 16, (1,))
        if slot < 0:
            bits[0] = 0
            continue
        key = row_key(u64(p[5] + 8 * slot, (1,))[0], np.uint64(positions[n]))
        bits[0] = key
        x, ids = f32(p[1] + n * width * 4, (width,)), every_id
        if num_words > 0 and i32(p[11], (num,))[n] >= 0:
            words = i32(p[10] + np.int64(i32(p[11], (num,))[n]) * num_words * 4, (num_words,))
            x, ids = allowed(x, words, every_id)
        if len(x) == 0:
            continue
        temperature = f64(p[4] + 8 * slot, (1,))[0]
        if temperature == 0:
            _take_largest(pair, x, ids)
        else:
            _take_drawn(pair, x, ids, temperature, key)


@njit(**INNER)
def _take_largest(pair, x, ids):
    """Write the largest of the logits x and its id to the pair (score, id)."""
    place = sweeps.argmax(x)
    if place >= 0:
        pair[0], pair[1] = x[place], ids[place]
    elif not sweeps.is_lowest(x):
        pair[0] = np.nan


@njit(**INNER)
def _take_drawn(pair, x, ids, temperature, key):
    """Write the largest score and its id to the pair (score, id)."""
    block_max = sweeps.block_maxima(x)
    peak = sweeps.largest(block_max)
    if sweeps.has_nan(x) or peak >= sweeps.INFINITY:
        pair[0] = np.nan
    elif peak >= sweeps.LOWEST_FINITE:
        pair[1], pair[0] = race(x, ids, block_max, temperature, key)


DRAW = Kernel(_draw_body, heavy=True)


def _merge_body(row):
    p = i64(row, (6,))  # counter, found, chosen, differs, parts, rows
    found, chosen = f64(p[1], (p[4], p[5], 3)), i32(p[2], (p[5],))
    keys, differs = i64(p[1], (p[4], p[5], 3)), i64(p[3], (1,))
    for n in range(p[5]):
        best, token = -np.inf, -1.0
        for part in range(p[4]):
            if keys[part, n, 2] != keys[0, n, 2]:
                differs[0] = 1
            score = found[part, n, 0]
            if np.isnan(score):
                best, token = np.inf, -1.0
            elif score > best:
                best, token = score, found[part, n, 1]
        chosen[n] = np.int32(token)


MERGE = Kernel(_merge_body, exact=True)
