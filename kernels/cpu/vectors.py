"""Matrix products on small tiles in vector registers, generated as LLVM code.

A compiled loop over arrays would not keep the sums of several rows in registers. Here the tile size
is a literal, and the sums are LLVM values. A vector of 16 floats becomes one, two or four machine
registers. Addresses and strides are in bytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import isa

LANES = 16
LINE = 64  # bytes of a cache line

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_UPPER = 0xFFFF0000
# For 2 ** x: limits of x, bias and position of the exponent, and Taylor terms of 2 ** r; for |r| <=
# 1/2 the next term is below float32's last bit.
SMALLEST, LARGEST = -126.0, 127.49
BIAS, MANTISSA = 127, 23
EXP2_TERMS = tuple(math.log(2) ** n / math.factorial(n) for n in range(8))

_SECOND_LEVEL = 2  # LLVM's locality level for the L2 cache
_FLAGS = ("reassoc", "contract", "nsz")
# Maximum vectors of sums in a tile: AVX-512 has 32 registers, AVX2 has 16 of half the size.
_MAX_SUMS = 24 if isa.has("avx512f") else 6
_MAX_VECTORS = 4 if _MAX_SUMS == 24 else 2


def lanes_of(width: int) -> int:
    """Returns the largest power of two that divides `width`, at most LANES."""
    return min(LANES, width & -width)


def _load(builder, base, offset, kind):
    place = builder.inttoptr(builder.add(base, offset), kind.as_pointer())
    return builder.load(place, align=4)


def _store(builder, value, base, offset):
    place = builder.inttoptr(builder.add(base, offset), value.type.as_pointer())
    builder.store(value, place, align=4)


def load_floats(builder, base, offset, lanes, size):
    """Emit the load of a vector of float32 from elements of `size` bytes: 4 for float32, 2 for
    bfloat16."""
    floats = ir.VectorType(_F32, lanes)
    if size == 4:
        return _load(builder, base, offset, floats)
    words = ir.VectorType(_I32, lanes)
    place = builder.inttoptr(builder.add(base, offset), ir.VectorType(_I16, lanes).as_pointer())
    wide = builder.zext(builder.load(place, align=2), words)
    return builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * lanes)), floats)


class BFloat(ir.HalfType):
    """LLVM's type bfloat, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"


BFloat._create_instance()  # otherwise llvmlite would use the parent's instance


def emit_prefetch(builder, address):
    """Emit a prefetch of the cache line at an address into the L2 cache."""
    byte = ir.IntType(8).as_pointer()
    function = builder.module.globals.get("llvm.prefetch.p0")
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = ir.Function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.inttoptr(address, byte)
    builder.call(function, [place, _I32(0), _I32(_SECOND_LEVEL), _I32(1)])


def _halves(builder, words):
    """Split words of two bfloat16 into two float32 vectors: the first value of each word, and the
    second."""
    floats = ir.VectorType(_F32, words.type.count)
    count = words.type.count
    first = builder.shl(words, ir.Constant(words.type, [16] * count))
    second = builder.and_(words, ir.Constant(words.type, [_UPPER] * count))
    return builder.bitcast(first, floats), builder.bitcast(second, floats)


def splat(builder, scalar, lanes):
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def fma(builder, a, b, c):
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def fence(builder, value):
    """Emit a copy of this value, across which the compiler does not reassociate sums."""
    suffix = f"v{value.type.count}f32" if isinstance(value.type, ir.VectorType) else "f32"
    name = f"llvm.arithmetic.fence.{suffix}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(value.type, [value.type]), name)
    return builder.call(function, [value])


def sum_lanes(builder, vector):
    """The sum of a vector's lanes."""
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(_F32, [_F32, vector.type])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, [_F32(0.0), vector], fastmath=_FLAGS)


def _chunks(total: int, size: int) -> list[range]:
    return [range(first, min(first + size, total)) for first in range(0, total, size)]


class _FloatTile:
    """Emits one step k of a tile, for one input: sums[row][vector] += a[row, k] * b[k, vector]."""

    element = _F32  # type of a sum
    zero = 0.0
    left_bytes = 4  # bytes of a row of a per step
    right_bytes = 4  # bytes of a lane of b

    @staticmethod
    def left(builder, base, offset, lanes):
        return splat(builder, _load(builder, base, offset, _F32), lanes)

    @classmethod
    def right(cls, builder, base, offset, lanes):
        return load_floats(builder, base, offset, lanes, cls.right_bytes)

    @staticmethod
    def multiply(builder, scalar, vector, total):
        return fma(builder, scalar, vector, total)


class _HalfTile(_FloatTile):
    """A tile whose b is bfloat16."""

    right_bytes = 2


class _Float16Tile(_FloatTile):
    """A tile whose b is float16."""

    right_bytes = 2

    @staticmethod
    def right(builder, base, offset, lanes):
        halves = ir.VectorType(ir.HalfType(), lanes)
        place = builder.inttoptr(builder.add(base, offset), halves.as_pointer())
        return builder.fpext(builder.load(place, align=2), ir.VectorType(_F32, lanes))


class _PairTile(_FloatTile):
    """Emits products of float32 in a and bfloat16 in b, two a step; b is widened to float32."""

    left_bytes = 8

    @staticmethod
    def left(builder, base, offset, lanes):
        both = (offset, builder.add(offset, _I64(4)))
        return tuple(splat(builder, _load(builder, base, at, _F32), lanes) for at in both)

    @staticmethod
    def right(builder, base, offset, lanes):
        return _halves(builder, _load(builder, base, offset, ir.VectorType(_I32, lanes)))

    @staticmethod
    def multiply(builder, scalars, vectors, total):
        for scalar, vector in zip(scalars, vectors, strict=True):
            total = fma(builder, scalar, vector, total)
        return total


class DotTile(_FloatTile):
    """Emits products of bfloat16, two a step, with one multiply-add instruction for both."""

    @staticmethod
    def left(builder, base, offset, lanes):
        return splat(builder, _load(builder, base, offset, _I32), lanes)

    @staticmethod
    def right(builder, base, offset, lanes):
        return _load(builder, base, offset, ir.VectorType(_I32, lanes))

    @staticmethod
    def multiply(builder, pair, pairs, total):
        name, lanes = f"llvm.x86.avx512bf16.dpbf16ps.{total.type.count * 32}", total.type.count * 2
        operand = ir.VectorType(BFloat(), lanes)
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(total.type, [total.type, operand, operand])
            function = ir.Function(builder.module, kind, name)
        operands = (builder.bitcast(side, operand) for side in (pair, pairs))
        return builder.call(function, [total, *operands])


class SoftDotTile(DotTile):
    """Emits the products of `DotTile` without its instruction, with additions in the same order:
    the second product of a pair first."""

    @staticmethod
    def multiply(builder, pair, pairs, total):
        sides = zip(_halves(builder, pair), _halves(builder, pairs), strict=True)
        for scalar, vector in reversed(list(sides)):
            total = fma(builder, scalar, vector, total)
        return total


class _ByteTile:
    """Emits products of 8-bit integers, four a step: unsigned bytes of a, signed bytes of b."""

    element = _I32
    zero = 0
    left_bytes = 4
    right_bytes = 4

    @staticmethod
    def left(builder, base, offset, lanes):
        return splat(builder, _load(builder, base, offset, _I32), lanes)

    @staticmethod
    def right(builder, base, offset, lanes):
        return _load(builder, base, offset, ir.VectorType(_I32, lanes))

    @staticmethod
    def multiply(builder, scalar, vector, total):
        kind = total.type
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, [total, scalar, vector])


class _Tile(NamedTuple):
    """Emits one tile of a product c += a @ b, with the sums in registers."""

    builder: ir.IRBuilder
    kind: Any  # _FloatTile or another class of this interface
    a: tuple[Any, Any]  # address and row stride in bytes
    b: tuple[Any, Any]
    c: tuple[Any, Any]
    rows: range
    vectors: range
    lanes: int
    ahead: Any = None  # address from which one cache line is prefetched per step

    def emit(self, depth: Any, is_fresh: bool) -> None:
        builder, vector = self.builder, ir.VectorType(self.kind.element, self.lanes)
        zero = ir.Constant(vector, [self.kind.zero] * self.lanes)
        places = [self._place(self.c, row, v) for row in self.rows for v in self.vectors]
        initial = [zero if is_fresh else _load(builder, *place, vector) for place in places]
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("depth", "stored"))
        builder.cbranch(builder.icmp_signed(">", depth, _I64(0)), loop, done)
        builder.position_at_end(loop)
        k, *sums = (builder.phi(kind) for kind in [_I64] + [vector] * len(places))
        following = builder.add(k, _I64(1))
        if self.ahead is not None:
            emit_prefetch(builder, builder.add(self.ahead, builder.mul(k, _I64(LINE))))
        added = self._step(k, sums)
        for phi, first, last in zip(
            (k, *sums), (_I64(0), *initial), (following, *added), strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(last, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
        builder.position_at_end(done)
        results = [builder.phi(vector) for _ in places]
        for phi, first, last in zip(results, initial, added, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, loop)
        for place, result in zip(places, results, strict=True):
            _store(builder, result, *place)

    def _right(self, k, vector):
        """Emit the load of b at step k for one vector of outputs."""
        kind, size = self.kind, self.kind.right_bytes
        return kind.right(self.builder, *self._place(self.b, k, vector, size), self.lanes)

    def _place(self, matrix, row, vector, size=4) -> tuple[Any, Any]:
        """Returns the address of a matrix and the byte offset of one vector of a row. matrix:
        (address, row stride in bytes); size: bytes of an element."""
        address, stride = matrix
        start = self.builder.mul(stride, row if isinstance(row, ir.Value) else _I64(row))
        return address, self.builder.add(start, _I64(vector * self.lanes * size))

    def _step(self, k, sums):
        builder = self.builder
        right = [self._right(k, v) for v in self.vectors]
        column = builder.mul(k, _I64(self.kind.left_bytes))
        added = []
        for i, row in enumerate(self.rows):
            offset = builder.add(builder.mul(self.a[1], _I64(row)), column)
            scalar = self.kind.left(builder, self.a[0], offset, self.lanes)
            for j, value in enumerate(right):
                total = sums[i * len(right) + j]
                added.append(self.kind.multiply(builder, scalar, value, total))
        return added


def _emit_product(builder, kind, args, literals, ahead=None):
    """Emit a product c += a @ b, divided into tiles that fit the registers. literals: (rows,
    vectors per row, lanes per vector, whether to overwrite c instead)."""
    a, lda, b, ldb, c, ldc, depth = args[:7]
    num_rows, num_vectors, lanes, is_fresh = literals
    per_row = min(num_vectors, _MAX_VECTORS)
    for rows in _chunks(num_rows, max(1, _MAX_SUMS // per_row)):
        for vectors in _chunks(num_vectors, per_row):
            tile = _Tile(builder, kind, (a, lda), (b, ldb), (c, ldc), rows, vectors, lanes, ahead)
            tile.emit(depth, bool(is_fresh))


def _product_intrinsic(kind):
    @intrinsic(prefer_literal=True)
    def product(  # noqa: PLR0913
        typing_context, a, lda, b, ldb, c, ldc, depth, rows, vectors, lanes, is_fresh
    ):
        return _typed_product([kind], (rows, vectors, lanes, is_fresh))

    return product


def _typed_product(kinds, literals):
    """Returns the Numba signature and the code generator of a product; None if one of `literals` is
    not a literal. literals: as in `_emit_product`, then the index in `kinds` if there are
    several."""
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    *values, which = [given.literal_value for given in literals] + [0] * (5 - len(literals))

    def build(context, builder, signature, args):
        _emit_product(builder, kinds[which], args, values)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, *literals), build


# product(a, lda, b, ldb, c, ldc, depth, rows, vectors, lanes, is_fresh):
# c[rows, vectors * lanes] (+)= a[rows, depth] @ b[depth, vectors * lanes]. The last four are
# literals; is_fresh: c is overwritten instead of added to.
tile_product = _product_intrinsic(_FloatTile)
byte_tile_product = _product_intrinsic(_ByteTile)


@intrinsic(prefer_literal=True)
def panel_product(  # noqa: PLR0913
    typing_context, a, lda, b, ldb, c, ldc, depth, ahead, rows, size
):
    """Add a[rows, depth] @ b[depth, 64] to c, and prefetch `depth` cache lines from address `ahead`
    on. lda, ldb, ldc: row strides in bytes; size: bytes of an element of b, 4 (float32) or 2
    (float16). rows and size are literals."""
    if not isinstance(size, types.Literal) or not isinstance(rows, types.Literal):
        return None
    kind = _FloatTile if size.literal_value == 4 else _Float16Tile
    literals = (rows.literal_value, 4, LANES, 0)

    def build(context, builder, signature, args):
        _emit_product(builder, kind, args, literals, args[7])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8, rows, size), build


# Values of `how` in `pair_tile_product`: how pairs of bfloat16 are multiplied.
WIDENED, DOTS, SOFT_DOTS = range(3)
_PAIR_KINDS = (_PairTile, DotTile, SoftDotTile)


@intrinsic(prefer_literal=True)
def pair_tile_product(  # noqa: PLR0913
    typing_context, a, lda, b, ldb, c, ldc, depth, rows, vectors, lanes, is_fresh, how
):
    """Set c to a @ b if `is_fresh`, else add a @ b to c, for one tile and `depth` pairs of inputs.
    A row of c has `vectors` vectors of `lanes` float32. b is bfloat16; a is float32 if `how` is
    WIDENED, else bfloat16."""
    return _typed_product(_PAIR_KINDS, (rows, vectors, lanes, is_fresh, how))


@intrinsic(prefer_literal=True)
def pair_panel_product(typing_context, a, lda, b, c, depth, ahead, rows, how):  # noqa: PLR0913
    """Add a @ b to c for 64 columns: a [rows, 2 * depth], b [depth, 64, 2] bfloat16, c [rows, 64].
    `how` is as in `pair_tile_product`, `ahead` as in `panel_product`."""
    if not isinstance(how, types.Literal) or not isinstance(rows, types.Literal):
        return None
    kind, literals = _PAIR_KINDS[how.literal_value], (rows.literal_value, 4, LANES, 0)

    def build(context, builder, signature, args):
        line = _I64(4 * LINE)
        operands = (args[0], args[1], args[2], line, args[3], line, args[4])
        _emit_product(builder, kind, operands, literals, args[5])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6, rows, how), build


@intrinsic(prefer_literal=True)
def add_tile_product(  # noqa: PLR0913
    typing_context, a, lda, b, ldb, c, ldc, depth, rows, vectors, lanes, size
):
    """Add a @ b to c for one tile; a row of c has `vectors` vectors of `lanes` float32. size: bytes
    of an element of b, 4 (float32) or 2 (bfloat16)."""
    literals = (rows, vectors, lanes, size)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    *sizes, right_bytes = (given.literal_value for given in literals)
    kind = _FloatTile if right_bytes == 4 else _HalfTile

    def build(context, builder, signature, args):
        _emit_product(builder, kind, args, [*sizes, 0])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, *literals), build


HAS_BYTE_PRODUCT = isa.has("avx512vnni")


@intrinsic(prefer_literal=True)
def prefetch(typing_context, address, vectors, lanes, size):
    """Prefetch vectors * lanes elements of `size` bytes each, from `address` on, into the L2 cache.
    All arguments but the address are literals."""
    literals = (vectors, lanes, size)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    num = -(-vectors.literal_value * lanes.literal_value * size.literal_value // LINE)

    def build(context, builder, signature, args):
        for line in range(num):
            emit_prefetch(builder, builder.add(args[0], _I64(LINE * line)))
        return context.get_dummy_value()

    return types.void(types.intp, *literals), build


@intrinsic
def largest(typing_context, address, count, start):
    """Returns the largest of `start` and the `count` float32 at `address`; NaN is ignored."""

    def build(context, builder, signature, args):
        address, count, start = args
        vector, mask = ir.VectorType(_F32, LANES), ir.VectorType(ir.IntType(1), LANES)
        first = splat(builder, start, LANES)
        whole = builder.and_(count, _I64(-LANES))
        before = builder.block
        loop, rest = (builder.append_basic_block(name) for name in ("whole", "rest"))
        builder.cbranch(builder.icmp_signed(">", whole, _I64(0)), loop, rest)
        builder.position_at_end(loop)
        at, best = builder.phi(_I64), builder.phi(vector)
        seen = _load(builder, address, builder.mul(at, _I64(4)), vector)
        better = builder.select(builder.fcmp_ordered(">", seen, best), seen, best)
        following = builder.add(at, _I64(LANES))
        for phi, initial, last in ((at, _I64(0), following), (best, first, better)):
            phi.add_incoming(initial, before)
            phi.add_incoming(last, loop)
        builder.cbranch(builder.icmp_signed("<", following, whole), loop, rest)
        builder.position_at_end(rest)
        best = builder.phi(vector)
        best.add_incoming(first, before)
        best.add_incoming(better, loop)
        left = splat(builder, builder.trunc(builder.sub(count, whole), _I32), LANES)
        lanes = ir.Constant(left.type, list(range(LANES)))
        is_there = builder.icmp_signed("<", lanes, left)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(vector, [vector.as_pointer(), _I32, mask, vector])
            function = ir.Function(builder.module, kind, name)
        place = builder.add(address, builder.mul(whole, _I64(4)))
        place = builder.inttoptr(place, vector.as_pointer())
        seen = builder.call(function, [place, _I32(4), is_there, best])
        best = builder.select(builder.fcmp_ordered(">", seen, best), seen, best)
        name = f"llvm.vector.reduce.fmax.v{LANES}f32"
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(_F32, [vector]), name)
        return builder.call(function, [best], fastmath=("nnan",))

    return types.float32(types.intp, types.intp, types.float32), build


@intrinsic
def round16(typing_context, source, factor, target):
    """Multiply 16 float32 at `source` by a factor, and write them to `target` as bfloat16, rounded
    to nearest even, with AVX-512 BF16. Denormal numbers become zero."""

    def build(context, builder, signature, args):
        floats = _load(builder, args[0], _I64(0), ir.VectorType(_F32, LANES))
        scaled = builder.fmul(floats, splat(builder, args[1], LANES))
        halves = builder.fptrunc(scaled, ir.VectorType(BFloat(), LANES))
        place = builder.inttoptr(args[2], halves.type.as_pointer())
        builder.store(halves, place, align=2)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), build


@intrinsic
def copy_bytes(typing_context, source, target, count):
    """Copy `count` bytes between addresses, in vectors if the count is known to the compiler."""

    def build(context, builder, signature, args):
        source, target = (builder.inttoptr(each, ir.IntType(8).as_pointer()) for each in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), build


@intrinsic
def fused(typing_context, a, b, c):
    """Returns a * b + c of float32, rounded only once."""

    def build(context, builder, signature, args):
        name = "llvm.fma.f32"
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(_F32, [_F32] * 3), name)
        return builder.call(function, args)

    return types.float32(types.float32, types.float32, types.float32), build


@intrinsic
def in_order(typing_context, value):
    """Returns the float32 unchanged, but the compiler does not reorder sums that contain it."""

    def build(context, builder, signature, args):
        return fence(builder, args[0])

    return types.float32(types.float32), build
