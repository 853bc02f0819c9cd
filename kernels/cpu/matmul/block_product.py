"""Products with packed weights of 2 to 8 bits: inputs are quantised to 8 bits by units of 32.

A kernel is compiled for each form of weights that is used, in one of these ways ("bodies"):

    tiles              AMX, for many rows (``kernels.cpu.matmul.block_tiles``)
    vnni512, vnni256   dot products of four bytes in one instruction
    avx2               the same in three instructions
    plain              for all other processors

All return the same bits, and a row's results depend neither on the number of rows nor on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from kernels.cpu import isa
from kernels.cpu.atomics import call_body
from kernels.cpu.block_vectors import (
    AVX2,
    PLAIN,
    VNNI_256,
    VNNI_512,
    Form,
    block_tile,
    row_bytes,
)
from kernels.cpu.matmul.block_rows import (
    BITS,
    CODEBOOK,
    HALVES,
    IS_DIRECT,
    JOB,
    JOB_CODEBOOK,
    JOB_COUNT,
    JOB_OFFSETS,
    JOB_OUT,
    JOB_OUTER_OFFSETS,
    JOB_OUTER_SCALES,
    JOB_OUTER_SHIFT,
    JOB_ROWS,
    JOB_SCALES,
    JOB_SHIFT,
    JOB_SIZE,
    JOB_UNITS,
    JOB_VALUES,
    JOB_ZERO,
    NUM_IN,
    OFFSET_BYTES,
    OFFSETS,
    OUTER_OFFSETS,
    OUTER_SCALES,
    OUTER_SHIFT,
    SCALE_BYTES,
    SCALES,
    SHIFT,
    SUPERS,
    TABLE,
    UNITS,
    VALUES,
    ZERO,
    decode_panel,
    decoded_floats,
    direct_form,
    form_of,
    quantize_row,
    quantized_rows,
    quantized_tiles,
    table_of,
    tile_bytes,
)
from kernels.cpu.matmul.block_tiles import ROWS, tile_panel_body
from kernels.cpu.matmul.blocks import PANEL, BlockWeight
from kernels.cpu.matmul.float32 import panels_an_item
from kernels.cpu.matmul.outputs import NO_CHANGE, Change, Scores, Target, finish, gate, largest_ids
from kernels.cpu.native import EXACT, Kernel, f32, i64, next_item
from kernels.cpu.pointwise import ACTS
from kernels.cpu.threads import num_threads

NUM_PARAMETERS = 20
_ENOUGH = 65536  # with fewer multiplications, one thread is faster
_FEW = 8  # up to this many rows, each thread quantises them itself
_MOST, _BYTES = 288, 3 << 18  # maximum rows of an item, and bytes of them, which stay in the cache
_TILE_BYTES = 5 << 18  # the same for tiles
_FROM, _FROM_OF_BYTES = 15, 32  # rows from which tiles are faster; the latter for 8 bits
_AHEAD = 5  # units whose values are prefetched in advance
_LINE = 2 * 64  # bytes of a row of a unit


def block_product(
    x: torch.Tensor,
    weight: BlockWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    body: str | None = None,
) -> torch.Tensor:
    """Return x @ weight + bias, [M, N], in bfloat16 or float32 (``out_dtype``; default that of x).

    x: [M, K] contiguous bfloat16 or float32, whose rows are quantised; bias: [N] float32; body (for
    tests): a key of BODIES. A row that is not finite gets results that are not finite."""
    out = x.new_empty((len(x), weight.num_outputs), dtype=out_dtype or x.dtype)
    added = 0 if bias is None else bias.data_ptr()
    target = Target(out.data_ptr(), out.element_size(), added)
    _run(_plan(x, weight, weight.num_outputs, body), x, weight, target)
    return out


def gated_block_product(
    x: torch.Tensor,
    weight: BlockWeight,
    act: str,
    *,
    body: str | None = None,
    change: Change = NO_CHANGE,
) -> torch.Tensor:
    """Return act(x @ gate) * (x @ up), [M, N / 2] of x's dtype, rounded once. weight: gate and up
    as one matrix of N outputs, a multiple of 64; x, body: as in `block_product`; act: a key of
    ``kernels.cpu.pointwise.ACTS``; change: of both before the activation."""
    half = weight.num_outputs // 2
    out = x.new_empty((len(x), half))
    size, gates = out.element_size(), half // PANEL
    target = Target(out.data_ptr(), size, gates=gates, act=ACTS[act], change=change)
    _run(_plan(x, weight, half, body), x, weight, target)
    return out


def largest_output(
    x: torch.Tensor, weight: BlockWeight, scores: Scores | None = None, *, body: str | None = None
) -> torch.Tensor:
    """Index of the largest output of each row (the first of equal ones), [M] int32. The outputs are
    not stored. Rows with NaN, +inf or only -inf get -1. x, body: as in `block_product`; scores:
    where to write the largest outputs."""
    plan = _plan(x, weight, weight.num_outputs, body)
    groups = -(-weight.values.shape[0] // plan.panels)
    return largest_ids(len(x), groups, partial(_run, plan, x, weight), scores)


class _Plan(NamedTuple):
    way: int
    num_out: int
    threads: int
    rows: int  # per item
    panels: int  # per item


def _plan(x: torch.Tensor, weight: BlockWeight, num_out: int, body: str | None) -> _Plan:
    num = len(x)
    threads = num_threads() if x.numel() * weight.num_outputs >= _ENOUGH else 1
    enough = _FROM_OF_BYTES if weight.bits == 8 else _FROM
    panels, way = -(-num_out // PANEL), BODIES[body or (TILES_BODY if num >= enough else BODY)]
    if way in _TILES:
        rows = max(1, min(-(-num // ROWS), _MOST // ROWS, _TILE_BYTES // tile_bytes(weight))) * ROWS
    else:
        rows = max(1, min(num, _MOST, _BYTES // row_bytes(weight.units, weight.halves)))
    return _Plan(
        way, num_out, threads, rows, panels_an_item(panels, -(-num // rows) * panels, threads)
    )


def _run(plan: _Plan, x: torch.Tensor, weight: BlockWeight, target: Target) -> None:
    rows, is_tiles = None, plan.way in _TILES
    if is_tiles:
        rows = quantized_tiles(x, weight, plan.threads)
    elif len(x) > _FEW or weight.order is not None:
        rows = quantized_rows(x, weight, plan.threads)
    form = form_of(weight) if is_tiles else direct_form(weight)
    PRODUCT.run(
        plan.threads,
        x.data_ptr(),
        table_of(weight),
        target.bias,
        target.out,
        len(x),
        x.element_size(),
        0 if rows is None else rows.data_ptr(),
        plan.num_out,
        plan.rows,
        plan.panels,
        target.size,
        target.ids,
        target.gates,
        target.act,
        tile_bytes(weight) if is_tiles else row_bytes(weight.units, weight.halves),
        panel_function(form, plan.way).address,
        int(is_tiles),
        *target.change,
    )


def _product_body(row):
    """The kernel of vector bodies: it prepares rows and scales, and calls the function p[16] for
    each panel."""
    p = i64(row, (NUM_PARAMETERS + 1,))
    t = i64(p[2], (TABLE,))
    num, num_out, most, per = p[5], p[8], p[9], p[10]
    panels, blocks = (num_out + PANEL - 1) // PANEL, (num + most - 1) // most
    groups, floats = (panels + per - 1) // per, decoded_floats(t)
    high = (most + ROWS - 1) // ROWS * ROWS
    decoded = np.empty(floats * (2 if t[OFFSETS] else 1) + 16, np.float32)
    scales = (decoded.ctypes.data + 63) & -64
    offsets = scales + floats * 4
    scratch = np.empty(2 * high * PANEL + 16, np.float32)
    sums = f32((scratch.ctypes.data + 63) & -64, (2 * high, PANEL))
    own = np.empty(1 if p[7] else num * p[15], np.uint8)
    job = np.empty(JOB, np.int64)
    is_first = p[7] == 0
    while True:
        item = next_item(row)
        if item >= groups * blocks:
            break
        if is_first:
            _quantize_own(p, t, own.ctypes.data)
            is_first = False
        block = item // groups
        first, start = block * most, (item - block * groups) * per
        count, end = min(most, num - first), min(start + per, panels)
        rows = (p[7] if p[7] else own.ctypes.data) + (first // ROWS if p[17] else first) * p[15]
        for panel in range(start, end):
            job[JOB_ROWS], job[JOB_SIZE], job[JOB_COUNT] = rows, p[15], count
            job[JOB_SCALES], job[JOB_OFFSETS] = scales, offsets
            job[JOB_OUT] = sums.ctypes.data
            _panel(p, t, job, panel)
            if p[13]:
                job[JOB_OUT] = sums[high:].ctypes.data
                _panel(p, t, job, panel + p[13])
                gate(p, (sums, sums[high:]), (first, count), panel, 18)
            finish(p, sums, first, count, panel)
    # Numba frees an array that is not named any more.
    decoded[0] = scratch[0] = 0


@njit(**EXACT)
def _quantize_own(p, t, target):
    """Quantise all rows of inputs to memory of this thread."""
    cell, num_in = p[6], t[NUM_IN]
    for n in range(p[5]):
        source, place = p[1] + n * num_in * cell, target + n * p[15]
        if t[HALVES] == 1:
            quantize_row(source, cell, num_in, place, t, 1)
        else:
            quantize_row(source, cell, num_in, place, t, 2)


@njit(**EXACT)
def _panel(p, t, job, panel):
    """Multiply the rows of a job by one panel. job: the parameters of the panel function."""
    if t[IS_DIRECT] and not p[17]:
        job[JOB_SCALES] = t[SCALES] + panel * t[SCALE_BYTES]
        job[JOB_OFFSETS] = t[OFFSETS] + panel * t[OFFSET_BYTES]
        outer = panel * t[SUPERS] * (PANEL * 4)
        job[JOB_OUTER_SCALES] = t[OUTER_SCALES] + outer
        job[JOB_OUTER_OFFSETS] = t[OUTER_OFFSETS] + outer
        job[JOB_OUTER_SHIFT] = t[OUTER_SHIFT]
    else:
        decode_panel(t, panel, 0, job[JOB_SCALES])
        if t[OFFSETS]:
            decode_panel(t, panel, 1, job[JOB_OFFSETS])
    size = t[UNITS] * t[BITS] * _LINE
    job[JOB_VALUES], job[JOB_CODEBOOK] = t[VALUES] + panel * size, t[CODEBOOK]
    job[JOB_UNITS], job[JOB_SHIFT], job[JOB_ZERO] = t[UNITS], t[SHIFT], t[ZERO]
    call_body(p[16], job.ctypes.data)


def _panel_body(form: Form, way: int) -> Callable[[int], None]:
    """Make the function that multiplies quantised rows by one panel. way: a key of LANES."""
    code, bits = form.code, form.bits

    def body(row):
        job = i64(row, (JOB,))
        count, size = job[JOB_COUNT], job[JOB_SIZE]
        scales = job[JOB_SCALES], job[JOB_OUTER_SCALES]
        offsets = job[JOB_OFFSETS], job[JOB_OUTER_OFFSETS]
        b, codebook = job[JOB_VALUES], job[JOB_CODEBOOK]
        shape = job[JOB_UNITS], job[JOB_SHIFT], job[JOB_OUTER_SHIFT]
        # Memory is to be read all the time: one tile prefetches its panel, several the next one.
        tiles, unit = (count + 3) // 4, bits * _LINE
        part, wanted = job[JOB_UNITS] * unit // max(tiles, 1), b + job[JOB_UNITS] * unit
        if tiles == 1:
            wanted = b + _AHEAD * unit
        else:
            unit //= tiles
        done = 0
        while done < count:
            ahead = wanted, unit, int(done == 0)
            a, c = (job[JOB_ROWS] + done * size, size), job[JOB_OUT] + done * (PANEL * 4)
            if count - done >= 4:
                block_tile(a, b, scales, offsets, c, shape, codebook, ahead, 4, code, way)
            elif count - done == 3:
                block_tile(a, b, scales, offsets, c, shape, codebook, ahead, 3, code, way)
            elif count - done == 2:
                block_tile(a, b, scales, offsets, c, shape, codebook, ahead, 2, code, way)
            else:
                block_tile(a, b, scales, offsets, c, shape, codebook, ahead, 1, code, way)
            done, wanted = done + 4, wanted + part

    return body


PRODUCT = Kernel(_product_body, heavy=True)


@cache
def panel_function(form: Form, way: int) -> Kernel:
    """Returns the function that multiplies by a panel of a form of weights. way: of BODIES."""
    if way in _TILES:
        return Kernel(tile_panel_body(form, int(way == _SOFT_AMX)), exact=True)
    return Kernel(_panel_body(form, way), exact=True)


_AMX, _SOFT_AMX = _TILES = (4, 5)
BODIES = {
    "vnni512": VNNI_512,
    "vnni256": VNNI_256,
    "avx2": AVX2,
    "plain": PLAIN,
    "tiles": _AMX,
    "soft tiles": _SOFT_AMX,  # emulated, for tests
}


def runs_here(body: str) -> bool:
    """True if this process may use the instructions of a body, a key of BODIES."""
    if body == "tiles":
        return isa.LEVEL == "amx"
    if body == "vnni512":
        return isa.has("avx512vnni")
    if body == "vnni256":
        return isa.has("avxvnni") or (isa.has("avx512vnni") and isa.has("avx512vl"))
    return body in ("plain", "soft tiles") or isa.has("avx2")


BODY = next(body for body in BODIES if runs_here(body))  # for a few rows
TILES_BODY = "tiles" if runs_here("tiles") else BODY  # for more rows
