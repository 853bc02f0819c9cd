"""Bodies of 8-bit products: quantised rows by panels of 64 outputs, summed exactly in int32.

    dots    AVX-512 VNNI: dot products of four bytes; best for a few rows
    tiles   AMX: products of 16 rows x 64 inputs with 64 inputs x 16 outputs

Sums are exact and are converted to floats by the same code, so both return the same bits."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu import amx
from kernels.cpu.activation import activate_row
from kernels.cpu.cells import write_cells
from kernels.cpu.matmul.float32 import PANEL
from kernels.cpu.matmul.outputs import change, keep_largest
from kernels.cpu.matmul.scaled_sums import write_activated, write_gated, write_scaled
from kernels.cpu.native import EXACT, INLINE, f32, float_of_bits, i32, i64, next_item, u8, u16
from kernels.cpu.vectors import LANES, LINE, byte_tile_product, prefetch

DEEP = 4  # inputs per lane and instruction
STEP = 64  # inputs are padded to a multiple of this
ZERO_POINT = 128
NUM_PARAMETERS = 19
HALF = PANEL // 2  # outputs that are converted to floats together
_ROWS = 6  # rows per register tile of "dots"
_LINE = PANEL * DEEP  # bytes of a panel per four inputs, and of a row of sums
_PIECE = PANEL * STEP  # bytes of a panel per step of tiles
_SIDE = _LINE // 2  # bytes from the first half of the outputs to the second
_PASS = 16  # steps per pass: so much of half a panel stays in the L1 cache with rows and sums
_LEAD = 96  # up to this many rows, products are bound by memory
_AHEAD_OF_TWO, _AHEAD_OF_FOUR = 8, 4  # cache lines of the next panel prefetched per step
_ZERO, _LARGEST = np.float32(0), np.float32(127)
_MAGNITUDE, _SHORT = np.int32(0x7FFFFFFF), np.uint16(0x7FFF)
_SIXTEEN = np.int32(16)
_ROUND = np.float32(ZERO_POINT + 0.5)


def quantize_body(cell: int):
    """Make the body that quantises rows of x, whose elements have `cell` bytes, to unsigned bytes:
    x = scale * (byte - ZERO_POINT), with one scale per row."""

    def body(row):
        p = i64(row, (7,))
        num, width, padded = p[4], p[5], p[6]
        scales = f32(p[3], (num,))
        while True:
            n = next_item(row)
            if n >= num:
                break
            source, integers = p[1] + n * width * cell, u8(p[2] + n * padded, (padded,))
            largest = _magnitude(source, width, cell)
            scales[n] = largest / _LARGEST
            inverse = _LARGEST / largest if largest > 0 else _ZERO
            _round_row(source, integers, (width, padded), inverse, cell)

    return body


@njit(**INLINE)
def _magnitude(source, width, cell):
    """Largest magnitude of a row of `width` elements of `cell` bytes; NaN if one is NaN."""
    # Without the sign bit, floats are ordered like their bits, and NaN is the largest.
    if cell == 4:
        words, most = i32(source, (width,)), np.int32(0)
        for i in range(width):
            most = max(most, np.int32(words[i] & _MAGNITUDE))
        return float_of_bits(np.int32(most))
    halves, top = u16(source, (width,)), np.uint16(0)
    for i in range(width):
        top = max(top, np.uint16(halves[i] & _SHORT))
    return float_of_bits(np.int32(np.int32(top) << _SIXTEEN))


@njit(**INLINE)
def _round_row(source, integers, sizes, inverse, cell):
    """Fill the bytes `integers` with a row times `inverse`. sizes: (inputs, bytes)."""
    width, padded = sizes
    if cell == 4:
        x = f32(source, (width,))
        for i in range(width):
            integers[i] = np.uint8(np.int32(x[i] * inverse + _ROUND))
    else:
        halves = u16(source, (width,))
        for i in range(width):
            value = float_of_bits(np.int32(np.int32(halves[i]) << _SIXTEEN))
            integers[i] = np.uint8(np.int32(value * inverse + _ROUND))
    for i in range(width, padded):
        integers[i] = np.uint8(ZERO_POINT)


@njit(**EXACT)
def _write_half(p, totals, first, count, start):
    """Convert the integer sums of `count` rows and 32 outputs to the product's outputs. totals:
    address of the first sum, in rows of 64; first: the first row; start: the first output."""
    num_out, size = p[10], p[13]
    row_scales = f32(p[5] + first * 4, (count,))
    taken, scales, bias = p[7] + start * 4, p[6] + start * 4, p[3] + start * 4
    if p[16] or start + HALF > num_out:
        _write_some(p, totals, (first, count), start)
        return
    for i in range(count):
        source, out = totals + i * _LINE, p[4] + ((first + i) * num_out + start) * size
        if size == 4 and p[3]:
            write_scaled(source, taken, scales, bias, row_scales[i], out, 2, 4, 1)
        elif size == 4:
            write_scaled(source, taken, scales, bias, row_scales[i], out, 2, 4, 0)
        elif p[3]:
            write_scaled(source, taken, scales, bias, row_scales[i], out, 2, 2, 1)
        else:
            write_scaled(source, taken, scales, bias, row_scales[i], out, 2, 2, 0)


@njit(**EXACT)
def _write_some(p, totals, rows, start):
    """Write the outputs from `start` on, if fewer than 32 are left or they are activated. rows:
    (first, number)."""
    (first, count), num_out, size = rows, p[10], p[13]
    width, row_scales = min(HALF, num_out - start), f32(p[5] + first * 4, (count,))
    values = np.empty(HALF, np.float32)
    where = values.ctypes.data
    for i in range(count):
        source, scale = totals + i * _LINE, row_scales[i]
        write_scaled(source, p[7] + start * 4, p[6] + start * 4, 0, scale, where, 2, 4, 0)
        if p[3]:
            bias = f32(p[3] + start * 4, (width,))
            for j in range(width):
                values[j] += bias[j]
        if p[16]:
            activate_row(values[:width], p[16] - 1)
        out = p[4] + ((first + i) * num_out + start) * size
        if size == 4:
            write_cells(out, values[:width], 4)
        else:
            write_cells(out, values[:width], 2)


@njit(**EXACT)
def _gate_half(p, gates, ups, first, count, start):
    """Write activation(gate) * up, as bfloat16, for 32 outputs from `start` on. gates, ups:
    addresses of their sums, in rows of 64."""
    if p[17]:
        _gate_changed(p, gates, ups, (first, count), start)
        return
    num_out, row_scales = p[10], f32(p[5] + first * 4, (count,))
    at, above = start * 4, (start + num_out) * 4
    for i in range(count):
        gate = gates + i * _LINE, p[7] + at, p[6] + at
        up = ups + i * _LINE, p[7] + above, p[6] + above
        out = p[4] + ((first + i) * num_out + start) * 2
        if p[16] == 0:
            write_gated(gate, up, row_scales[i], out, 2, 0)
        else:
            write_gated(gate, up, row_scales[i], out, 2, 1)


@njit(**EXACT)
def _gate_changed(p, gates, ups, rows, start):
    """Write what `_gate_half` writes, of sums that a function changes before."""
    first, count = rows
    floats = np.empty((2 * count, HALF), np.float32)
    _changed(p, gates, floats, rows, start)
    _changed(p, ups, floats[count:], rows, start + p[10])
    for i in range(count):
        out = p[4] + ((first + i) * p[10] + start) * 2
        for j in range(0, HALF, LANES):
            gate, up = floats[i, j:].ctypes.data, floats[count + i, j:].ctypes.data
            if p[16] == 0:
                write_activated(gate, up, out + j * 2, 0)
            else:
                write_activated(gate, up, out + j * 2, 1)


@njit(**EXACT)
def _changed(p, totals, floats, rows, start):
    """Convert integer sums of 32 outputs from `start` on to floats, and let the function change
    them."""
    first, count = rows
    row_scales = f32(p[5] + first * 4, (count,))
    taken, scales = p[7] + start * 4, p[6] + start * 4
    for i in range(count):
        where = floats[i].ctypes.data
        write_scaled(totals + i * _LINE, taken, scales, 0, row_scales[i], where, 2, 4, 0)
    change((p[17], p[18], p[19]), (floats.ctypes.data, HALF), rows, start)


@njit(**INLINE)
def _compare_half(p, totals, first, count, start):
    """Update the largest output of each row with 32 outputs from `start` on. Each work item has its
    own largest outputs; NaN marks a row with an invalid output."""
    num, num_out, row_scales = p[8], p[10], f32(p[5] + first * 4, (count,))
    panel = start // PANEL
    place = (panel // p[12]) * num + first
    best, ids = f32(p[4] + place * 4, (count,)), i32(p[14] + place * 4, (count,))
    is_first = start % (p[12] * PANEL) == 0
    values = np.empty(HALF, np.float32)
    for i in range(count):
        if is_first:
            best[i], ids[i] = -np.inf, 0
        source, where = totals + i * _LINE, values.ctypes.data
        write_scaled(source, p[7] + start * 4, p[6] + start * 4, 0, row_scales[i], where, 2, 4, 0)
        keep_largest(values[: min(HALF, num_out - start)], start, best, ids, i)


@njit(**INLINE)
def _finish(p, sums, others, rows, start):
    """Convert the sums of some rows and 32 outputs from `start` on. sums: their address; others:
    address of the sums of the up outputs, if `sums` are of gates; rows: (first, number)."""
    first, count = rows
    if start >= p[10]:
        return
    if p[15]:
        _gate_half(p, sums, others, first, count, start)
    elif p[14]:
        _compare_half(p, sums, first, count, start)
    else:
        _write_half(p, sums, first, count, start)


@njit(**INLINE)
def _few_rows(a, lda, b, c, depth, count):
    """Multiply `count` (at most 6) quantised rows a by one panel b; c gets the integer sums."""
    if count == 6:
        byte_tile_product(a, lda, b, _LINE, c, _LINE, depth, 6, 4, LANES, 1)
    elif count == 5:
        byte_tile_product(a, lda, b, _LINE, c, _LINE, depth, 5, 4, LANES, 1)
    elif count == 4:
        byte_tile_product(a, lda, b, _LINE, c, _LINE, depth, 4, 4, LANES, 1)
    elif count == 3:
        byte_tile_product(a, lda, b, _LINE, c, _LINE, depth, 3, 4, LANES, 1)
    elif count == 2:
        byte_tile_product(a, lda, b, _LINE, c, _LINE, depth, 2, 4, LANES, 1)
    else:
        byte_tile_product(a, lda, b, _LINE, c, _LINE, depth, 1, 4, LANES, 1)


def dots_body(row):
    """Multiply with AVX-512 VNNI."""
    p = i64(row, (NUM_PARAMETERS + 1,))
    num, depth, most, per = p[8], p[9], p[11], p[12]
    panels, blocks = (p[10] + PANEL - 1) // PANEL, (num + most - 1) // most
    groups, lda, size = (panels + per - 1) // per, depth * DEEP, depth * _LINE
    totals = np.empty((2 * _ROWS, PANEL), np.int32)
    while True:
        item = next_item(row)
        if item >= groups * blocks:
            break
        block = item // groups
        begin, start = block * most, (item - block * groups) * per
        end = min(begin + most, num)
        for panel in range(start, min(start + per, panels)):
            for n in range(begin, end, _ROWS):
                count, a, b = min(_ROWS, end - n), p[1] + n * lda, p[2] + panel * size
                sums = totals.ctypes.data
                others = sums + _ROWS * _LINE
                _few_rows(a, lda, b, sums, depth, count)
                if p[15]:
                    _few_rows(a, lda, b + p[15] * size, others, depth, count)
                _finish(p, sums, others, (n, count), panel * PANEL)
                _finish(p, sums + _SIDE, others + _SIDE, (n, count), panel * PANEL + HALF)


def tiles_body(soft: int):
    """Make the body that multiplies with AMX. soft: 1 to emulate AMX."""

    def body(row):
        p = i64(row, (NUM_PARAMETERS + 1,))
        num, most, per = p[8], p[11], p[12]
        panels, blocks = (p[10] + PANEL - 1) // PANEL, (num + most - 1) // most
        groups, high = (panels + per - 1) // per, (most + 31) // 32 * 32
        state = np.empty(amx.STATE + 64, np.uint8)
        sums = np.empty((2 * high, PANEL), np.int32)
        amx.begin((state.ctypes.data + 63) & -64, soft)
        while True:
            item = next_item(row)
            if item >= groups * blocks:
                break
            block = item // groups
            first, start = block * most, (item - block * groups) * per
            rows, end = (first, min(most, num - first)), min(start + per, panels)
            for panel in range(start, end):
                # Requested in each round: Numba frees an array that is not named any more.
                own, totals = (state.ctypes.data + 63) & -64, sums.ctypes.data
                others, has_next = totals + high * _LINE, panel + 1 < end
                if p[15]:
                    place = panel + p[15], has_next, False
                    _panel_tiles(p, own, rows, (others, others), place, soft)
                place = panel, has_next, True
                _panel_tiles(p, own, rows, (totals, others), place, soft)
        amx.end(state.ctypes.data, soft)

    return body


@njit(inline="always")
def _panel_tiles(p, own, rows, sums, place, soft):
    """Multiply rows by one panel, with AMX. rows: (first, number); sums: (address for the sums,
    address of the sums of the up outputs); place: (index of the panel, whether to prefetch the next
    one, whether to convert the sums to outputs)."""
    (first, count), (totals, others), (panel, has_next, converts) = rows, sums, place
    steps, lda = p[9] // (STEP // DEEP), p[9] * DEEP
    size, a = steps * _PIECE, p[1] + first * lda
    ahead = p[2] + (panel + 1) * size
    end = ahead + (size if has_next else 0)
    # The first rows read the panel from memory in order.
    lead = 16 if count <= _LEAD else 0
    for begin in range(0, steps, _PASS):
        span = begin, min(_PASS, steps - begin)
        b = p[2] + panel * size + begin * _PIECE
        ends, left = converts and begin + _PASS >= steps, a + begin * STEP
        if lead:
            _wide_tiles(own, (left, lda), b, totals, span, soft)
        if lead and ends:
            for side in range(2):
                start, shift = panel * PANEL + side * HALF, side * _SIDE
                _finish(p, totals + shift, others + shift, (first, min(count, 16)), start)
        r = lead
        while r < count:
            num, source = min(32, count - r), (left + r * lda, lda)
            for side in range(2):
                shift = r * _LINE + side * _SIDE
                c, wanted, half = totals + shift, ahead if ahead < end else 0, b + side * _SIDE
                if num <= 16:
                    _two_tiles(own, source, half, c, span, wanted, soft)
                    ahead += span[1] * (_AHEAD_OF_TWO * LINE)
                else:
                    _four_tiles(own, source, half, c, span, wanted, soft)
                    ahead += span[1] * (_AHEAD_OF_FOUR * LINE)
            if ends:
                for side in range(2):
                    start, shift = panel * PANEL + side * HALF, r * _LINE + side * _SIDE
                    _finish(p, totals + shift, others + shift, (first + r, num), start)
            r += 32


@njit(inline="always")
def _wide_tiles(own, left, b, c, span, soft):
    """Multiply 16 rows by one panel, with AMX: c [16, 64] += left @ b. If the span starts at step
    0, c is overwritten. left: (address, row stride); span: (first step of 64 inputs, number of
    steps); soft: emulate AMX, in the tiles `own`."""
    (a, lda), (begin, num) = left, span
    if begin:
        amx.load(own, 0, c, _LINE, soft)
        amx.load(own, 1, c + 64, _LINE, soft)
        amx.load(own, 2, c + 128, _LINE, soft)
        amx.load(own, 3, c + 192, _LINE, soft)
    else:
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
        amx.zero(own, 2, soft)
        amx.zero(own, 3, soft)
    for k in range(num):
        piece = b + k * _PIECE
        amx.load(own, 4, a + k * STEP, lda, soft)
        amx.load(own, 5, piece, _LINE, soft)
        amx.dot_unsigned_signed(own, 0, 4, 5, soft)
        amx.load(own, 6, piece + 64, _LINE, soft)
        amx.dot_unsigned_signed(own, 1, 4, 6, soft)
        amx.load(own, 7, piece + 128, _LINE, soft)
        amx.dot_unsigned_signed(own, 2, 4, 7, soft)
        amx.load(own, 5, piece + 192, _LINE, soft)
        amx.dot_unsigned_signed(own, 3, 4, 5, soft)
    amx.store(own, 0, c, _LINE, soft)
    amx.store(own, 1, c + 64, _LINE, soft)
    amx.store(own, 2, c + 128, _LINE, soft)
    amx.store(own, 3, c + 192, _LINE, soft)


@njit(inline="always")
def _two_tiles(own, left, b, c, span, ahead, soft):
    """Multiply 16 rows by half a panel like `_wide_tiles`; c: [16, 32]. ahead: address to prefetch,
    or 0."""
    (a, lda), (begin, num) = left, span
    if begin:
        amx.load(own, 0, c, _LINE, soft)
        amx.load(own, 1, c + 64, _LINE, soft)
    else:
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
    for k in range(num):
        if ahead:
            prefetch(ahead + k * (_AHEAD_OF_TWO * LINE), _AHEAD_OF_TWO, LANES, 4)
        amx.load(own, 4, a + k * STEP, lda, soft)
        amx.load(own, 6, b + k * _PIECE, _LINE, soft)
        amx.dot_unsigned_signed(own, 0, 4, 6, soft)
        amx.load(own, 7, b + k * _PIECE + 64, _LINE, soft)
        amx.dot_unsigned_signed(own, 1, 4, 7, soft)
    amx.store(own, 0, c, _LINE, soft)
    amx.store(own, 1, c + 64, _LINE, soft)


@njit(inline="always")
def _four_tiles(own, left, b, c, span, ahead, soft):
    """Multiply 32 rows by half a panel like `_two_tiles`; c: [32, 32]. Rows bypass the L1 cache."""
    (a, lda), (begin, num) = left, span
    below, low = a + 16 * lda, c + 16 * _LINE
    if begin:
        amx.load_once(own, 0, c, _LINE, soft)
        amx.load_once(own, 1, c + 64, _LINE, soft)
        amx.load_once(own, 2, low, _LINE, soft)
        amx.load_once(own, 3, low + 64, _LINE, soft)
    else:
        amx.zero(own, 0, soft)
        amx.zero(own, 1, soft)
        amx.zero(own, 2, soft)
        amx.zero(own, 3, soft)
    for k in range(num):
        if ahead:
            prefetch(ahead + k * (_AHEAD_OF_FOUR * LINE), _AHEAD_OF_FOUR, LANES, 4)
        amx.load_once(own, 4, a + k * STEP, lda, soft)
        amx.load(own, 6, b + k * _PIECE, _LINE, soft)
        amx.load(own, 7, b + k * _PIECE + 64, _LINE, soft)
        amx.dot_unsigned_signed(own, 0, 4, 6, soft)
        amx.load_once(own, 5, below + k * STEP, lda, soft)
        amx.dot_unsigned_signed(own, 1, 4, 7, soft)
        amx.dot_unsigned_signed(own, 2, 5, 6, soft)
        amx.dot_unsigned_signed(own, 3, 5, 7, soft)
    amx.store(own, 0, c, _LINE, soft)
    amx.store(own, 1, c + 64, _LINE, soft)
    amx.store(own, 2, low, _LINE, soft)
    amx.store(own, 3, low + 64, _LINE, soft)
