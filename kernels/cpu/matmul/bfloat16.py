"""Products of bfloat16 inputs with bfloat16 weights, summed in float32.

Weights are packed in panels ``[panels, depth, width, 2]``: a panel has 64 outputs (32 for tiles),
and inputs 2d and 2d + 1 of each output are adjacent, as bfloat16 instructions need them. The same
packed copy is used for any number of rows, in one of three ways:

    widened   AVX2, AVX-512: products of floats, widened from bfloat16 in registers
    dots      AVX-512 BF16: dot products of pairs of bfloat16
    tiles     AMX: products of 16 rows x 32 inputs with 32 inputs x 16 outputs

A row's results depend neither on the number of rows nor on threads. Inputs are padded with zeros to
a multiple of 32."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from kernels.cpu import amx, isa
from kernels.cpu.activation import CODES
from kernels.cpu.cells import read_cells
from kernels.cpu.matmul.blocks import PANEL as HALF
from kernels.cpu.matmul.dequantized import fill_pairs
from kernels.cpu.matmul.float32 import PANEL, panels_an_item
from kernels.cpu.matmul.outputs import NO_CHANGE, Change, Scores, Target, finish, gate, largest_ids
from kernels.cpu.native import INLINE, Kernel, f32, i64, next_item, u16
from kernels.cpu.pointwise import ACTS
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import (
    DOTS,
    LANES,
    LINE,
    SOFT_DOTS,
    WIDENED,
    pair_panel_product,
    prefetch,
)

STEP = 32  # inputs are padded to a multiple of this
NUM_PARAMETERS = 17
Weights = torch.Tensor | NDArray[np.int64]
"""A packed weight, or the table of a packed weight in blocks."""
_ROWS = 6  # rows per register tile; with four vectors of outputs they fill the registers
# Minimum and maximum rows per item, and bytes of their inputs, which stay in the L2 cache.
_LEAST, _MOST, _BYTES = 72, 288, 3 << 18
# Maximum rows for tiles, and their bytes; with two panels they fit into the L2 cache.
_TILE_ROWS, _TILE_BYTES = 256, 5 << 18
_PIECE = 32 * 64  # bytes of a panel per step of tiles: 32 inputs of 32 outputs
_PASS = 16  # steps per pass: so much of a panel stays in the L1 cache with rows and sums
_LEAD = 96  # up to this many rows, products are bound by memory
_AHEAD_OF_TWO, _AHEAD_OF_FOUR = 8, 4  # cache lines of the next panel prefetched per step
_DEPTH = 128  # pairs of inputs per pass: so much of a panel stays in the L1 cache
_ENOUGH = 65536  # with fewer multiplications, one thread is faster
_LINE = PANEL * 4  # bytes of a pair's row of a panel


def width_of(body: str) -> int:
    """Number of outputs per panel of weights for a body (a key of BODIES)."""
    return 2 * amx.ROWS if "tiles" in body else PANEL


def pack(weight: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Pack [out, in] bfloat16 to [panels, depth, width, 2], padded with zeros. width (for tests):
    outputs per panel; default: as this processor's body needs."""
    width = width or width_of(BODY)
    num_out, num_in = weight.shape
    panels, depth = -(-num_out // width), _depth(num_in)
    packed = weight.new_empty((panels, depth, width, 2))
    if num_in % STEP or num_out % width:
        packed.zero_()
    if num_in % 2:
        weight = torch.nn.functional.pad(weight, (0, 1))
    # A pair is copied as one int32, which torch transposes fast.
    if weight.storage_offset() % 2:
        weight = weight.clone()
    pairs, places = weight.contiguous().view(torch.int32), packed.view(torch.int32)[..., 0]
    whole, used = num_out // width, pairs.shape[1]
    blocks = pairs[: whole * width].view(whole, width, used)
    places[:whole, :used].copy_(blocks.transpose(1, 2))
    if whole < panels:
        rest = pairs[whole * width :]
        places[whole, :used, : len(rest)].copy_(rest.T)
    return packed


def packed_product(
    x: torch.Tensor,
    packed: Weights,
    bias: torch.Tensor | None,
    num_out: int,
    *,
    out_dtype: torch.dtype | None = None,
    act: str = "",
    body: str | None = None,
) -> torch.Tensor:
    """Return act(x @ weights + bias), [N, num_out], in bfloat16 or float32 (``out_dtype``). act: a
    key of ``kernels.cpu.activation.CODES``, or "" for none. x: [N, in]
    contiguous bfloat16; packed: as `pack` returned it, or the table of a packed weight in blocks
    (see ``kernels.cpu.matmul.dequantized``); bias: [num_out] float32; body (for tests): a key of
    BODIES. A weight in blocks gives the same bits as the dequantised weight."""
    out = x.new_empty((len(x), num_out), dtype=out_dtype or x.dtype)
    added = 0 if bias is None else bias.data_ptr()
    target = Target(out.data_ptr(), out.element_size(), added, act=CODES[act] + 1 if act else 0)
    _run(_plan(x, num_out, body), x, packed, target)
    return out


def gated_product(
    x: torch.Tensor,
    packed: Weights,
    num_out: int,
    act: str,
    *,
    body: str | None = None,
    change: Change = NO_CHANGE,
) -> torch.Tensor:
    """Return act(x @ gate) * (x @ up), [N, num_out / 2], rounded once. packed: gate and up as one
    matrix of `num_out` outputs, a multiple of two panels; x: [N, in] contiguous bfloat16; act: a
    key of ``kernels.cpu.pointwise.ACTS``; change: of both before the activation."""
    half = num_out // 2
    out = x.new_empty((len(x), half))
    plan = _plan(x, half, body)
    panels = half // width_of(plan.body)
    size = out.element_size()
    target = Target(out.data_ptr(), size, gates=panels, act=ACTS[act], change=change)
    _run(plan, x, packed, target)
    return out


def largest(
    x: torch.Tensor,
    packed: Weights,
    num_out: int,
    scores: Scores | None = None,
    *,
    body: str | None = None,
) -> torch.Tensor:
    """Index of the largest output of each row (the first of equal ones), [N] int32. The outputs are
    not stored. Rows with NaN, +inf or only -inf get -1. x: [N, in] contiguous bfloat16; scores:
    where to write the largest outputs."""
    plan = _plan(x, num_out, body)
    groups = -(-_panels(num_out, plan.body) // plan.panels)
    return largest_ids(len(x), groups, partial(_run, plan, x, packed), scores)


class _Plan(NamedTuple):
    body: str
    num_out: int
    threads: int
    rows: int  # per item
    panels: int  # per item


def _panels(num_out: int, body: str) -> int:
    return -(-num_out // width_of(body))


def _depth(num_in: int) -> int:
    """Number of pairs of inputs of a panel."""
    return -(-num_in // STEP) * STEP // 2


def _plan(x: torch.Tensor, num_out: int, body: str | None) -> _Plan:
    num, num_in = x.shape
    threads = num_threads() if num * num_in * num_out >= _ENOUGH else 1
    chosen = body or BODY
    panels, depth = _panels(num_out, chosen), _depth(num_in)
    if "tiles" in chosen:
        rows = _evenly(num, min(_TILE_ROWS, max(32, _TILE_BYTES // (depth * 4))))
    else:
        rows = max(1, min(num, _MOST, max(_LEAST, _BYTES // (depth * 8))))
    # Rows are prepared once per item, and memory is best read in order: use as many panels per item
    # as leave enough items for all threads.
    items = -(-num // rows) * panels
    return _Plan(chosen, num_out, threads, rows, panels_an_item(panels, items, threads))


def _run(plan: _Plan, x: torch.Tensor, packed: Weights, target: Target) -> None:
    num, num_in = x.shape
    is_packed = isinstance(packed, torch.Tensor)
    (BODIES if is_packed else TABLE_BODIES)[plan.body].run(
        plan.threads,
        x.data_ptr(),
        packed.data_ptr() if isinstance(packed, torch.Tensor) else packed.ctypes.data,
        target.bias,
        target.out,
        num,
        num_in,
        _depth(num_in),
        plan.num_out,
        plan.rows,
        plan.panels,
        target.size,
        target.ids,
        target.gates,
        target.act,
        *target.change,
    )


def _evenly(num: int, most: int) -> int:
    """The number of rows per work item if `num` rows are split evenly into items of about `most`
    rows, rounded up to whole tiles."""
    rows = -(-num // max(1, -(-num // most)))
    return max(1, min(num, -(-rows // amx.ROWS) * amx.ROWS))


@njit(inline="always")
def _add_pairs(left, b, c, span, ahead, how):
    """Add a product to c: c[:num] += a[:num] @ b, where b is a panel of weights. left: (address,
    row stride) of a; span: (num, number of pairs of inputs); ahead: (address, number) of cache
    lines to prefetch, of which those left for the next call are returned; how: a literal."""
    (a, lda), (num, depth), (wanted, lines) = left, span, ahead
    row = 0
    while row + _ROWS <= num:
        # Rows after the first find b in the cache, so memory bandwidth is free for prefetches.
        if row > 0 and lines > 0:
            pair_panel_product(a, lda, b, c, depth, wanted, 6, how)
            wanted += depth * LINE
            lines -= depth
        else:
            pair_panel_product(a, lda, b, c, depth, b, 6, how)
        a, c = a + _ROWS * lda, c + _ROWS * _LINE
        row += _ROWS
    if num - row == 5:
        pair_panel_product(a, lda, b, c, depth, b, 5, how)
    elif num - row == 4:
        pair_panel_product(a, lda, b, c, depth, b, 4, how)
    elif num - row == 3:
        pair_panel_product(a, lda, b, c, depth, b, 3, how)
    elif num - row == 2:
        pair_panel_product(a, lda, b, c, depth, b, 2, how)
    elif num - row == 1:
        pair_panel_product(a, lda, b, c, depth, b, 1, how)
    return wanted, lines


def _vector_body(how: int, is_table: int = 0):
    """Make the function for products in vector registers. how: WIDENED, DOTS or SOFT_DOTS;
    is_table: 1 for packed weights in blocks (parameter 2 is the address of their table)."""
    size = 4 if how == WIDENED else 2  # bytes of an element of a prepared row

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        num, num_in, depth, num_out, most, per = p[5], p[6], p[7], p[8], p[9], p[10]
        panels, blocks = (num_out + PANEL - 1) // PANEL, (num + most - 1) // most
        groups, width = (panels + per - 1) // per, depth * 2
        rows = np.empty(most * width * size, np.uint8)
        sums = np.empty((2 * most, PANEL), np.float32)
        scratch = np.empty((_DEPTH if is_table else 1, PANEL), np.float32)
        while True:
            item = next_item(row)
            if item >= groups * blocks:
                break
            block = item // groups
            first, start = block * most, (item - block * groups) * per
            count = min(most, num - first)
            for i in range(count):
                target = rows.ctypes.data + i * width * size
                _prepare(p[1] + (first + i) * num_in * 2, target, num_in, width, size)
            end = min(start + per, panels)
            for panel in range(start, end):
                a, has_next = rows.ctypes.data, panel + 1 < end and not is_table
                place = panel, has_next, scratch.ctypes.data
                _panel_pairs(p, a, sums, count, place, how, is_table)
                if p[13]:
                    others = panel + p[13], has_next, scratch.ctypes.data
                    _panel_pairs(p, a, sums[most:], count, others, how, is_table)
                    gate(p, (sums, sums[most:]), (first, count), panel, 15)
                finish(p, sums, first, count, panel)

    return body


@njit(inline="always")
def _panel_pairs(p, a, sums, count, place, how, is_table):
    """Compute sums[:count] = rows @ one panel. a: address of the prepared rows; place: (index of
    the panel, whether to prefetch the next panel, address of memory for the inputs of one pass if
    weights are dequantised); how, is_table: literals, as in `_vector_body`."""
    (panel, has_next, scratch), depth, size = place, p[7], 4 if how == WIDENED else 2
    b, c, stride = p[2] + panel * depth * _LINE, sums.ctypes.data, depth * 2 * size
    sums[:count] = 0
    ahead = b + depth * _LINE, depth * (_LINE // LINE) if has_next else 0
    for k in range(0, depth, _DEPTH):
        span, right = (count, min(_DEPTH, depth - k)), b + k * _LINE
        if is_table:
            right = scratch
            fill_pairs(p[2], 2 * panel, (k // 16, span[1] // 16), scratch, _LINE)
            # With gates, p[8] counts the gates or the ups alone; both are whole panels.
            if p[13] or panel * PANEL + HALF < p[8]:
                fill_pairs(p[2], 2 * panel + 1, (k // 16, span[1] // 16), scratch + HALF * 4, _LINE)
        ahead = _add_pairs((a + k * 2 * size, stride), right, c, span, ahead, how)


@njit(**INLINE)
def _prepare(source, target, num_in, width, size):
    """Copy a row of bfloat16 inputs to elements of `size` bytes (4: float32, 2: bfloat16), padded
    with zeros."""
    if size == 4:
        floats = f32(target, (width,))
        read_cells(source, floats[:num_in], 2)
        for i in range(num_in, width):
            floats[i] = 0
    else:
        halves, copies = u16(source, (num_in,)), u16(target, (width,))
        for i in range(num_in):
            copies[i] = halves[i]
        for i in range(num_in, width):
            copies[i] = 0


def _tile_body(soft: int, is_table: int = 0):
    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        num, num_in, depth, num_out, most, per = p[5], p[6], p[7], p[8], p[9], p[10]
        panels, blocks = (num_out + 31) // 32, (num + most - 1) // most
        groups, high = (panels + per - 1) // per, (most + 31) // 32 * 32
        state = np.empty(amx.STATE + 64, np.uint8)
        # Rows of partial tiles, or all rows if inputs are not a multiple of STEP, are copied.
        copied = np.empty((16 if num_in % STEP == 0 else high, depth * 2), np.uint16)
        sums = np.empty((2 * high, 32), np.float32)
        scratch = np.empty(_PASS * _PIECE if is_table else 1, np.uint8)
        amx.begin((state.ctypes.data + 63) & -64, soft)
        while True:
            item = next_item(row)
            if item >= groups * blocks:
                break
            block = item // groups
            first, start = block * most, (item - block * groups) * per
            count, end = min(most, num - first), min(start + per, panels)
            whole = count // 16 * 16 if num_in % STEP == 0 else 0
            for r in range(whole, count):
                target = copied.ctypes.data + (r - whole) * depth * 4
                _prepare(p[1] + (first + r) * num_in * 2, target, num_in, depth * 2, 2)
            for panel in range(start, end):
                # Requested in each round: Numba frees an array that is not named any more.
                own, rows = (
                    (state.ctypes.data + 63) & -64,
                    (
                        first,
                        count,
                        whole,
                        copied.ctypes.data,
                    ),
                )
                place = panel, panel + 1 < end and not is_table, scratch.ctypes.data
                _panel_tiles(p, own, rows, sums, place, soft, is_table)
                if p[13]:
                    others = panel + p[13], place[1], place[2]
                    _panel_tiles(p, own, rows, sums[high:], others, soft, is_table)
                    gate(p, (sums, sums[high:]), (first, count), panel, 15)
                finish(p, sums, first, count, panel)
        amx.end(state.ctypes.data, soft)

    return body


@njit(inline="always")
def _panel_tiles(p, own, rows, sums, place, soft, is_table):
    """Compute sums = rows of x @ one panel, with AMX. rows: (first row, number of rows, number of
    rows in full tiles, address of copies of the remaining rows, padded to a tile). place: as in
    `_panel_pairs`; soft, is_table: literals, as in `_tile_body`."""
    (first, count, whole, copies), (panel, has_next, scratch) = rows, place
    steps = p[7] // 16
    size = steps * _PIECE
    ahead = p[2] + (panel + 1) * size
    end = ahead + (size if has_next else 0)
    # The first rows read the panel from memory in order.
    lead = 16 if count <= _LEAD else 0
    for begin in range(0, steps, _PASS):
        num, b = min(_PASS, steps - begin), p[2] + panel * size + begin * _PIECE
        if is_table:
            b = scratch
            fill_pairs(p[2], panel, (begin, num), scratch, HALF * 4)
        r = 0
        while r < count:
            a, lda, left = p[1] + (first + r) * p[6] * 2, p[6] * 2, whole - r
            if left <= 0:
                a, lda, left = copies - left * p[7] * 4, p[7] * 4, count - r
            c, span, wanted = sums[r:].ctypes.data, (begin, num), ahead if ahead < end else 0
            if r < lead or left < 32:
                _two_tiles(own, (a + begin * 64, lda), b, c, span, wanted if r else 0, soft)
                ahead += num * (_AHEAD_OF_TWO * LINE) if r else 0
                r += 16
            else:
                _four_tiles(own, (a + begin * 64, lda), b, c, span, wanted, soft)
                ahead += num * (_AHEAD_OF_FOUR * LINE)
                r += 32


@njit(inline="always")
def _two_tiles(own, left, b, c, span, ahead, soft):
    """Multiply 16 rows by one panel, with AMX: c [16, 32] += left @ b. If the span starts at step
    0, c is overwritten. left: (address, row stride); span: (first step of 32 inputs, number of
    steps); ahead: address to prefetch, or 0; soft: emulate AMX, in the tiles `own`."""
    (a, lda), (begin, num) = left, span
    if begin:
        amx.load(own, 0, c, 128, soft)
        amx.load(own, 1, c + 64, 128, soft)
    else:
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
    for k in range(num):
        if ahead:
            prefetch(ahead + k * (_AHEAD_OF_TWO * LINE), _AHEAD_OF_TWO, LANES, 4)
        amx.load(own, 4, a + k * 64, lda, soft)
        amx.load(own, 6, b + k * _PIECE, 128, soft)
        amx.dot(own, 0, 4, 6, soft)
        amx.load(own, 7, b + k * _PIECE + 64, 128, soft)
        amx.dot(own, 1, 4, 7, soft)
    amx.store(own, 0, c, 128, soft)
    amx.store(own, 1, c + 64, 128, soft)


@njit(inline="always")
def _four_tiles(own, left, b, c, span, ahead, soft):
    """Multiply 32 rows by one panel like `_two_tiles`; c: [32, 32]. Rows bypass the L1 cache."""
    (a, lda), (begin, num) = left, span
    below, low = a + 16 * lda, c + 16 * 128
    if begin:
        amx.load_once(own, 0, c, 128, soft)
        amx.load_once(own, 1, c + 64, 128, soft)
        amx.load_once(own, 2, low, 128, soft)
        amx.load_once(own, 3, low + 64, 128, soft)
    else:
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
        amx.zero(own, 2, soft)
        amx.zero(own, 3, soft)
    for k in range(num):
        if ahead:
            prefetch(ahead + k * (_AHEAD_OF_FOUR * LINE), _AHEAD_OF_FOUR, LANES, 4)
        amx.load_once(own, 4, a + k * 64, lda, soft)
        amx.load(own, 6, b + k * _PIECE, 128, soft)
        amx.load(own, 7, b + k * _PIECE + 64, 128, soft)
        amx.dot(own, 0, 4, 6, soft)
        amx.load_once(own, 5, below + k * 64, lda, soft)
        amx.dot(own, 1, 4, 7, soft)
        amx.dot(own, 2, 5, 6, soft)
        amx.dot(own, 3, 5, 7, soft)
    amx.store(own, 0, c, 128, soft)
    amx.store(own, 1, c + 64, 128, soft)
    amx.store(own, 2, low, 128, soft)
    amx.store(own, 3, low + 64, 128, soft)


BODIES = {
    "widened": Kernel(_vector_body(WIDENED), heavy=True),
    "dots": Kernel(_vector_body(DOTS), heavy=True),
    "soft dots": Kernel(_vector_body(SOFT_DOTS), heavy=True),
    "tiles": Kernel(_tile_body(0), heavy=True),
    "soft tiles": Kernel(_tile_body(1), heavy=True),
}

# Bodies of packed weights in blocks.
TABLE_BODIES = {
    "widened": Kernel(_vector_body(WIDENED, 1), heavy=True),
    "dots": Kernel(_vector_body(DOTS, 1), heavy=True),
    "soft dots": Kernel(_vector_body(SOFT_DOTS, 1), heavy=True),
    "tiles": Kernel(_tile_body(0, 1), heavy=True),
    "soft tiles": Kernel(_tile_body(1, 1), heavy=True),
}

# The body for this processor.
BODY = {"amx": "tiles", "avx512_bf16": "dots"}.get(isa.LEVEL, "widened")
PRODUCTS = (BODIES[BODY],)
