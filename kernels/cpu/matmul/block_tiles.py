"""Products with packed weights of 2 to 8 bits by AMX: 16 quantised rows by 32 outputs at a time.

Tiles multiply whole numbers in bfloat16: quantised inputs, and unpacked weights minus their zero
point. These numbers are exact in bfloat16 and the sums of a group are exact in float32, so results
have the bits of ``kernels.cpu.block_vectors``, and sums need not be converted to be scaled.

Tiles multiply one group of inputs at a time and store its sums, which vector code scales and adds.
Tiles are AHEAD groups ahead, since a product and its stored sums take long. Unpacked weights and
stored sums stay in the L1 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu import amx
from kernels.cpu.block_inputs import RECORD_SCALES, RECORD_SHARES
from kernels.cpu.block_vectors import (
    LANES,
    PLAIN,
    VNNI_512,
    Form,
    Quads,
    load,
    same,
    store,
)
from kernels.cpu.matmul.block_rows import (
    JOB,
    JOB_CODEBOOK,
    JOB_COUNT,
    JOB_OFFSETS,
    JOB_OUT,
    JOB_ROWS,
    JOB_SCALES,
    JOB_SHIFT,
    JOB_SIZE,
    JOB_UNITS,
    JOB_VALUES,
    JOB_ZERO,
)
from kernels.cpu.matmul.blocks import LINE, PANEL, QUADS
from kernels.cpu.native import EXACT, bits_of_float, f32, i64, u8, u16
from kernels.cpu.vectors import fma, splat

ROWS = amx.ROWS
WIDTH = 16  # outputs of a tile
AHEAD = 2  # groups that are scaled at a time, and by which tiles precede
PASS = 8  # units that are unpacked at a time: their values stay in the L1 cache
_HIGH = 8  # rows that are scaled at a time
_TILE = ROWS * LINE  # bytes of a tile, and of the values of a unit of 16 rows or outputs
_SUMS = ROWS * PANEL * 4  # bytes of the sums of a group
_CODES = 64  # entries of the table of values; lookups read the first 32 for up to 5 bits
_FLOAT, _FLOATS = ir.FloatType(), ir.VectorType(ir.FloatType(), WIDTH)
_I16, _I32, _I64 = (ir.IntType(size) for size in (16, 32, 64))


class _Step(NamedTuple):
    """Emits the product of one group of 16 rows with 32 outputs, and scales sums of 8 rows of AHEAD
    earlier groups. Addresses are LLVM values."""

    builder: ir.IRBuilder
    form: Form
    tiles: amx.Emitter
    place: tuple[Any, Any, Any]  # addresses of the rows' and weights' group, and for older sums
    sums: Any  # address of the sums to scale
    scales: tuple[Any, ...]  # addresses of the weights' scales of each group
    offsets: tuple[Any, ...]  # addresses of the weights' offsets of each group
    turned: tuple[Any, ...]  # addresses of the rows' scales of each group
    shares: tuple[Any, ...]  # addresses of the rows' shares of each group
    out: Any  # address of the results [8, 32]

    def emit(self) -> None:
        places = [self._at(self.out, part * LINE) for part in range(2 * _HIGH)]
        totals = [load(self.builder, place, _FLOATS) for place in places]
        for group in range(AHEAD):
            # Older sums are stored first, because a product takes long.
            _multiply_side(self.builder, self.tiles, self.place, group)
            totals = self._scale(group, totals)
        for place, total in zip(places, totals, strict=True):
            store(self.builder, total, place)

    def _scale(self, group: int, totals: list[Any]) -> list[Any]:
        """Emit the totals after the sums of a group are added, scaled."""
        builder = self.builder
        weights = self._sides(self.scales[group])
        offsets = self._sides(self.offsets[group]) if self.form.has_offsets else None
        added = []
        for row in range(_HIGH):
            scale = self._every(self.turned[group], row)
            share = self._every(self.shares[group], row) if offsets else None
            for side in range(2):
                part = 2 * row + side
                at = self._at(self.sums, group * _SUMS + part * LINE)
                factor = builder.fmul(weights[side], scale)
                value = fma(builder, load(builder, at, _FLOATS), factor, totals[part])
                if offsets:
                    value = fma(builder, offsets[side], share, value)
                added.append(value)
        return added

    def _sides(self, address: Any) -> list[Any]:
        """Emit the loads of 32 floats as two vectors."""
        return [load(self.builder, self._at(address, side * LINE), _FLOATS) for side in range(2)]

    def _every(self, address: Any, row: int) -> Any:
        """Emit a vector whose elements all are the row's float at an address."""
        return splat(self.builder, load(self.builder, self._at(address, row * 4), _FLOAT), WIDTH)

    def _at(self, address: Any, size: int) -> Any:
        return self.builder.add(address, _I64(size))


def _multiply_side(builder: ir.IRBuilder, tiles: amx.Emitter, place: Any, side: int) -> None:
    """Emit the store of a side's older sums (if their address is not None) and the product of 16
    rows with its 16 outputs. place: as in `_Step`."""
    left, right, sums = place
    if side == 0:
        tiles.load_once(4, left, _I64(LINE))
    tiles.load(6 + side, builder.add(right, _I64(side * _TILE)), _I64(LINE))
    if sums is not None:
        tiles.store(side, builder.add(sums, _I64(side * LINE)), _I64(PANEL * 4))
    tiles.zero(side)
    tiles.dot(side, 4, 6 + side)


def _parts(builder: ir.IRBuilder, value: Any) -> tuple[Any, ...]:
    return tuple(builder.extract_value(value, i) for i in range(value.type.count))


_PAIR, _TRIPLE = (types.UniTuple(types.intp, count) for count in (2, 3))


@intrinsic(prefer_literal=True)
def _multiply(typing_context, own, place, is_first, soft):
    """Multiply a group of 16 rows by 32 outputs. place: addresses of rows, weights and sums, to
    which the sums of the last such group are stored; own: the thread's tiles; is_first (1 if there
    are none), soft: literals."""
    literals = (is_first, soft)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    first, is_soft = (bool(one.literal_value) for one in literals)

    def build(context, builder, signature, args):
        left, right, sums = _parts(builder, args[1])
        tiles = amx.Emitter(context, builder, args[0], is_soft)
        for side in range(2):
            _multiply_side(builder, tiles, (left, right, None if first else sums), side)
        return context.get_dummy_value()

    return types.void(types.intp, _TRIPLE, *literals), build


@intrinsic(prefer_literal=True)
def _multiply_and_scale(  # noqa: PLR0913
    typing_context, own, place, sums, scales, offsets, turned, shares, out, form, soft
):
    """Multiply a group as `_multiply` does, and add scaled sums of AHEAD older groups to 8 rows of
    results. Arguments: as in `_Step`; form (a code of Form), soft: literals."""
    literals = (form, soft)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    code, is_soft = (one.literal_value for one in literals)

    def build(context, builder, signature, args):
        place, scales, offsets, turned, shares = (_parts(builder, args[i]) for i in (1, 3, 4, 5, 6))
        tiles = amx.Emitter(context, builder, args[0], bool(is_soft))
        form = Form.of(code)
        _Step(builder, form, tiles, place, args[2], scales, offsets, turned, shares, args[7]).emit()
        return context.get_dummy_value()

    kinds = (types.intp, _TRIPLE, types.intp, *[_PAIR] * 4, types.intp)
    return types.void(*kinds, *literals), build


@intrinsic(prefer_literal=True)
def _unpack_unit(typing_context, source, target, zero, codebook, table, form, way):  # noqa: PLR0913
    """Unpack a unit of 32 outputs to pairs of bfloat16, minus `zero`: those of the first 16 outputs
    at `target`, the others' at target + _TILE. Of a quad, inputs 0 and 2 are a pair, and inputs 1
    and 3. table: address of the bfloat16 of each value; form (a code of Form), way: literals."""
    literals = (form, way)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    code, how = (one.literal_value for one in literals)

    def build(context, builder, signature, args):
        source, target, zero, codebook, table = args[:5]
        form, lanes = Form.of(code), LANES[how]
        find = None
        if lanes == WIDTH and form.bits < 8:
            find = _Lookup.of(builder, table, form.bits)
        codes = None
        if form.has_codebook and find is None:
            codes = load(builder, codebook, ir.VectorType(_I32, 4))
        stored = form if find is None else form._replace(has_codebook=False)
        quads = Quads(builder, stored, how, source, codes)
        for quad in range(QUADS):
            for column in range(0, PANEL, lanes):
                bytes_ = quads.load(quad, column)
                side, rest = divmod(column, WIDTH)
                at = side * _TILE + quad * 2 * LINE + rest * 4
                for pair in range(2):
                    if find is None:
                        value = _converted_pair(builder, bytes_, pair, zero)
                    else:
                        value = find.pair(bytes_, pair)
                    store(builder, value, builder.add(target, _I64(at + pair * LINE)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5, *literals), build


def _converted_pair(builder: ir.IRBuilder, bytes_: Any, pair: int, zero: Any) -> Any:
    """Emit the bfloat16 of inputs `pair` and pair + 2 of quads, minus zero, as 32 bits."""
    words = bytes_.type
    halves = []
    for byte in (pair, pair + 2):
        moved = builder.lshr(bytes_, same(words, 8 * byte)) if byte else bytes_
        value = builder.and_(moved, same(words, 255))
        value = builder.sub(value, splat(builder, builder.trunc(zero, _I32), words.count))
        value = builder.sitofp(value, ir.VectorType(_FLOAT, words.count))
        halves.append(builder.bitcast(value, words))
    low = builder.lshr(halves[0], same(words, 16))
    return builder.or_(low, builder.and_(halves[1], same(words, 0xFFFF0000)))


class _Lookup(NamedTuple):
    """Emits lookups in a table of the bfloat16 of each value."""

    builder: ir.IRBuilder
    parts: list[Any]  # the table, 32 entries in a vector

    @classmethod
    def of(cls, builder: ir.IRBuilder, address: Any, bits: int) -> _Lookup:
        """Returns the lookups for values of up to 6 bits in the table at an address."""
        kind = ir.VectorType(_I16, 32)
        parts = [
            load(builder, builder.add(address, _I64(first * 2)), kind)
            for first in range(0, 1 << max(bits, 5), 32)
        ]
        return cls(builder, parts)

    def pair(self, bytes_: Any, pair: int) -> Any:
        """Emit the entries of bytes `pair` and pair + 2 of each 32 bits."""
        builder, kind = self.builder, self.parts[0].type
        index = builder.bitcast(bytes_, kind)
        if pair:
            index = builder.lshr(index, same(kind, 8))
        # An instruction ignores the upper bits of an index.
        args = (
            (self.parts[0], index)
            if len(self.parts) == 1
            else (self.parts[0], index, self.parts[1])
        )
        name = "permvar" if len(self.parts) == 1 else "vpermi2var"
        function = f"llvm.x86.avx512.{name}.hi.512"
        found = builder.module.globals.get(function)
        if found is None:
            found = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(args)), function)
        return builder.call(found, args)


@njit(**EXACT)
def _fill_table(table, zero, codebook, bits):
    """Store the bfloat16 of each value of up to 6 bits. codebook: its address, or 0."""
    values, codes = u16(table, (_CODES,)), u8(codebook, (16,))
    for i in range(_CODES):
        value = i & ((1 << bits) - 1)
        number = np.float32(np.int64(codes[value & 15] if codebook else value) - zero)
        values[i] = np.uint16((bits_of_float(number) >> 16) & 0xFFFF)


def tile_panel_body(form: Form, soft: int) -> Callable[[int], None]:
    """Make the function that multiplies quantised rows by one panel. It reads and writes whole
    blocks of 16 rows. soft: 1 to emulate AMX."""
    code, halves, bits, has_zero = form.code, form.halves, form.bits, int(form.has_zero)
    unit_bytes = bits * 2 * LINE
    way = PLAIN if soft else VNNI_512
    depth = LINE // halves

    def body(row):
        job = i64(row, (JOB,))
        units, blocks = job[JOB_UNITS], (job[JOB_COUNT] + ROWS - 1) // ROWS
        state = np.empty(amx.STATE + 64, np.uint8)
        scratch = np.empty(PASS * 2 * _TILE + 2 * AHEAD * _SUMS + _CODES * 2 + 64, np.uint8)
        own, values = (state.ctypes.data + 63) & -64, (scratch.ctypes.data + 63) & -64
        ring = values + PASS * 2 * _TILE
        table = ring + 2 * AHEAD * _SUMS
        zero, codebook = job[JOB_ZERO] * has_zero, job[JOB_CODEBOOK]
        _fill_table(table, zero, codebook, bits)
        out = f32(job[JOB_OUT], (blocks * ROWS * PANEL,))
        for i in range(out.shape[0]):
            out[i] = 0.0
        amx.begin_deep(own, depth, soft)
        for first in range(0, units, PASS):
            num = min(PASS, units - first)
            for unit in range(num):
                source = job[JOB_VALUES] + (first + unit) * unit_bytes
                _unpack_unit(source, values + unit * 2 * _TILE, zero, codebook, table, code, way)
            if num * halves % AHEAD:
                padding = i64(values + num * 2 * _TILE, (2 * _TILE // 8,))
                for i in range(padding.shape[0]):
                    padding[i] = 0
            _add_pass(job, own, (values, ring), (first, num, blocks), halves, code, soft)
        amx.end(own, soft)
        # Numba frees an array that is not named any more.
        state[0] = scratch[0] = 0

    return body


@njit(inline="always")
def _add_pass(job, own, scratch, span, halves, code, soft):
    """Add the product of blocks of 16 rows with a pass of units to the results. scratch: addresses
    of the unpacked weights and of the ring of sums; span: (first unit, number of units,
    number of blocks)."""
    (values, ring), (first, num, blocks) = scratch, span
    shift, size, record = job[JOB_SHIFT], job[JOB_SIZE], RECORD_SHARES + halves * (ROWS * 4)
    total = (num * halves + AHEAD - 1) // AHEAD * AHEAD
    last, start = job[JOB_UNITS] * halves - 1, first * halves
    rows = job[JOB_ROWS] + first * record
    place = (rows, values, size, record)
    at = (0, 0)  # block and group that are multiplied next
    _multiply(own, _place(place, at, ring, halves), 1, soft)
    at = _after(at, total, blocks)
    for slot in range(AHEAD):
        _multiply(own, _place(place, at, ring + slot * _SUMS, halves), 0, soft)
        at = _after(at, total, blocks)
    side = 0  # of the ring, whose sums are scaled
    for block in range(blocks):
        for group in range(0, total, AHEAD):
            one, two = start + group, min(start + group + 1, last)
            one, two = (one >> shift) * (PANEL * 4), (two >> shift) * (PANEL * 4)
            scales = job[JOB_SCALES] + one, job[JOB_SCALES] + two
            offsets = job[JOB_OFFSETS] + one, job[JOB_OFFSETS] + two
            sums, other = ring + side * (AHEAD * _SUMS), ring + (1 - side) * (AHEAD * _SUMS)
            one = rows + block * size + group // halves * record
            two = one if halves == 2 else one + record
            shares = one + RECORD_SHARES, two + RECORD_SHARES + (halves - 1) * (ROWS * 4)
            for half in range(2):
                high = half * (_HIGH * 4)
                _multiply_and_scale(
                    own,
                    _place(place, at, other + half * _SUMS, halves),
                    sums + half * (_HIGH * PANEL * 4),
                    scales,
                    offsets,
                    (one + RECORD_SCALES + high, two + RECORD_SCALES + high),
                    (shares[0] + high, shares[1] + high),
                    job[JOB_OUT] + (block * ROWS + half * _HIGH) * (PANEL * 4),
                    code,
                    soft,
                )
                at = _after(at, total, blocks)
            side = 1 - side


@njit(**EXACT)
def _after(at, total, blocks):
    """Returns the block and group that follow; after the last, the first."""
    block, group = at
    group += 1
    if group < total:
        return block, group
    return (block + 1 if block + 1 < blocks else 0), 0


@njit(inline="always")
def _place(place, at, sums, halves):
    """Returns the addresses of rows, weights and sums of a product."""
    (rows, values, size, record), (block, group) = place, at
    unit, half = group // halves, group % halves
    left = rows + block * size + unit * record + half * (LINE // 2)
    return left, values + unit * (2 * _TILE) + half * (_TILE // 2), sums
