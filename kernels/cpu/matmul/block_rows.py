"""What kernels of packed weights share: the table of a weight, quantised rows, decoded scales."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from kernels.cpu.block_inputs import (
    RECORD_SHARES,
    TILE_ROWS,
    quantize_for_tiles,
    quantize_unit,
    record_bytes,
)
from kernels.cpu.block_vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    Form,
    decode_scales,
    row_bytes,
)
from kernels.cpu.matmul.blocks import PANEL, UNIT, BlockWeight
from kernels.cpu.native import EXACT, Kernel, i32, i64, next_item, u8, u16

# Indices of the table of a weight, int64, of which compiled code gets the address.
VALUES, SCALES, OFFSETS, OUTER_SCALES, OUTER_OFFSETS, CODEBOOK, ORDER = range(7)  # addresses or 0
UNITS, GROUPS, SUPERS = 7, 8, 9  # of a panel
SCALE_KIND, OFFSET_KIND, ZERO, HALVES, NUM_IN = 10, 11, 12, 13, 14
SHIFT, COPIES, PER_SUPER = 15, 16, 17
"""unit >> shift is the group of a unit, in decoded scales that repeat each group `copies` times;
`per_super` groups have one outer scale."""
BITS = 18
SCALE_BYTES, OFFSET_BYTES = 19, 20  # of a panel
OUTER_SHIFT = 21  # unit >> outer_shift is the outer scale of a unit
IS_DIRECT = 22  # 1 if vector code may read scales as they are stored
TABLE = 23

# Parameters of a function that multiplies by one panel: the rows' address, bytes and number; the
# panel's values, decoded scales and offsets; the sums; units, shift, codebook and zero point as in
# the table. For tiles, the bytes are those of 16 rows.
JOB_ROWS, JOB_SIZE, JOB_COUNT, JOB_VALUES, JOB_SCALES, JOB_OFFSETS, JOB_OUT = range(7)
JOB_UNITS, JOB_SHIFT, JOB_CODEBOOK, JOB_ZERO = range(7, 11)
JOB_OUTER_SCALES, JOB_OUTER_OFFSETS, JOB_OUTER_SHIFT = range(11, 14)
JOB = 14

_KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
}
_ONE_GROUP = 62  # a shift after which every unit is in group 0

_TABLES: WeakKeyDictionary[BlockWeight, NDArray[np.int64]] = WeakKeyDictionary()


def form_of(weight: BlockWeight) -> Form:
    """Returns the properties of a weight for which kernels are compiled."""
    has = weight.offsets is not None, weight.codebook is not None
    return Form(weight.bits, weight.halves, *has)


def direct_form(weight: BlockWeight) -> Form:
    """Returns the form of a weight for code that reads scales as they are stored, if that is
    possible, else `form_of`."""
    form = form_of(weight)
    if not _can_be_direct(weight):
        return form
    offsets = FLOAT32 if weight.offsets is None else _KINDS[weight.offsets.dtype]
    return form._replace(scales=_KINDS[weight.scales.dtype], offsets=offsets)


def _can_be_direct(weight: BlockWeight) -> bool:
    """True if a shift of a unit's number gives its group, and its outer scale."""
    sizes = (weight.group_size if weight.scales.shape[1] > 1 else UNIT, weight.outer_size)
    return all(size & (size - 1) == 0 for size in sizes)


def table_of(weight: BlockWeight) -> int:
    """Returns the address of the weight's table, which exists as long as the weight."""
    table = _TABLES.get(weight)
    if table is None:
        table = _TABLES[weight] = _made_table(weight)
    return table.ctypes.data


def _made_table(weight: BlockWeight) -> NDArray[np.int64]:
    tensors = (
        weight.values,
        weight.scales,
        weight.offsets,
        weight.outer_scales,
        weight.outer_offsets,
        weight.codebook,
        weight.order,
    )
    table = np.zeros(TABLE, np.int64)
    table[: len(tensors)] = [0 if one is None else one.data_ptr() for one in tensors]
    groups = weight.scales.shape[1]
    table[UNITS], table[GROUPS] = weight.units, groups
    outer = weight.outer_scales if weight.outer_scales is not None else weight.outer_offsets
    table[SUPERS] = 0 if outer is None else outer.shape[1]
    table[PER_SUPER] = 0 if outer is None else weight.outer_size // weight.group_size
    table[SCALE_KIND] = _KINDS[weight.scales.dtype]
    table[OFFSET_KIND] = 0 if weight.offsets is None else _KINDS[weight.offsets.dtype]
    table[BITS] = weight.bits
    table[ZERO], table[HALVES], table[NUM_IN] = weight.zero, weight.halves, weight.num_inputs
    table[SCALE_BYTES] = weight.scales[0].nbytes if groups else 0
    table[OFFSET_BYTES] = 0 if weight.offsets is None else weight.offsets[0].nbytes
    table[OUTER_SHIFT] = (weight.outer_size // UNIT).bit_length() - 1 if weight.outer_size else 0
    table[IS_DIRECT] = _can_be_direct(weight)
    units = max(1, weight.group_size // UNIT)  # of a group
    if groups == 1:
        table[SHIFT], table[COPIES] = _ONE_GROUP, 1
    elif units & (units - 1) == 0:
        table[SHIFT], table[COPIES] = units.bit_length() - 1, 1
    else:
        table[SHIFT], table[COPIES] = 0, units
    return table


@njit(**EXACT)
def decoded_floats(t):
    """Returns the number of float32 that the decoded scales of a panel take."""
    return t[GROUPS] * t[COPIES] * PANEL


@njit(**EXACT)
def decode_panel(t, panel, is_offsets, target):
    """Decode the scales, or offsets, of a panel to float32 [groups, 32] at the address `target`.
    t: the weight's table."""
    kind = t[OFFSET_KIND] if is_offsets else t[SCALE_KIND]
    inner = t[OFFSETS] if is_offsets else t[SCALES]
    outer = t[OUTER_OFFSETS] if is_offsets else t[OUTER_SCALES]
    if kind == FLOAT16:
        _decode(t, inner, outer, panel, target, FLOAT16, 0)
    elif kind == INT8:
        _decode(t, inner, outer, panel, target, INT8, 1)
    elif kind == BFLOAT16:
        _decode(t, inner, outer, panel, target, BFLOAT16, 0)
    else:
        _decode(t, inner, outer, panel, target, FLOAT32, 0)


@njit(inline="always")
def _decode(t, inner, outer, panel, target, kind, has_outer):
    """Decode the scales of a panel. kind, has_outer: literals of `decode_scales`."""
    groups, copies = t[GROUPS], t[COPIES]
    size = (4, 2, 2, 1)[kind] * PANEL
    inner += panel * groups * size
    outer += panel * t[SUPERS] * (PANEL * 4)
    per, left = t[PER_SUPER], t[PER_SUPER]
    for group in range(groups):
        if has_outer:
            if left == 0:
                outer, left = outer + PANEL * 4, per
            left -= 1
        for copy in range(copies):
            place = target + (group * copies + copy) * (PANEL * 4)
            decode_scales(inner + group * size, outer, place, kind, has_outer)


@njit(inline="always")
def quantize_row(source, cell, num_in, target, t, halves):
    """Quantise a row of `num_in` inputs of `cell` bytes at `source` to the layout of
    ``kernels.cpu.block_vectors`` at `target`. t: the weight's table; halves: a literal."""
    units, whole = t[UNITS], num_in // UNIT
    if cell == 4:
        for unit in range(whole):
            quantize_unit(source + unit * UNIT * 4, target, units, unit, t[ZERO], halves, 4)
    else:
        for unit in range(whole):
            quantize_unit(source + unit * UNIT * 2, target, units, unit, t[ZERO], halves, 2)
    if whole < units:
        last = np.zeros(UNIT * 4, np.uint8)
        bytes_ = u8(source + whole * UNIT * cell, ((num_in - whole * UNIT) * cell,))
        for i in range(bytes_.shape[0]):
            last[i] = bytes_[i]
        if cell == 4:
            quantize_unit(last.ctypes.data, target, units, whole, t[ZERO], halves, 4)
        else:
            quantize_unit(last.ctypes.data, target, units, whole, t[ZERO], halves, 2)


@njit(**EXACT)
def _in_order(source, cell, order, target):
    """Copy the inputs of a row to `target` in the order of the weight's columns."""
    if cell == 4:
        words, moved = i32(source, order.shape), i32(target, order.shape)
        for i in range(order.shape[0]):
            moved[i] = words[order[i]]
    else:
        halves, moved_halves = u16(source, order.shape), u16(target, order.shape)
        for i in range(order.shape[0]):
            moved_halves[i] = halves[order[i]]


def _quantize_body(row):
    # Parameters: 1 rows of inputs, 2 table, 3 quantised rows, 4 number of rows, 5 bytes of an
    # input, 6 bytes of a quantised row.
    p = i64(row, (7,))
    t = i64(p[2], (TABLE,))
    num, cell, num_in = p[4], p[5], t[NUM_IN]
    ordered = np.empty(num_in * 4 if t[ORDER] else 1, np.uint8)
    while True:
        n = next_item(row)
        if n >= num:
            break
        source = p[1] + n * num_in * cell
        if t[ORDER]:
            _in_order(source, cell, i32(t[ORDER], (num_in,)), ordered.ctypes.data)
            source = ordered.ctypes.data
        if t[HALVES] == 1:
            quantize_row(source, cell, num_in, p[3] + n * p[6], t, 1)
        else:
            quantize_row(source, cell, num_in, p[3] + n * p[6], t, 2)


QUANTIZE = Kernel(_quantize_body, exact=True)


def quantized_rows(x: torch.Tensor, weight: BlockWeight, threads: int) -> torch.Tensor:
    """Quantise x [M, K] (contiguous, float32 or bfloat16) for a product with a weight: [M, bytes]
    uint8 in the layout of ``kernels.cpu.block_vectors``, inputs in the order of its columns."""
    rows = x.new_empty((len(x), row_bytes(weight.units, weight.halves)), dtype=torch.uint8)
    QUANTIZE.run(
        threads,
        x.data_ptr(),
        table_of(weight),
        rows.data_ptr(),
        len(x),
        x.element_size(),
        rows.shape[1],
    )
    return rows


def tile_bytes(weight: BlockWeight) -> int:
    """Returns the bytes of 16 quantised rows for tiles."""
    return (weight.units + 1) // 2 * 2 * record_bytes(weight.halves)


@njit(inline="always")
def _quantize_tile_row(source, cell, num_in, target, shape, halves):
    """Quantise a row of `num_in` inputs of `cell` bytes at `source` for tiles, as row shape[0] of
    16 rows of shape[1] records at `target`. halves: a literal."""
    (row, records), whole = shape, num_in // UNIT
    size = RECORD_SHARES + halves * (TILE_ROWS * 4)
    if cell == 4:
        for unit in range(whole):
            quantize_for_tiles(source + unit * UNIT * 4, target + unit * size, row, halves, 4)
    else:
        for unit in range(whole):
            quantize_for_tiles(source + unit * UNIT * 2, target + unit * size, row, halves, 2)
    last = np.zeros(UNIT * 4, np.uint8)
    bytes_ = u8(source + whole * UNIT * cell, ((num_in - whole * UNIT) * cell,))
    for i in range(bytes_.shape[0]):
        last[i] = bytes_[i]
    for unit in range(whole, records):
        if cell == 4:
            quantize_for_tiles(last.ctypes.data, target + unit * size, row, halves, 4)
        else:
            quantize_for_tiles(last.ctypes.data, target + unit * size, row, halves, 2)
        last[:] = 0


def _quantize_tiles_body(row):
    # Parameters: 1 rows of inputs, 2 table, 3 quantised rows, 4 number of rows, 5 bytes of an
    # input, 6 bytes of 16 quantised rows.
    p = i64(row, (7,))
    t = i64(p[2], (TABLE,))
    num, cell, num_in = p[4], p[5], t[NUM_IN]
    ordered = np.empty(num_in * 4 if t[ORDER] else 1, np.uint8)
    records = (t[UNITS] + 1) // 2 * 2
    while True:
        block = next_item(row)
        if block * TILE_ROWS >= num:
            break
        target = p[3] + block * p[6]
        for i in range(TILE_ROWS):
            n = block * TILE_ROWS + i
            # Rows that are missing have no inputs.
            source, count = p[1] + n * num_in * cell, num_in if n < num else 0
            if t[ORDER] and count:
                _in_order(source, cell, i32(t[ORDER], (num_in,)), ordered.ctypes.data)
                source = ordered.ctypes.data
            if t[HALVES] == 1:
                _quantize_tile_row(source, cell, count, target, (i, records), 1)
            else:
                _quantize_tile_row(source, cell, count, target, (i, records), 2)


QUANTIZE_TILES = Kernel(_quantize_tiles_body, exact=True)


def quantized_tiles(x: torch.Tensor, weight: BlockWeight, threads: int) -> torch.Tensor:
    """Quantise x [M, K] like `quantized_rows` for tiles: [blocks of 16 rows, bytes] uint8."""
    blocks = -(-len(x) // TILE_ROWS)
    rows = x.new_empty((blocks, tile_bytes(weight)), dtype=torch.uint8)
    QUANTIZE_TILES.run(
        threads,
        x.data_ptr(),
        table_of(weight),
        rows.data_ptr(),
        len(x),
        x.element_size(),
        rows.shape[1],
    )
    return rows
