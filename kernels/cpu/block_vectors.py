"""Products of 8-bit activations with packed weights of 2 to 8 bits, generated as LLVM code.

The layout of weights is that of ``kernels.cpu.matmul.blocks``. Sums of a unit of 32 inputs are
exact integers, and floats are added in one order, so all ways to multiply give the same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.matmul.blocks import PANEL, PLANES, QUAD, QUADS, UNIT, row_parts
from kernels.cpu.vectors import LINE, fma, splat

# Ways to multiply four bytes of weights by four of activations. See `_DOTS`.
VNNI_512, VNNI_256, AVX2, PLAIN = range(4)
LANES = {VNNI_512: 16, VNNI_256: 8, AVX2: 8, PLAIN: 4}
# Outputs of a tile for one row and for several, so that the sums stay in registers.
_WIDTHS = {VNNI_512: (32, 32), VNNI_256: (32, 16), AVX2: (32, 16), PLAIN: (16, 16)}

FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)  # dtypes of scales
_BYTES = (4, 2, 2, 1)
_UNITS_AHEAD = 8  # scales are prefetched this many units in advance

_F32, _F16 = ir.FloatType(), ir.HalfType()
_I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_INFINITY = 0x7F800000
LARGEST = 127.0  # of quantised inputs
HALF_SPAN = 16
WIDENS_FLOAT16 = isa.widens_float16()


class Form(NamedTuple):
    """The properties of a packed weight for which code is generated."""

    bits: int
    halves: int  # groups of a unit, 1 or 2
    has_offsets: bool
    has_codebook: bool
    scales: int = FLOAT32  # dtype of the scales that the code reads: FLOAT32 if they are decoded
    offsets: int = FLOAT32

    @property
    def code(self) -> int:
        """The form as one integer, which compiled code takes as a literal."""
        flags = self.has_offsets << 6 | self.has_codebook << 7
        return self.bits | self.halves << 4 | flags | self.scales << 8 | self.offsets << 10

    @classmethod
    def of(cls, code: int) -> Form:
        """Returns the form for which ``code`` stands."""
        flags = bool(code >> 6 & 1), bool(code >> 7 & 1)
        return cls(code & 15, code >> 4 & 3, *flags, code >> 8 & 3, code >> 10 & 3)

    @property
    def has_zero(self) -> bool:
        """True if a zero point is subtracted from the values."""
        return self.has_codebook or not self.has_offsets

    @property
    def largest(self) -> int:
        """The largest value that is multiplied."""
        return 255 if self.has_codebook else (1 << self.bits) - 1


def _function(builder, name, result, *kinds):
    found = builder.module.globals.get(name)
    if found is None:
        found = ir.Function(builder.module, ir.FunctionType(result, kinds), name)
    return found


def call(builder, name, result, *args):
    """Emit the call of a function, which is declared if it is not."""
    return builder.call(_function(builder, name, result, *(arg.type for arg in args)), args)


def load(builder, address, kind, align=4):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder, value, address, align=4):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def same(kind, number):
    """The constant vector (or scalar) of a kind, each of whose elements is a number."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [number] * kind.count)
    return ir.Constant(kind, number)


def _vnni(builder, total, weights, row, largest):
    lanes, kind = total.type.count, total.type
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{lanes * 32}", kind, total, weights, row)


def _pairs(builder, name, left, right, count, lanes):
    """Emit a multiplication of `left` and `right` that adds pairs of products. count, lanes: the
    elements of an operand and of the result."""
    operand, result = (ir.VectorType(ir.IntType(256 // n), n) for n in (count, lanes))
    return call(
        builder, name, result, builder.bitcast(left, operand), builder.bitcast(right, operand)
    )


def _avx2(builder, total, weights, row, largest):
    kind = total.type
    if 2 * largest * LARGEST < 1 << 15:
        pairs = _pairs(builder, "llvm.x86.avx2.pmadd.ub.sw", weights, row, 32, 16)
        ones = same(pairs.type, 1)
        return builder.add(total, _pairs(builder, "llvm.x86.avx2.pmadd.wd", pairs, ones, 16, 8))
    for place in range(2):  # bytes 0 and 2, then bytes 1 and 3
        words = ir.VectorType(_I16, kind.count * 2)
        left, right = builder.bitcast(weights, words), builder.bitcast(row, words)
        left = builder.and_(left, same(words, 255)) if not place else _shifted(builder, left, 8)
        if not place:
            right = builder.shl(right, same(words, 8))
        right = builder.ashr(right, same(words, 8))
        total = builder.add(total, _pairs(builder, "llvm.x86.avx2.pmadd.wd", left, right, 16, 8))
    return total


def _plain(builder, total, weights, row, largest):
    kind = total.type
    for byte in range(QUAD):
        left = _shifted(builder, weights, 8 * byte)
        if byte < QUAD - 1:
            left = builder.and_(left, same(kind, 255))
        right = builder.shl(row, same(kind, 24 - 8 * byte)) if byte < QUAD - 1 else row
        product = builder.mul(left, builder.ashr(right, same(kind, 24)))
        total = builder.add(total, product)
    return total


# Emit total + the products of four unsigned bytes of `weights` and four signed ones of `row`.
_DOTS = {VNNI_512: _vnni, VNNI_256: _vnni, AVX2: _avx2, PLAIN: _plain}


def _shifted(builder, value, right):
    """Emit a shift to the right, or to the left if `right` is negative."""
    if right == 0:
        return value
    shift = builder.lshr if right > 0 else builder.shl
    return shift(value, same(value.type, abs(right)))


def _lookup(builder, way, codebook, indices):
    """Emit the bytes of a codebook of 16 with these indices. codebook: its bytes in each 128 bits
    of a vector."""
    kind = indices.type
    count = kind.count * 4
    bytes_ = ir.VectorType(_I8, count)
    codes, at = builder.bitcast(codebook, bytes_), builder.bitcast(indices, bytes_)
    if way == PLAIN:
        result = same(bytes_, 0)
        for number in range(16):
            one = builder.extract_element(codes, _I32(number))
            is_it = builder.icmp_unsigned("==", at, same(bytes_, number))
            result = builder.select(is_it, splat(builder, one, count), result)
    else:
        name = "llvm.x86.avx512.pshuf.b.512" if way == VNNI_512 else "llvm.x86.avx2.pshuf.b"
        result = call(builder, name, bytes_, codes, at)
    return builder.bitcast(result, kind)


class _Tile(NamedTuple):
    """Emits the product of some rows with some outputs of a panel, over all units."""

    builder: ir.IRBuilder
    form: Form
    way: int
    rows: int
    outputs: range
    a: tuple[Any, Any]  # address of the first row and bytes between rows
    b: Any  # address of the panel's values
    scales: _Scales
    offsets: _Scales
    out: Any
    units: Any
    codebook: Any
    ahead: tuple[Any, Any]  # address of values that are prefetched, bytes for each unit

    @property
    def lanes(self) -> int:
        return LANES[self.way]

    @property
    def columns(self) -> list[int]:
        """The first outputs of the tile's vectors."""
        return list(self.outputs[:: self.lanes])

    def emit(self) -> None:
        builder, floats = self.builder, ir.VectorType(_F32, self.lanes)
        codebook = None
        if self.form.has_codebook:
            four = load(builder, self.codebook, ir.VectorType(_I32, 4))
            every = ir.Constant(ir.VectorType(_I32, self.lanes), [i % 4 for i in range(self.lanes)])
            codebook = builder.shuffle_vector(four, four, every)
        zero = same(floats, 0.0)
        count = self.rows * len(self.columns)
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("unit", "stored"))
        builder.branch(loop)
        builder.position_at_end(loop)
        unit, *sums = (builder.phi(kind) for kind in [_I64] + [floats] * count)
        added = self._unit(unit, sums, codebook)
        following = builder.add(unit, _I64(1))
        initial = [_I64(0)] + [zero] * count
        for phi, first, last in zip((unit, *sums), initial, (following, *added), strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self.units), loop, done)
        builder.position_at_end(done)
        for number, value in enumerate(added):
            row, column = divmod(number, len(self.columns))
            place = row * PANEL * 4 + self.columns[column] * 4
            store(builder, value, builder.add(self.out, _I64(place)))

    def _unit(self, unit, sums, codebook):
        builder, form = self.builder, self.form
        b = builder.add(self.b, builder.mul(unit, _I64(form.bits * 2 * LINE)))
        wanted = builder.add(self.ahead[0], builder.mul(unit, self.ahead[1]))
        for line in range(form.bits * 2):
            _prefetch(builder, builder.add(wanted, _I64(line * LINE)))
        self.scales.prefetch(unit)
        if form.has_offsets:
            self.offsets.prefetch(unit)
        quads = Quads(builder, form, self.way, b, codebook)
        per = QUADS // form.halves
        for half in range(form.halves):
            totals = self._totals(unit, half, range(half * per, (half + 1) * per), quads)
            sums = self._scale(unit, half, totals, sums)
        return sums

    def _part(self, row, at, unit, half=None, size=4):
        """Emit the address of a row's element for a unit (or half of it). at: bytes for each unit
        that precede the elements in a row; size: bytes of an element."""
        builder = self.builder
        start = builder.add(self.a[0], builder.mul(self.a[1], _I64(row)))
        start = builder.add(start, builder.mul(self.units, _I64(at)))
        if half is None:
            return builder.add(start, builder.mul(unit, _I64(size)))
        step = builder.mul(unit, _I64(self.form.halves * size))
        return builder.add(builder.add(start, step), _I64(half * size))

    def _totals(self, unit, half, quads_of_half, quads):
        """Emit the integer sums of one group of a unit, by row and column."""
        builder, words = self.builder, ir.VectorType(_I32, self.lanes)
        totals = []
        for row in range(self.rows):
            start = same(words, 0)
            if self.form.has_zero:
                place = self._part(row, STARTS_AT, unit, half)
                start = splat(builder, load(builder, place, _I32), self.lanes)
            totals += [start] * len(self.columns)
        multiply = _DOTS[self.way]
        for quad in quads_of_half:
            weights = [quads.load(quad, column) for column in self.columns]
            for row in range(self.rows):
                place = builder.add(self._part(row, 0, unit, size=UNIT), _I64(quad * QUAD))
                given = splat(builder, load(builder, place, _I32), self.lanes)
                for column, weight in enumerate(weights):
                    number = row * len(weights) + column
                    totals[number] = multiply(
                        builder, totals[number], weight, given, self.form.largest
                    )
        return totals

    def _scale(self, unit, half, totals, sums):
        """Emit the sums after a group is added, scaled."""
        builder, floats = self.builder, ir.VectorType(_F32, self.lanes)
        added = []
        for row in range(self.rows):
            place = self._part(row, SCALES_AT, unit)
            scale = splat(builder, load(builder, place, _F32), self.lanes)
            share = None
            if self.form.has_offsets:
                place = self._part(row, shares_at(self.form.halves), unit, half)
                share = splat(builder, load(builder, place, _F32), self.lanes)
            for column, first in enumerate(self.columns):
                number = row * len(self.columns) + column
                weight = self.scales.load(unit, half, first, self.lanes)
                total = builder.sitofp(totals[number], floats)
                value = fma(builder, total, builder.fmul(weight, scale), sums[number])
                if share is not None:
                    offset = self.offsets.load(unit, half, first, self.lanes)
                    value = fma(builder, offset, share, value)
                added.append(value)
        return added


class _Scales(NamedTuple):
    """Emits the loads of a panel's scales, or of its offsets."""

    builder: ir.IRBuilder
    kind: int  # FLOAT32, FLOAT16, ...; INT8 has outer scales
    halves: int
    address: Any
    outer: Any  # address of the outer scales
    shifts: tuple[Any, Any]  # unit >> shift is the number of its group, and of its outer scale
    is_ahead: Any  # 1 to prefetch scales of later units, else 0

    def load(self, unit, half, first, lanes):
        """Emit the scales of a unit, or of half of it, for the outputs from ``first`` on."""
        builder = self.builder
        place = builder.add(self._group(unit), _I64(self._bytes(half * PANEL + first)))
        value = wide(builder, place, self.kind, lanes)
        if self.kind != INT8:
            return value
        outer = builder.mul(builder.lshr(unit, self.shifts[1]), _I64(PANEL * 4))
        place = builder.add(builder.add(self.outer, outer), _I64(first * 4))
        return builder.fmul(value, load(builder, place, value.type))

    def prefetch(self, unit):
        """Emit the prefetch of scales that are needed some units later."""
        builder, size = self.builder, self._bytes(self.halves * PANEL)
        ahead = builder.mul(self.is_ahead, _I64(size * _UNITS_AHEAD))
        start = builder.add(self._group(unit), ahead)
        for line in range(0, size, LINE):
            _prefetch(builder, builder.add(start, _I64(line)))

    def _group(self, unit):
        step = _I64(self._bytes(self.halves * PANEL))
        number = self.builder.lshr(unit, self.shifts[0])
        return self.builder.add(self.address, self.builder.mul(number, step))

    def _bytes(self, count: int) -> int:
        return count * _BYTES[self.kind]


def _prefetch(builder, address):
    place = builder.inttoptr(address, _I8.as_pointer())
    kinds = (_I8.as_pointer(), _I32, _I32, _I32)
    function = _function(builder, "llvm.prefetch.p0", ir.VoidType(), *kinds)
    builder.call(function, [place, _I32(0), _I32(3), _I32(1)])


class Quads(NamedTuple):
    """Emits the unpacking of a unit's quads to bytes."""

    builder: ir.IRBuilder
    form: Form
    way: int
    address: Any  # of the unit's values
    codebook: Any

    def load(self, quad: int, column: int) -> Any:
        """Emit the bytes of a quad for the outputs from ``column`` on."""
        builder, kind = self.builder, ir.VectorType(_I32, LANES[self.way])
        result, first = None, 0
        for width, position in PLANES[self.form.bits]:
            row, part = _place_of(width, quad)
            place = ((first + row) * PANEL + column) * QUAD
            packed = load(builder, builder.add(self.address, _I64(place)), kind)
            if width < 8:
                mask = ((1 << width) - 1 << position) * 0x01010101
                moved = _shifted(builder, packed, part - position)
                packed = builder.and_(moved, same(kind, mask))
            result = packed if result is None else builder.or_(result, packed)
            first += width
        if self.form.has_codebook:
            return _lookup(builder, self.way, self.codebook, result)
        return result


def _place_of(width: int, quad: int) -> tuple[int, int]:
    """Returns the row of a plane of `width` bits that stores a quad, and its lowest bit there."""
    return next(
        (row, at) for row, parts in row_parts(width) for at, stored in parts if stored == quad
    )


# Layout of a quantised row of U units with 1 or 2 groups each: U * 32 bytes of integers, U float32
# scales, U * groups int32 `starts`, U * groups float32 `shares`. A start is minus the sum of a
# group's integers times the zero point; a share is the sum times the scale.
SCALES_AT = UNIT
STARTS_AT = SCALES_AT + 4


def shares_at(halves: int) -> int:
    """Returns the bytes for each unit that precede the shares in a quantised row."""
    return STARTS_AT + 4 * halves


def row_bytes(units: int, halves: int) -> int:
    """Returns the bytes of a quantised row, a multiple of 64."""
    return -(-units * (shares_at(halves) + 4 * halves) // LINE) * LINE


@intrinsic(prefer_literal=True)
def block_tile(  # noqa: PLR0913
    typing_context, a, b, scales, offsets, out, shape, codebook, ahead, rows, form, way
):
    """Multiply `rows` quantised rows by a panel: out [rows, 32] float32.

    a: (address of the first row, bytes of a row); b: address of the panel; scales, offsets: (their
    address, that of the outer ones); shape: (units, shift: unit >> shift is the group, the same for
    outer scales); codebook: its address; ahead: (address of values that are prefetched, bytes
    for each unit, 1 to prefetch scales or 0); rows, form, way: literals."""
    literals = (rows, form, way)
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    num_rows, code, how = (one.literal_value for one in literals)
    kind = Form.of(code)

    def build(context, builder, signature, args):
        def parts(number, count=2):
            return [builder.extract_value(args[number], i) for i in range(count)]

        units, *shifts = parts(5, 3)
        *ahead, is_ahead = parts(7, 3)
        scales, offsets = (
            _Scales(builder, dtype, kind.halves, *parts(number), tuple(shifts), is_ahead)
            for number, dtype in ((2, kind.scales), (3, kind.offsets))
        )
        width = _WIDTHS[how][num_rows > 1]
        for first in range(0, PANEL, width):
            _Tile(
                builder,
                kind,
                how,
                num_rows,
                range(first, first + width),
                tuple(parts(0)),
                args[1],
                scales,
                offsets,
                args[4],
                units,
                args[6],
                tuple(ahead),
            ).emit()
        return context.get_dummy_value()

    pair, three = types.UniTuple(types.intp, 2), types.UniTuple(types.intp, 3)
    kinds = (pair, types.intp, pair, pair, types.intp, three, types.intp, three)
    return types.void(*kinds, *literals), build


@intrinsic(prefer_literal=True)
def decode_scales(typing_context, source, outer, target, kind, has_outer):
    """Decode the 32 scales or offsets of a group to float32 at `target`. outer: address of their
    outer scales; kind (FLOAT32, FLOAT16, ...) and has_outer are literals."""
    if not isinstance(kind, types.Literal) or not isinstance(has_outer, types.Literal):
        return None

    def build(context, builder, signature, args):
        floats = ir.VectorType(_F32, HALF_SPAN)
        for first in range(0, PANEL, HALF_SPAN):
            place = builder.add(args[0], _I64(first * _BYTES[kind.literal_value]))
            value = wide(builder, place, kind.literal_value)
            if has_outer.literal_value:
                factor = load(builder, builder.add(args[1], _I64(first * 4)), floats)
                value = builder.fmul(value, factor)
            store(builder, value, builder.add(args[2], _I64(first * 4)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3, kind, has_outer), build


def wide(builder, place, kind, lanes=HALF_SPAN):
    """Emit the load of scales as a vector of float32. kind: FLOAT32, FLOAT16, ..."""
    floats, words = (ir.VectorType(one, lanes) for one in (_F32, _I32))
    if kind == FLOAT32:
        return load(builder, place, floats)
    if kind == INT8:
        return builder.sitofp(load(builder, place, ir.VectorType(_I8, lanes), 1), floats)
    if kind == FLOAT16 and WIDENS_FLOAT16:
        return builder.fpext(load(builder, place, ir.VectorType(_F16, lanes), 2), floats)
    halves = builder.zext(load(builder, place, ir.VectorType(_I16, lanes), 2), words)
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(halves, same(words, 16)), floats)
    return _float_of_half(builder, halves)


def _float_of_half(builder, halves):
    """Emit the float32 values of float16 bits in 32-bit words, without an instruction for it."""
    words = halves.type
    floats = ir.VectorType(_F32, words.count)
    sign = builder.shl(builder.and_(halves, same(words, 0x8000)), same(words, 16))
    magnitude = builder.shl(builder.and_(halves, same(words, 0x7FFF)), same(words, 13))
    # The exponents have another bias; multiplied, numbers below the smallest normal one are right.
    scaled = builder.fmul(builder.bitcast(magnitude, floats), same(floats, 2.0**112))
    scaled = builder.bitcast(scaled, words)
    is_special = builder.icmp_unsigned(">=", magnitude, same(words, 0x7C00 << 13))
    special = builder.or_(magnitude, same(words, _INFINITY))
    return builder.bitcast(builder.or_(builder.select(is_special, special, scaled), sign), floats)
