"""Products with packed weights of 2 to 8 bits: inputs are quantised to 8 bits by units of 32.

A kernel is compiled for each form of weights that is used, in one of these ways ("bodies"):

    vnni512, vnni256   dot products of four bytes in one instruction
    avx2               the same in three instructions
    plain              for all other processors

All return the same bits, and a row's results depend neither on the number of rows nor on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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
    NUM_IN,
    OFFSETS,
    SHIFT,
    TABLE,
    UNITS,
    VALUES,
    decode_panel,
    decoded_floats,
    form_of,
    quantize_row,
    quantized_rows,
    table_of,
)
from kernels.cpu.matmul.blocks import PANEL, BlockWeight
from kernels.cpu.matmul.float32 import panels_an_item
from kernels.cpu.matmul.outputs import finish, gate
from kernels.cpu.native import EXACT, Kernel, i64, next_item
from kernels.cpu.threads import num_threads

NUM_PARAMETERS = 16
_ENOUGH = 65536  # with fewer multiplications, one thread is faster
_FEW = 8  # up to this many rows, each thread quantises them itself
_MOST, _BYTES = 288, 3 << 18  # maximum rows of an item, and bytes of them, which stay in the cache
_LINE = 2 * 64  # bytes of a row of a unit

# Parameters of a panel function: address and bytes of its quantised rows, and their number; the
# panel's values, decoded scales and offsets; the sums; units, shift and codebook as in the table.
_A, _SIZE, _COUNT, _B, _SCALES, _OFFSETS, _OUT, _UNITS, _SHIFT, _CODEBOOK = range(10)
_JOB = 10


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
    num = len(x)
    out = x.new_empty((num, weight.num_outputs), dtype=out_dtype or x.dtype)
    threads = num_threads() if x.numel() * weight.num_outputs >= _ENOUGH else 1
    size, panels = row_bytes(weight.units, weight.halves), weight.values.shape[0]
    rows = None
    if num > _FEW or weight.order is not None:
        rows = quantized_rows(x, weight, threads)
    most = max(1, min(num, _MOST, _BYTES // size))
    panel = panel_function(form_of(weight), BODIES[body or BODY])
    PRODUCT.run(
        threads,
        x.data_ptr(),
        table_of(weight),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num,
        x.element_size(),
        0 if rows is None else rows.data_ptr(),
        weight.num_outputs,
        most,
        panels_an_item(panels, -(-num // most) * panels, threads),
        out.element_size(),
        0,
        0,
        0,
        size,
        panel.address,
    )
    return out


def _product_body(row):
    """The kernel of vector bodies: it prepares rows and scales, and calls the function p[16] for
    each panel."""
    p = i64(row, (NUM_PARAMETERS + 1,))
    t = i64(p[2], (TABLE,))
    num, num_out, most, per = p[5], p[8], p[9], p[10]
    panels, blocks = (num_out + PANEL - 1) // PANEL, (num + most - 1) // most
    groups, floats = (panels + per - 1) // per, decoded_floats(t)
    scales = np.empty(floats, np.float32)
    offsets = np.empty(floats if t[OFFSETS] else 1, np.float32)
    sums = np.empty((2 * most, PANEL), np.float32)
    own = np.empty(1 if p[7] else num * p[15], np.uint8)
    job = np.empty(_JOB, np.int64)
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
        for panel in range(start, end):
            job[_A] = (p[7] if p[7] else own.ctypes.data) + first * p[15]
            job[_SIZE], job[_COUNT] = p[15], count
            job[_SCALES], job[_OFFSETS] = scales.ctypes.data, offsets.ctypes.data
            job[_OUT] = sums.ctypes.data
            _panel(p, t, job, panel)
            if p[13]:
                job[_OUT] = sums[most:].ctypes.data
                _panel(p, t, job, panel + p[13])
                gate(p, sums, sums[most:], count)
            finish(p, sums, first, count, panel)


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
    decode_panel(t, panel, 0, job[_SCALES])
    if t[OFFSETS]:
        decode_panel(t, panel, 1, job[_OFFSETS])
    size = t[UNITS] * t[BITS] * _LINE
    job[_B], job[_CODEBOOK] = t[VALUES] + panel * size, t[CODEBOOK]
    job[_UNITS], job[_SHIFT] = t[UNITS], t[SHIFT]
    call_body(p[16], job.ctypes.data)


def _panel_body(form: Form, way: int) -> Callable[[int], None]:
    """Make the function that multiplies quantised rows by one panel. way: a key of LANES."""
    code = form.code

    def body(row):
        job = i64(row, (_JOB,))
        count, size = job[_COUNT], job[_SIZE]
        scales, offsets, b, codebook = job[_SCALES], job[_OFFSETS], job[_B], job[_CODEBOOK]
        shape, done = (job[_UNITS], job[_SHIFT]), 0
        while done + 4 <= count:
            a, c = (job[_A] + done * size, size), job[_OUT] + done * (PANEL * 4)
            block_tile(a, b, scales, offsets, c, shape, codebook, 0, 4, code, way)
            done += 4
        a, c = (job[_A] + done * size, size), job[_OUT] + done * (PANEL * 4)
        if count - done == 3:
            block_tile(a, b, scales, offsets, c, shape, codebook, 0, 3, code, way)
        elif count - done == 2:
            block_tile(a, b, scales, offsets, c, shape, codebook, 0, 2, code, way)
        elif count - done == 1:
            block_tile(a, b, scales, offsets, c, shape, codebook, 0, 1, code, way)

    return body


PRODUCT = Kernel(_product_body, heavy=True)


@cache
def panel_function(form: Form, way: int) -> Kernel:
    """Returns the function that multiplies by a panel of a form of weights. way: a key of LANES."""
    return Kernel(_panel_body(form, way), exact=True)


BODIES = {"vnni512": VNNI_512, "vnni256": VNNI_256, "avx2": AVX2, "plain": PLAIN}


def runs_here(body: str) -> bool:
    """True if this process may use the instructions of a body, a key of BODIES."""
    if body == "vnni512":
        return isa.has("avx512vnni")
    if body == "vnni256":
        return isa.has("avxvnni") or (isa.has("avx512vnni") and isa.has("avx512vl"))
    return body == "plain" or isa.has("avx2")


BODY = next(body for body in BODIES if runs_here(body))
