"""Tiles of the two halves of a low-rank product, generated as LLVM code.

Rows are given by their addresses, since the rows of an adapter may lie apart. As in
`kernels.cpu.vectors`, addresses and strides are in bytes. All sums are in a fixed order, whatever
the size of the tile.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.columns import over_rows, row_at, store_floats
from kernels.cpu.vectors import (
    LANES,
    LINE,
    DotTile,
    SoftDotTile,
    emit_prefetch,
    fma,
    load_floats,
    splat,
)
from kernels.low_rank import PANEL

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)

# Values of `how`: products of float32; of bfloat16, widened; of pairs of bfloat16, by one
# instruction or by two that give the same bits.
FLOATS, WIDENED, DOTS, SOFT_DOTS = range(4)
STEPS = (LANES, LANES, 2 * LANES, 2 * LANES)
"""Elements of a row that one vector instruction multiplies, by `how`."""
BYTES = (4, 2, 2, 2)
"""Bytes of an element, by `how`."""
_DOTS = {DOTS: DotTile, SOFT_DOTS: SoftDotTile}
# Vectors of sums that fit the registers, and those next to each other.
_MOST_SUMS, _MOST_VECTORS = (16, 4) if isa.has("avx512f") else (4, 2)


def _chunks(total: int, size: int) -> list[range]:
    return [range(first, min(first + size, total)) for first in range(0, total, size)]


def _add_lanes(builder, vector):
    """The sum of 16 lanes: those 8 apart first, then 4, 2 and 1."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))),
            )
            for first in (0, width)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, _I32(0))


@intrinsic(prefer_literal=True)
def dot_tile(  # noqa: C901, PLR0913
    typing_context, places, a, lda, sums, lds, steps, ahead, rows, ranks, how
):
    """Set sums[i, r] to the product of row i, whose address is the i-th int64 at ``places``, and
    row r of ``a``, for ``steps`` vectors of both. Prefetches as many bytes as it reads of ``a``,
    from the address ``ahead`` on. rows, ranks and how are literals."""
    if not all(isinstance(given, types.Literal) for given in (rows, ranks, how)):
        return None
    num_rows, num_ranks, kind = (given.literal_value for given in (rows, ranks, how))

    def load(builder, base, offset):
        if kind in _DOTS:
            return row_at(builder, base, offset, _WORDS)
        return load_floats(builder, base, offset, LANES, BYTES[kind])

    def multiply(builder, left, right, total):
        if kind in _DOTS:
            return _DOTS[kind].multiply(builder, left, right, total)
        return fma(builder, left, right, total)

    def tile(builder, args, mine, theirs):
        places, a, lda, sums, lds, steps, ahead = args[:7]
        left = [row_at(builder, places, _I64(8 * i), _I64) for i in mine]
        right = [builder.add(a, builder.mul(lda, _I64(r))) for r in theirs]

        def step(offset, totals):
            others, added = [load(builder, base, offset) for base in right], []
            following = builder.add(ahead, builder.mul(offset, _I64(len(right))))
            for line in range(0, len(right) * STEPS[kind] * BYTES[kind], LINE):
                emit_prefetch(builder, builder.add(following, _I64(line)))
            for i, base in enumerate(left):
                own = load(builder, base, offset)
                for j, other in enumerate(others):
                    added.append(multiply(builder, own, other, totals[i * len(others) + j]))
            return added

        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        span = a, _I64(STEPS[kind] * BYTES[kind]), steps
        totals = over_rows(builder, span, [zero] * (len(left) * len(right)), step)
        for n, total in enumerate(totals):
            i, r = mine[n // len(right)], theirs[n % len(right)]
            place = builder.add(sums, builder.add(builder.mul(lds, _I64(i)), _I64(4 * r)))
            pointer = builder.inttoptr(place, _F32.as_pointer())
            builder.store(_add_lanes(builder, total), pointer)

    def build(context, builder, signature, args):
        for mine in _chunks(num_rows, max(1, _MOST_SUMS // num_ranks)):
            for theirs in _chunks(num_ranks, _MOST_SUMS):
                tile(builder, args, mine, theirs)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, rows, ranks, how), build


@intrinsic(prefer_literal=True)
def spread_tile(  # noqa: C901, PLR0913
    typing_context, places, shift, sums, lds, b, ahead, depth, rows, vectors, size, cell
):
    """Add sums[i] @ b to ``vectors`` vectors of outputs, ``shift`` bytes after the address of row
    i, which is the i-th int64 at ``places``. sums: float32 [rows, depth]; b: outputs of a panel
    [depth, PANEL] of ``size`` bytes, as many of which are prefetched from the address ``ahead`` on;
    outputs have ``cell`` bytes. The last four are literals."""
    literals = (rows, vectors, size, cell)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    num_rows, num_vectors, num_bytes, num_cell = (given.literal_value for given in literals)
    width = num_vectors * LANES * num_bytes  # of what is read of a row of b, in bytes

    def tile(builder, args, mine, theirs):
        places, shift, sums, lds, b, ahead, depth = args[:7]
        outputs = [builder.add(row_at(builder, places, _I64(8 * i), _I64), shift) for i in mine]
        offsets = [_I64(v * LANES * num_cell) for v in theirs]
        initial = [
            load_floats(builder, base, offset, LANES, num_cell)
            for base in outputs
            for offset in offsets
        ]

        def step(offset, values):
            place, *totals = values
            others = [
                load_floats(
                    builder, b, builder.add(offset, _I64(v * LANES * num_bytes)), LANES, num_bytes
                )
                for v in theirs
            ]
            for line in range(0, width, LINE if mine[0] == theirs[0] == 0 else width + 1):
                at = builder.add(offset, _I64(line))
                emit_prefetch(builder, builder.add(ahead, at))
            added = []
            for n, i in enumerate(mine):
                scalar = row_at(builder, place, builder.mul(lds, _I64(i)), _F32)
                own = splat(builder, scalar, LANES)
                for j, other in enumerate(others):
                    added.append(fma(builder, own, other, totals[n * len(others) + j]))
            return [builder.add(place, _I64(4)), *added]

        span = b, _I64(PANEL * num_bytes), depth
        _, *totals = over_rows(builder, span, [sums, *initial], step)
        for n, total in enumerate(totals):
            base, offset = outputs[n // len(offsets)], offsets[n % len(offsets)]
            store_floats(builder, total, builder.add(base, offset), num_cell)

    def build(context, builder, signature, args):
        per_row = min(num_vectors, _MOST_VECTORS)
        for mine in _chunks(num_rows, max(1, _MOST_SUMS // per_row)):
            for theirs in _chunks(num_vectors, per_row):
                tile(builder, args, mine, theirs)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, *literals), build
