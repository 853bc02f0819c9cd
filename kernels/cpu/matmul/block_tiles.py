"""Products with packed weights of 2 to 8 bits by AMX: 16 quantised rows by 16 outputs at a time.

Weights of some units are unpacked to bytes, from which the zero point is subtracted. Tiles multiply
one group of inputs of a unit at a time, so that each sum can be scaled. Sums are stored by the
tiles' unit and scaled by the vector unit, which works on a group while tiles multiply the next one.
The bits are those of ``kernels.cpu.block_vectors``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu import amx
from kernels.cpu.block_vectors import (
    LANES,
    PLAIN,
    SCALES_AT,
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
    JOB_TURNED,
    JOB_UNITS,
    JOB_VALUES,
    JOB_ZERO,
)
from kernels.cpu.matmul.blocks import LINE, PANEL, QUADS, UNIT
from kernels.cpu.native import EXACT, f32, i64
from kernels.cpu.vectors import fma, splat

ROWS = amx.ROWS
WIDTH = 16  # outputs of a tile
PASS = 32  # units that are unpacked at a time: their bytes stay in the L1 cache
LEAD = 4  # groups by which tiles precede the vector unit, which waits for stored sums
_UNIT_BYTES = QUADS * LINE  # of 16 unpacked outputs
_SIDE = PASS * _UNIT_BYTES  # bytes of 16 outputs in a pass
_SUMS = ROWS * WIDTH * 4  # bytes of the sums of a group
_FLOAT, _WORDS = ir.FloatType(), ir.VectorType(ir.IntType(32), WIDTH)
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_I8, _I64 = ir.IntType(8), ir.IntType(64)


@njit(**EXACT)
def turned_floats(units, halves):
    """Returns the float32 of `turn_rows` per row: a scale for each unit and a share for each
    group."""
    return units * (1 + halves)


@njit(**EXACT)
def turn_rows(rows, size, count, shape, target):
    """Copy the scales and shares of quantised rows to `target`: for each block of 16 rows, scales
    [units, 16], then shares [groups, 16]. rows: address of the first row; size: bytes of a row;
    shape: (units, groups of a unit)."""
    units, halves = shape
    groups = units * halves
    per = (units + groups) * ROWS
    for first in range(0, count, ROWS):
        out = f32(target + first // ROWS * per * 4, (units + groups, ROWS))
        for row in range(min(ROWS, count - first)):
            start = rows + (first + row) * size
            scales = f32(start + units * SCALES_AT, (units,))
            shares = f32(start + units * (SCALES_AT + 4 + 4 * halves), (groups,))
            for unit in range(units):
                out[unit, row] = scales[unit]
            for group in range(groups):
                out[units + group, row] = shares[group]


class _Sums(NamedTuple):
    """Emits the product of 16 rows with 16 outputs over the units of a pass."""

    builder: ir.IRBuilder
    form: Form
    tiles: amx.Emitter
    a: tuple[Any, Any]  # address of the first row's integers of the pass, bytes of a row
    b: Any  # address of the unpacked weights of the 16 outputs
    scales: tuple[Any, Any]  # addresses of the decoded scales and offsets of the 16 outputs
    turned: tuple[Any, Any]  # addresses of the rows' scales and shares of the pass
    units: tuple[Any, Any]  # first unit of the pass, number of units
    shift: Any  # unit >> shift is the number of its group
    place: tuple[Any, Any]  # addresses of the results [16, 32] and of memory for LEAD sums

    def emit(self) -> None:
        builder, first = self.builder, self.units[0]
        is_fresh = builder.icmp_signed("==", first, _I64(0))
        places = [builder.add(self.place[0], _I64(row * PANEL * 4)) for row in range(ROWS)]
        sums = [
            builder.select(is_fresh, same(_FLOATS, 0.0), load(builder, place, _FLOATS))
            for place in places
        ]
        total = builder.mul(self.units[1], _I64(self.form.halves))
        rest = builder.sub(total, _I64(LEAD))
        is_short = builder.icmp_signed("<", rest, _I64(0))
        rest = builder.select(is_short, _I64(0), rest)
        lead = builder.select(is_short, total, _I64(LEAD))

        def begin(group, sums):
            self._multiply(group)
            self._keep(group)
            return sums

        def both(group, sums):
            # First the sums that are ready; the vector unit works while tiles multiply.
            self._keep(builder.add(group, _I64(LEAD - 1)))
            self._multiply(builder.add(group, _I64(LEAD)))
            return self._scale(group, sums)

        before = builder.sub(lead, _I64(1))
        self._loop((_I64(0), before), [], begin)
        self._multiply(before)
        sums = self._loop((_I64(0), rest), sums, both)
        self._keep(builder.sub(total, _I64(1)))
        sums = self._loop((rest, total), sums, self._scale)
        for place, value in zip(places, sums, strict=True):
            store(builder, value, place)

    def _loop(self, span: tuple[Any, Any], sums: list[Any], step: Any) -> list[Any]:
        """Emit ``sums = step(group, sums)`` for the groups from span[0] to span[1]; returns the
        last sums."""
        builder = self.builder
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("group", "done"))
        builder.cbranch(builder.icmp_signed("<", *span), loop, done)
        builder.position_at_end(loop)
        group, *inner = (builder.phi(kind) for kind in [_I64] + [_FLOATS] * len(sums))
        added = step(group, inner)
        following = builder.add(group, _I64(1))
        for phi, one, more in zip(
            (group, *inner), (span[0], *sums), (following, *added), strict=True
        ):
            phi.add_incoming(one, before)
            phi.add_incoming(more, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, span[1]), loop, done)
        end = builder.block
        builder.position_at_end(done)
        results = [builder.phi(_FLOATS) for _ in sums]
        for phi, one, more in zip(results, sums, added, strict=True):
            phi.add_incoming(one, before)
            phi.add_incoming(more, end)
        return results

    def _sums_of(self, group: Any) -> Any:
        """Emit the address of the integer sums of a group, in a ring of LEAD groups."""
        slot = self.builder.and_(group, _I64(LEAD - 1))
        return self.builder.add(self.place[1], self.builder.mul(slot, _I64(_SUMS)))

    def _multiply(self, group: Any) -> None:
        """Emit the integer sums of a group of the pass, in tile 0."""
        builder, halves = self.builder, self.form.halves
        a = builder.add(self.a[0], builder.mul(group, _I64(UNIT // halves)))
        b = builder.add(self.b, builder.mul(group, _I64(_UNIT_BYTES // halves)))
        self.tiles.zero(0)
        self.tiles.load(4, a, self.a[1])
        self.tiles.load(6, b, _I64(LINE))
        signs = "signed signed" if self.form.has_zero else "signed unsigned"
        self.tiles.dot_bytes(0, 4, 6, signs)

    def _keep(self, group: Any) -> None:
        """Emit the store of the sums of a group, which are in tile 0."""
        self.tiles.store(0, self._sums_of(group), _I64(WIDTH * 4))

    def _scale(self, group: Any, sums: list[Any]) -> list[Any]:
        """Emit the sums after a group of the pass is added, scaled."""
        builder, form = self.builder, self.form
        unit, number = group, builder.add(self.units[0], group)
        if form.halves == 2:
            unit = builder.lshr(group, _I64(1))
            number = builder.add(builder.shl(self.units[0], _I64(1)), group)
        else:
            number = builder.lshr(number, self.shift)
        at = builder.mul(number, _I64(PANEL * 4))
        weights = load(builder, builder.add(self.scales[0], at), _FLOATS)
        scales = builder.add(self.turned[0], builder.mul(unit, _I64(ROWS * 4)))
        offsets = shares = None
        if form.has_offsets:
            offsets = load(builder, builder.add(self.scales[1], at), _FLOATS)
            shares = builder.add(self.turned[1], builder.mul(group, _I64(ROWS * 4)))
        totals = self._sums_of(group)
        added = []
        for row, total in enumerate(sums):
            words = load(builder, builder.add(totals, _I64(row * WIDTH * 4)), _WORDS)
            factor = builder.fmul(weights, self._every(scales, row))
            value = fma(builder, builder.sitofp(words, _FLOATS), factor, total)
            if offsets is not None:
                value = fma(builder, offsets, self._every(shares, row), value)
            added.append(value)
        return added

    def _every(self, address: Any, row: int) -> Any:
        """Emit a vector whose elements all are the row's float at an address."""
        place = self.builder.add(address, _I64(row * 4))
        return splat(self.builder, load(self.builder, place, _FLOAT), WIDTH)


@intrinsic(prefer_literal=True)
def _add_pass(typing_context, own, left, b, scales, turned, span, place, form, soft):  # noqa: PLR0913
    """Add the product of 16 rows with 16 outputs over a pass of units to the results. own: the
    thread's tiles; left, scales, turned, place: as in `_Sums`; span: (first unit, number of units,
    shift); form (a code of Form), soft: literals."""
    literals = (form, soft)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    code, is_soft = (one.literal_value for one in literals)

    def build(context, builder, signature, args):
        own, left, b, scales, turned, span, place = args[:7]

        def parts(value, count=2):
            return tuple(builder.extract_value(value, i) for i in range(count))

        first, number, shift = parts(span, 3)
        _Sums(
            builder,
            Form.of(code),
            amx.Emitter(context, builder, own, bool(is_soft)),
            parts(left),
            b,
            parts(scales),
            parts(turned),
            (first, number),
            shift,
            parts(place),
        ).emit()
        return context.get_dummy_value()

    pair, triple = (types.UniTuple(types.intp, count) for count in (2, 3))
    kinds = (types.intp, pair, types.intp, pair, pair, triple, pair)
    return types.void(*kinds, *literals), build


@intrinsic(prefer_literal=True)
def _unpack_unit(typing_context, source, target, zero, codebook, form, way):
    """Unpack a unit of 32 outputs to bytes minus `zero`: quads of the first 16 outputs at `target`,
    those of the others at target + _SIDE. form (a code of Form), way: literals."""
    literals = (form, way)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    code, how = (one.literal_value for one in literals)

    def build(context, builder, signature, args):
        source, target, zero, codebook = args[:4]
        form, lanes = Form.of(code), LANES[how]
        codes = None
        if form.has_codebook:
            four = load(builder, codebook, ir.VectorType(ir.IntType(32), 4))
            every = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [i % 4 for i in range(lanes)])
            codes = builder.shuffle_vector(four, four, every)
        less = splat(builder, builder.trunc(zero, _I8), lanes * 4)
        quads = Quads(builder, form, how, source, codes)
        for quad in range(QUADS):
            for column in range(0, PANEL, lanes):
                value = quads.load(quad, column)
                if form.has_zero:
                    bytes_ = builder.bitcast(value, less.type)
                    value = builder.bitcast(builder.sub(bytes_, less), value.type)
                side, rest = divmod(column, WIDTH)
                at = side * _SIDE + quad * LINE + rest * 4
                store(builder, value, builder.add(target, _I64(at)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, *literals), build


def tile_panel_body(form: Form, soft: int) -> Callable[[int], None]:
    """Make the function that multiplies quantised rows by one panel. It reads and writes whole
    blocks of 16 rows. soft: 1 to emulate AMX."""
    code, halves = form.code, form.halves
    bits_bytes = form.bits * 2 * LINE
    way = PLAIN if soft else VNNI_512
    depth = UNIT // halves

    def body(row):
        job = i64(row, (JOB,))
        units, count, size = job[JOB_UNITS], job[JOB_COUNT], job[JOB_SIZE]
        state = np.empty(amx.STATE + 64, np.uint8)
        scratch = np.empty(2 * _SIDE + LEAD * _SUMS + 64, np.uint8)
        own, bytes_ = (state.ctypes.data + 63) & -64, (scratch.ctypes.data + 63) & -64
        sums = bytes_ + 2 * _SIDE
        amx.begin_deep(own, depth, soft)
        for first in range(0, units, PASS):
            num = min(PASS, units - first)
            for unit in range(num):
                source = job[JOB_VALUES] + (first + unit) * bits_bytes
                target = bytes_ + unit * _UNIT_BYTES
                _unpack_unit(source, target, job[JOB_ZERO], job[JOB_CODEBOOK], code, way)
            for side in range(2):
                shift = side * WIDTH * 4
                scales = job[JOB_SCALES] + shift, job[JOB_OFFSETS] + shift
                for r in range(0, count, ROWS):
                    turned = job[JOB_TURNED] + r * units * (1 + halves) * 4
                    shares = turned + (units + first * halves) * ROWS * 4
                    _add_pass(
                        own,
                        (job[JOB_ROWS] + r * size + first * UNIT, size),
                        bytes_ + side * _SIDE,
                        scales,
                        (turned + first * ROWS * 4, shares),
                        (first, num, job[JOB_SHIFT]),
                        (job[JOB_OUT] + r * PANEL * 4 + shift, sums),
                        code,
                        soft,
                    )
        amx.end(own, soft)
        # Numba frees an array that is not named any more.
        state[0] = scratch[0] = 0

    return body
