"""Low-rank products of rows with the adapters that they use; see `kernels.low_rank`.

A work item is a block of rows with one adapter, or a part of its outputs if there are fewer blocks
than threads. Each product is computed in two halves:

    sums [rows, rank] = x @ a.T          inputs along the vectors
    y [rows, outputs] += sums @ b.T      outputs along the vectors, rounded once

Products with gates add the second halves themselves, to their sums in float32, before they apply
activations.

The bits of a row depend neither on other rows nor on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu import isa
from kernels.cpu.atomics import lay_out
from kernels.cpu.cells import DTYPES, elements, get, put
from kernels.cpu.low_rank_vectors import (
    BYTES,
    DOTS,
    FLOATS,
    SOFT_DOTS,
    STEPS,
    WIDENED,
    dot_tile,
    spread_tile,
)
from kernels.cpu.matmul.outputs import Change
from kernels.cpu.native import EXACT, Kernel, f32, f64, i64, next_item
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import fused
from kernels.low_rank import (
    BLOCK_WORDS,
    ENTRY_WORDS,
    MOST_ROWS,
    PANEL,
    RECORD_WORDS,
    AdaptedRows,
    ProductTable,
)

NUM_PARAMETERS = 7
_RANK = 8  # a usual one, to estimate the work of a launch that is recorded for any adapter
_ENOUGH = 65536  # with fewer multiplications, one thread is faster
_AHEAD = 4  # panels between the one that is multiplied and the one that is prefetched
_CACHED = 1 << 16  # bytes of panels that are kept in the L2 cache
_PART = 512  # outputs of a part, at least
HALF = PANEL // 2  # outputs of a panel of other products


def add_low_rank(
    y: torch.Tensor,
    x: torch.Tensor,
    table: ProductTable,
    rows: AdaptedRows,
    *,
    body: str | None = None,
) -> torch.Tensor:
    """Add products to y in place; see `kernels.ops.add_low_rank`. body (for tests): a key of
    BODIES."""
    num, num_in = x.shape
    num_out, size = y.shape[1], x.element_size()
    work = num * (num_in + num_out) * _RANK
    BODIES[body or body_of(size), y.element_size()].run(
        threads := num_threads() if work >= _ENOUGH else 1,
        x.data_ptr(),
        y.data_ptr(),
        table.entries.ctypes.data,
        rows.words.ctypes.data,
        num_in,
        num_out,
        threads,
    )
    return y


def change_of(
    x: torch.Tensor, table: ProductTable, rows: AdaptedRows, *, body: str | None = None
) -> Change:
    """Compute the first halves of products, and return what a product with gates does to its sums
    before the activation. x [N, in]: contiguous bfloat16, the product's inputs; body (for tests): a
    key of FIRST_HALVES."""
    num, num_in = x.shape
    FIRST_HALVES[body or BODY].run(
        num_threads() if num * num_in * _RANK >= _ENOUGH else 1,
        x.data_ptr(),
        table.entries.ctypes.data,
        rows.head.ctypes.data,
        num_in,
    )
    return Change(SECOND_HALVES.address, table.entries.ctypes.data, rows.head.ctypes.data)


def prepare(dtype: torch.dtype) -> None:
    """Load or compile the kernels for inputs of a dtype that this processor uses."""
    if dtype in DTYPES:
        for cell in {4, dtype.itemsize}:
            BODIES[body_of(dtype.itemsize), cell].prepare()
    if dtype is torch.bfloat16:
        FIRST_HALVES[BODY].prepare()
        SECOND_HALVES.prepare()


def body_of(size: int) -> str:
    """The body for this processor and inputs of ``size`` bytes."""
    return "floats" if size == 4 else BODY


@njit(**EXACT)
def _most_ranks(p):
    """The largest rank of the products that the rows use."""
    most, held = 0, i64(p[4], (2,))
    for n in range(held[0]):
        slot = i64(p[4] + (2 + n * BLOCK_WORDS) * 8, (1,))[0]
        entry = i64(p[3] + slot * ENTRY_WORDS * 8, (ENTRY_WORDS,))
        for k in range(entry[0]):
            most = max(most, i64(entry[1] + k * RECORD_WORDS * 8, (RECORD_WORDS,))[2])
    return most


@njit(**EXACT)
def _scale_outputs(places, count, span, cell, changes):
    """Multiply outputs by factors, if there are any, and add what is to be added. span: (offset of
    the outputs in a row in bytes, their number); changes: addresses of factors and addends; 0 for
    none."""
    shift, width = span
    for i in range(count):
        y = elements(places[i] + shift, (width,), cell)
        if changes[0]:
            factors = f32(changes[0], (width,))
            for j in range(width):
                put(y, j, get(y, j) * factors[j])
        if changes[1]:
            added = f32(changes[1], (width,))
            for j in range(width):
                put(y, j, get(y, j) + added[j])


@njit(inline="always")
def _ranks_of(places, a, sums, count, sizes, ahead, how):  # noqa: C901
    """Compute sums[:count] = rows @ a.T. places: addresses of the rows; a: address; sizes: (rank,
    inputs); ahead: address of what is read next; how: a literal."""
    rank, num_in = sizes
    size = BYTES[how]
    lda, lds = num_in * size, sums.shape[1] * 4
    steps = num_in // STEPS[how]
    # Four rows of `a` stay in the L1 cache for all rows of x.
    for r in range(0, rank, 4):
        few = min(4, rank - r)
        theirs = a + r * lda
        following = theirs + 4 * lda if r + 4 < rank else ahead
        i = 0
        while i < count:
            mine, target = places.ctypes.data + i * 8, sums.ctypes.data + i * lds + r * 4
            if few == 4 and i + 4 <= count:
                dot_tile(mine, theirs, lda, target, lds, steps, following, 4, 4, how)
                i += 4
            elif few == 4 and i + 2 <= count:
                dot_tile(mine, theirs, lda, target, lds, steps, following, 2, 4, how)
                i += 2
            elif few == 4:
                dot_tile(mine, theirs, lda, target, lds, steps, following, 1, 4, how)
                i += 1
            else:
                for k in range(few):
                    own, there = theirs + k * lda, target + k * 4
                    dot_tile(mine, own, lda, there, lds, steps, following, 1, 1, how)
                i += 1
    done = steps * STEPS[how]
    if done < num_in:
        for i in range(count):
            x = elements(places[i], (num_in,), size)
            for r in range(rank):
                other = elements(a + r * lda, (num_in,), size)
                total = sums[i, r]
                for k in range(done, num_in):
                    total = fused(get(x, k), get(other, k), total)
                sums[i, r] = total


@njit(inline="always")
def _spread(places, sums, panels, counts, span, size, cell):
    """Add sums @ b.T to outputs. panels: address of b; counts: (rows, rank); span: first output, a
    multiple of PANEL, and end of the outputs, and the offset of output 0 in a row in bytes; size,
    cell: literals."""
    (count, rank), (begin, end, shift) = counts, span
    lds, data, each = sums.shape[1] * 4, sums.ctypes.data, rank * PANEL * size
    whole = begin + (end - begin) // PANEL * PANEL
    # Some panels stay in the cache for all rows. Each group of rows goes through them in order, so
    # that the processor reads outputs ahead.
    few = max(1, _CACHED // each) * PANEL
    for first in range(begin, whole, few):
        last, i, ahead = min(whole, first + few), 0, _AHEAD * each
        while i < count:
            mine, given = places.ctypes.data + i * 8, data + i * lds
            height = 4 if i + 4 <= count else 2 if i + 2 <= count else 1
            for j in range(first, last, PANEL):
                at, own = shift + j * cell, panels + j * rank * size
                if height == 4:
                    spread_tile(mine, at, given, lds, own, own + ahead, rank, 4, 4, size, cell)
                elif height == 2:
                    spread_tile(mine, at, given, lds, own, own + ahead, rank, 2, 4, size, cell)
                else:
                    spread_tile(mine, at, given, lds, own, own + ahead, rank, 1, 4, size, cell)
            i, ahead = i + height, 0
    if whole < end:
        at, own = shift + whole * cell, panels + whole * rank * size
        _spread_rest(places, sums, own, counts, (at, end - whole), size, cell)


@njit(**EXACT)
def _spread_rest(places, sums, panel, counts, span, size, cell):
    """The last outputs, fewer than a panel, as `_spread` computes whole panels. span: (offset of
    the outputs in a row in bytes, their number)."""
    (count, rank), (at, num) = counts, span
    b, totals = elements(panel, (rank, PANEL), size), np.empty(num, np.float32)
    for i in range(count):
        y = elements(places[i] + at, (num,), cell)
        for j in range(num):
            totals[j] = get(y, j)
        for r in range(rank):
            own = b[r]
            for j in range(num):
                totals[j] = fused(sums[i, r], get(own, j), totals[j])
        for j in range(num):
            put(y, j, totals[j])


@njit(**EXACT)
def _outputs_of(first, width, low, high):
    """The outputs [begin, end) of a product whose panels begin in the range [low, high) of the
    layer's outputs."""
    begin = max(0, (low - first + PANEL - 1) // PANEL * PANEL)
    end = max(0, (high - first + PANEL - 1) // PANEL * PANEL)
    return begin, min(end, width)


def _body(how: int, cell: int):
    """Make the kernel body (see kernels.cpu.native). how: FLOATS, WIDENED, DOTS or SOFT_DOTS; cell:
    bytes of an output.

    Parameters: 1 x, 2 y, 3 entries of the table, 4 words of the rows, 5 inputs, 6 outputs,
    7 threads."""
    size = BYTES[how]

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        num_blocks, num_in, num_out = i64(p[4], (2,))[0], p[5], p[6]
        order = i64(p[4], (2,))[1]
        parts = max(1, min(p[7] // max(1, num_blocks), num_out // _PART))
        wide = ((num_out + parts - 1) // parts + PANEL - 1) // PANEL * PANEL
        sums = np.empty((MOST_ROWS, _most_ranks(p)), np.float32)
        rows, places = np.empty(MOST_ROWS, np.int64), np.empty(MOST_ROWS, np.int64)
        while True:
            item = next_item(row)
            if item >= num_blocks * parts:
                break
            block = i64(p[4] + (2 + item // parts * BLOCK_WORDS) * 8, (BLOCK_WORDS,))
            count, low = block[2], item % parts * wide
            high = min(num_out, low + wide)
            entry = i64(p[3] + block[0] * ENTRY_WORDS * 8, (ENTRY_WORDS,))
            indices = i64(order + block[1] * 8, (count,))
            for i in range(count):
                rows[i] = p[1] + indices[i] * num_in * size
                places[i] = p[2] + indices[i] * num_out * cell
            for k in range(entry[0]):
                at = entry[1] + k * RECORD_WORDS * 8
                record, scale = i64(at, (RECORD_WORDS,)), np.float32(f64(at, (RECORD_WORDS,))[5])
                first, width, rank, panels = record[0], record[1], record[2], record[4]
                begin, end = _outputs_of(first, width, low, high)
                if begin >= end:
                    continue
                ahead = panels + begin * rank * size
                _ranks_of(rows, record[3], sums, count, (rank, num_in), ahead, how)
                for i in range(count):
                    for r in range(rank):
                        sums[i, r] *= scale
                shift = first * cell
                if record[6] or record[7]:
                    changes = (
                        record[6] + begin * 4 if record[6] else 0,
                        record[7] + begin * 4 if record[7] else 0,
                    )
                    span = shift + begin * cell, end - begin
                    _scale_outputs(places, count, span, cell, changes)
                _spread(places, sums, panels, (count, rank), (begin, end, shift), size, cell)

    return body


def _first_halves(how: int):
    """Make the body that computes x @ a.T times the scale for the rows of `AdaptedRows.head`.

    Parameters: 1 x, 2 entries of the table, 3 head of the rows, 4 inputs."""
    size = BYTES[how]

    def body(row):
        p = i64(row, (5,))
        num_in, head = p[4], i64(p[3], (3,))
        num_blocks, order = i64(head[0], (2,))[0], i64(head[0], (2,))[1]
        most = _most_products(p[2], head[0])
        places = np.empty(MOST_ROWS, np.int64)
        while True:
            item = next_item(row)
            if item >= num_blocks * most:
                break
            place, k = 2 + item // most * BLOCK_WORDS, item % most
            block = i64(head[0] + place * 8, (BLOCK_WORDS,))
            count, entry = block[2], i64(p[2] + block[0] * ENTRY_WORDS * 8, (ENTRY_WORDS,))
            if k >= entry[0]:
                continue
            indices, before = i64(order + block[1] * 8, (count,)), 0
            for i in range(count):
                places[i] = p[1] + indices[i] * num_in * size
            for other in range(k):
                before += i64(entry[1] + other * RECORD_WORDS * 8, (RECORD_WORDS,))[2]
            at = entry[1] + k * RECORD_WORDS * 8
            record, scale = i64(at, (RECORD_WORDS,)), np.float32(f64(at, (RECORD_WORDS,))[5])
            sums = f32(head[1] + (block[1] * head[2] + before) * 4, (count, head[2]))
            sizes = record[2], num_in
            _ranks_of(places, record[3], sums, count, sizes, record[4], how)
            for i in range(count):
                for r in range(record[2]):
                    sums[i, r] *= scale

    return body


@njit(**EXACT)
def _most_products(entries, words):
    """The most products of an adapter that the rows use."""
    most = 0
    for n in range(i64(words, (2,))[0]):
        slot = i64(words + (2 + n * BLOCK_WORDS) * 8, (1,))[0]
        most = max(most, i64(entries + slot * ENTRY_WORDS * 8, (ENTRY_WORDS,))[0])
    return most


def _second_halves(row):
    """Change sums of some rows and adjacent outputs as adapters do. The first halves were computed
    before.

    Parameters: 1 entries of the table, 2 head of the rows, 3 sums, 4 outputs of a row of sums,
    5 first row, 6 rows, 7 first output."""
    p = i64(row, (8,))
    head, first, end = i64(p[2], (3,)), p[5], p[5] + p[6]
    num_blocks, order = i64(head[0], (2,))[0], i64(head[0], (2,))[1]
    for n in range(num_blocks):
        block = i64(head[0] + (2 + n * BLOCK_WORDS) * 8, (BLOCK_WORDS,))
        indices = i64(order + block[1] * 8, (block[2],))
        low, high = 0, block[2]  # of those in the block, which are in ascending order
        while low < high and indices[low] < first:
            low += 1
        while low < high and indices[high - 1] >= end:
            high -= 1
        entry = i64(p[1] + block[0] * ENTRY_WORDS * 8, (ENTRY_WORDS,))
        for i in range(low, high, 4):
            halves = head[1] + (block[1] + i) * head[2] * 4, head[2] * 4
            _change_rows(p, entry, indices[i : min(i + 4, high)], halves, i == low)


@njit(**EXACT)
def _change_rows(p, entry, indices, halves, is_first):
    """Change the sums of up to four rows. p: parameters of `_second_halves`; entry: of their
    adapter; halves: (address of the first row, bytes of a row); is_first: whether to prefetch."""
    (given, lds), count, last = halves, indices.shape[0], indices.shape[0] - 1
    base, stride, width, start = p[3] - p[5] * p[4] * 4, p[4] * 4, p[4], p[7]
    address = lay_out(
        (
            base + indices[0] * stride,
            base + indices[min(1, last)] * stride,
            base + indices[min(2, last)] * stride,
            base + indices[last] * stride,
        )
    )
    mine = address + 8
    places = i64(mine, (4,))
    for k in range(entry[0]):
        record = i64(entry[1] + k * RECORD_WORDS * 8, (RECORD_WORDS,))
        rank, panels = record[2], record[4]
        begin, end = max(start, record[0]), min(start + width, record[0] + record[1])
        if begin < end:
            where, shift = begin - record[0], (begin - start) * 4
            if record[6] or record[7]:
                changes = (
                    record[6] + where * 4 if record[6] else 0,
                    record[7] + where * 4 if record[7] else 0,
                )
                _scale_outputs(places, count, (shift, end - begin), 4, changes)
            own = panels + (where // PANEL * rank * PANEL + where % PANEL) * 2
            ahead = own + rank * PANEL * 2 if is_first else own
            if end - begin == PANEL and where % PANEL == 0:
                _add_panel(mine, shift, (given, lds), (own, ahead), (count, rank), 4)
            elif end - begin == HALF and where % HALF == 0:
                _add_panel(mine, shift, (given, lds), (own, ahead), (count, rank), 2)
            else:
                _add_some(places, (given, lds), panels, (count, rank), (shift, where, end - begin))
        given += rank * 4


@njit(inline="always")
def _add_panel(places, shift, halves, b, sizes, vectors):
    """Add halves @ b to whole vectors of sums of up to four rows. places: address of their
    addresses; shift: from there, in bytes; halves: (address, bytes of a row); b: (address, that of
    what is read next); sizes: (rows, rank); vectors: a literal."""
    (given, lds), (own, ahead), (count, rank) = halves, b, sizes
    if count == 4:
        spread_tile(places, shift, given, lds, own, ahead, rank, 4, vectors, 2, 4)
        return
    if count & 2:
        spread_tile(places, shift, given, lds, own, ahead, rank, 2, vectors, 2, 4)
    if count & 1:
        places, given = places + (count & 2) * 8, given + (count & 2) * lds
        spread_tile(places, shift, given, lds, own, ahead, rank, 1, vectors, 2, 4)


@njit(**EXACT)
def _add_some(places, halves, panels, sizes, span):
    """Add to any sums what `_add_panel` adds to whole vectors. span: (offset of the first in bytes,
    output of the product, number)."""
    (given, lds), (count, rank), (shift, where, num) = halves, sizes, span
    b = elements(panels, ((where + num + PANEL - 1) // PANEL * rank * PANEL,), 2)
    for i in range(count):
        y, factors = f32(places[i] + shift, (num,)), f32(given + i * lds, (rank,))
        for j in range(num):
            panel, lane, total = (where + j) // PANEL, (where + j) % PANEL, y[j]
            for r in range(rank):
                total = fused(factors[r], get(b, (panel * rank + r) * PANEL + lane), total)
            y[j] = total


_HOW = {"floats": FLOATS, "widened": WIDENED, "dots": DOTS, "soft dots": SOFT_DOTS}
BODIES = {
    (name, cell): Kernel(_body(how, cell), heavy=True, exact=True)
    for name, how in _HOW.items()
    for cell in ((4,) if how == FLOATS else (2, 4))
}
"""By way to multiply and bytes of an output."""
FIRST_HALVES = {
    name: Kernel(_first_halves(how), heavy=True, exact=True)
    for name, how in _HOW.items()
    if how != FLOATS
}
"""By way to multiply."""
SECOND_HALVES = Kernel(_second_halves, exact=True)

# The body for bfloat16 on this processor.
BODY = "dots" if isa.has("avx512bf16") else "widened"
