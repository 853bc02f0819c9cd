"""LLVM vector code for matrices of 16 columns, one vector per row.

Sums down columns need no sum across lanes. As in `kernels.cpu.vectors`, addresses and strides are
in bytes.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import isa
from kernels.cpu.vectors import (
    BIAS,
    EXP2_TERMS,
    LANES,
    LARGEST,
    LINE,
    MANTISSA,
    SMALLEST,
    BFloat,
    fma,
    load_floats,
    splat,
)

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_FEW_WORDS = ir.VectorType(_I32, 4)
_CHAINS = 4  # independent maxima and sums of a column, to hide latency


def _at(builder, base, offset, kind):
    """A pointer to LLVM type `kind` at address base + offset."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def row_at(builder, base, offset, kind=_FLOATS):
    """Emit the load of a vector of LLVM type `kind` at address base + offset."""
    return builder.load(_at(builder, base, offset, kind), align=4)


def _put(builder, row, base, offset):
    builder.store(row, _at(builder, base, offset, row.type), align=4)


def over_rows(builder, rows, carried, step):
    """Emit a loop over `rows`: (address, stride in bytes, number of rows). `carried`: initial
    values of the loop's variables; step(offset, values) emits the loop's body and returns their
    next values. Returns their last values."""
    _, stride, count = rows
    before = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("rows", "all"))
    builder.cbranch(builder.icmp_signed(">", count, _I64(0)), loop, done)
    builder.position_at_end(loop)
    at, *values = (builder.phi(kind) for kind in [_I64] + [value.type for value in carried])
    following = step(builder.mul(at, stride), values)
    ends, after = builder.block, builder.add(at, _I64(1))
    for phi, initial, last in zip(
        (at, *values), (_I64(0), *carried), (after, *following), strict=True
    ):
        phi.add_incoming(initial, before)
        phi.add_incoming(last, ends)
    builder.cbranch(builder.icmp_signed("<", after, count), loop, done)
    builder.position_at_end(done)
    results = [builder.phi(value.type) for value in carried]
    for phi, initial, last in zip(results, carried, following, strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(last, ends)
    return results


@intrinsic
def pair_rows(typing_context, address, stride, count, target):
    """Round float32 rows of 16 columns to bfloat16, nearest even, in pairs: target[k] has the
    values of rows 2 * k and 2 * k + 1. count: number of pairs of rows."""

    def build(context, builder, signature, args):
        address, stride, count, target = args

        def step(offset, values):
            rows = [row_at(builder, address, at) for at in (offset, builder.add(offset, stride))]
            _put(builder, _pairs(builder, *rows), values[0], _I64(0))
            return [builder.add(values[0], _I64(LINE))]

        over_rows(builder, (address, builder.shl(stride, _I64(1)), count), [target], step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build


def _all(number):
    """A vector constant with this number, float32 or int32, in each lane."""
    return ir.Constant(_FLOATS if isinstance(number, float) else _WORDS, [number] * LANES)


def _rounded(builder, floats):
    """Round float32 to bfloat16, in the upper 16 bits of words whose lower bits are undefined."""
    if isa.has("avx512bf16"):
        halves = builder.fptrunc(floats, ir.VectorType(BFloat(), LANES))
        words = builder.zext(builder.bitcast(halves, ir.VectorType(_I16, LANES)), _WORDS)
        return builder.shl(words, _all(16))
    bits = builder.bitcast(floats, _WORDS)
    is_odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    up = builder.add(bits, builder.add(is_odd, _all(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _all(0x7FFFFFFF)), _all(0x7F800000))
    return builder.select(is_nan, _all(0x7FC00000), up)


def _pairs(builder, even, odd):
    """Round two rows of float32 to bfloat16, nearest even, and combine each pair of values in a
    32-bit word, the even row's value in the low half."""
    low = builder.lshr(_rounded(builder, even), _all(16))
    return builder.or_(low, builder.and_(_rounded(builder, odd), _all(0xFFFF0000)))


@intrinsic
def interleave16(typing_context, source, ld_source, target, ld_target):
    """Interleave pairs of rows of a bfloat16 matrix [16, 32]. Writes two arrays [8 pairs, 16
    columns, 2] with 64 bytes per pair: the first four of each eight columns at `target`, and the
    other four `ld_target` bytes later."""

    def build(context, builder, signature, args):
        source, ld_source, target, ld_target = args
        halves = ir.VectorType(_I16, 2 * LANES)
        for k in range(LANES // 2):
            rows = [
                row_at(builder, source, builder.mul(ld_source, _I64(2 * k + i)), halves)
                for i in range(2)
            ]
            for upper in range(2):
                columns = [quarter * 8 + 4 * upper + i for quarter in range(4) for i in range(4)]
                mask = [row * 2 * LANES + column for column in columns for row in range(2)]
                kind = ir.VectorType(_I32, 2 * LANES)
                pairs = builder.shuffle_vector(*rows, ir.Constant(kind, mask))
                place = builder.add(_I64(LINE * k), builder.mul(ld_target, _I64(upper)))
                _put(builder, pairs, target, place)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build


@intrinsic
def pair_halves(typing_context, one, other, target):
    """Combine 16 values of 16 bits at `one`, each with that at `other`, in words at `target`, those
    of `one` in the low halves."""

    def build(context, builder, signature, args):
        halves = ir.VectorType(_I16, LANES)
        low, high = (
            builder.zext(builder.load(_at(builder, each, _I64(0), halves), align=2), _WORDS)
            for each in args[:2]
        )
        _put(builder, builder.or_(low, builder.shl(high, _all(16))), args[2], _I64(0))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), build


@intrinsic
def round_turned(typing_context, source, ld_source, target, ld_target):
    """Transpose 32 x 16 float32 and round them to nearest even, as bfloat16 [16, 32]."""

    def build(context, builder, signature, args):
        source, ld_source, target, ld_target = args
        places = [builder.mul(ld_source, _I64(i)) for i in range(2 * LANES)]
        rows = [row_at(builder, source, place) for place in places]
        pairs = [_pairs(builder, rows[i], rows[i + 1]) for i in range(0, 2 * LANES, 2)]
        for i, row in enumerate(_turned(builder, pairs)):
            _put(builder, row, target, builder.mul(ld_target, _I64(i)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build


@intrinsic(prefer_literal=True)
def scale_columns(typing_context, scores, stride, count, factor, best, bounds):
    """Multiply scores [count, 16] by factor; then best [16] = maximum of best and each column.

    scores, best, bounds: addresses; count: a multiple of 4. bounds: literal 0 (all rows count), or
    [2, 16] int32: for each column, the first row that counts and the end. NaN is ignored."""
    is_bounded = not isinstance(bounds, types.Literal)

    def work(builder, given, scores, state, is_seen):
        scaled = builder.fmul(scores, splat(builder, given[3], LANES))
        counted = scaled
        if is_seen is not None:
            counted = builder.select(is_seen, scaled, _all(float("-inf")))
        return scaled, _greater(builder, counted, state)

    build = _down_columns(4, 5 if is_bounded else None, float("-inf"), _greater, work)
    kinds = (types.float32, types.intp, types.intp if is_bounded else bounds)
    return types.void(*[types.intp] * 3, *kinds), build


@intrinsic(prefer_literal=True)
def soften_columns(typing_context, scores, stride, count, best, total, bounds):
    """Replace scores [count, 16] by 2 ** (score - best), or by zero in rows outside the bounds;
    then add each column's sum to total [16]. Other arguments are those of `scale_columns`."""
    is_bounded = not isinstance(bounds, types.Literal)

    def work(builder, given, scores, state, is_seen):
        weights = exp2_rows(builder, builder.fsub(scores, row_at(builder, given[3], _I64(0))))
        if is_seen is not None:
            weights = builder.select(is_seen, weights, _all(0.0))
        return weights, builder.fadd(state, weights)

    def plus(builder, one, other):
        return builder.fadd(one, other)

    build = _down_columns(4, 5 if is_bounded else None, 0.0, plus, work)
    return types.void(*[types.intp] * 5, types.intp if is_bounded else bounds), build


def _down_columns(joined, bounds, initial, join, work):
    """Return the code generator of a loop that changes rows of 16 scores and accumulates a state
    over them. Four states, each `initial` at first, take turns; `join` merges them into the value
    at the address in argument `joined`. bounds: number of the argument with the bounds, or None.
    work(builder, args, scores, state, is_seen) returns the row to store and the next state."""

    def build(context, builder, signature, args):
        scores, stride, count = args[:3]
        rows = scores, builder.mul(stride, _I64(_CHAINS)), builder.sdiv(count, _I64(_CHAINS))

        def step(offset, values):
            place, *states = values
            after = []
            for i, state in enumerate(states):
                at = builder.add(offset, builder.mul(stride, _I64(i)))
                row = builder.add(place, _all(i))
                is_seen = None if bounds is None else _between(builder, row, args[bounds])
                stored, state = work(builder, args, row_at(builder, scores, at), state, is_seen)
                _put(builder, stored, scores, at)
                after.append(state)
            return [builder.add(place, _all(_CHAINS)), *after]

        carried = [_all(0), *[_all(initial)] * _CHAINS]
        _, *states = over_rows(builder, rows, carried, step)
        pairs = [join(builder, states[0], states[1]), join(builder, states[2], states[3])]
        whole = join(builder, row_at(builder, args[joined], _I64(0)), join(builder, *pairs))
        _put(builder, whole, args[joined], _I64(0))
        return context.get_dummy_value()

    return build


def _greater(builder, one, other):
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _between(builder, rows, bounds):
    """Emit a comparison: is each column's row number in `rows` within the bounds of the column?"""
    first, end = (row_at(builder, bounds, _I64(place), _WORDS) for place in (0, LINE))
    is_from = builder.icmp_signed(">=", rows, first)
    return builder.and_(is_from, builder.icmp_signed("<", rows, end))


@intrinsic
def exp2_of_all(typing_context, x):
    """2 ** x of a float32, bit-identical to `soften_row` and `soften_columns`."""

    def build(context, builder, signature, args):
        return builder.extract_element(exp2_rows(builder, splat(builder, args[0], LANES)), _I32(0))

    return types.float32(types.float32), build


@intrinsic
def fold_factors(typing_context, largest, added, shrink, share):
    """Compute factors that merge two partial softmax sums of 16 rows, whose largest scores are
    `largest` and `added`: `shrink` for the first sum, `share` for the second. `largest` becomes the
    maximum of both. All arguments are addresses of 16 float32."""

    def build(context, builder, signature, args):
        zero = _I64(0)
        before, added = (row_at(builder, place, zero) for place in args[:2])
        best = _greater(builder, added, before)
        _put(builder, best, args[0], zero)
        for scores, place in zip((before, added), args[2:], strict=True):
            _put(builder, exp2_rows(builder, builder.fsub(scores, best)), place, zero)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), build


@intrinsic
def soften_row(typing_context, scores, count, best, first, end):
    """Replace the scores at an address by 2 ** (score - best), or by zero outside [first, end), and
    return their sum, added in the order of `soften_columns`. count: number of vectors of 16
    scores."""

    def build(context, builder, signature, args):
        scores, count, best, *limits = args
        largest = splat(builder, best, LANES)
        first, end = (splat(builder, builder.trunc(limit, _I32), LANES) for limit in limits)

        def step(offset, values):
            place, total = values
            weights = exp2_rows(builder, builder.fsub(row_at(builder, scores, offset), largest))
            is_from = builder.icmp_signed(">=", place, first)
            is_seen = builder.and_(is_from, builder.icmp_signed("<", place, end))
            weights = builder.select(is_seen, weights, _all(0.0))
            _put(builder, weights, scores, offset)
            for lane in range(0, LANES, _CHAINS):
                mask = ir.Constant(_FEW_WORDS, list(range(lane, lane + _CHAINS)))
                total = builder.fadd(total, builder.shuffle_vector(weights, weights, mask))
            return [builder.add(place, _all(LANES)), total]

        lanes = ir.Constant(_WORDS, list(range(LANES)))
        zeros = ir.Constant(ir.VectorType(_F32, _CHAINS), [0.0] * _CHAINS)
        _, total = over_rows(builder, (scores, _I64(LINE), count), [lanes, zeros], step)
        chains = [builder.extract_element(total, _I32(i)) for i in range(_CHAINS)]
        return builder.fadd(builder.fadd(*chains[:2]), builder.fadd(*chains[2:]))

    return types.float32(*[types.intp] * 2, types.float32, *[types.intp] * 2), build


@intrinsic
def cap_scores(typing_context, scores, count, softcap, factor):
    """Scores at an address become softcap * tanh(score / softcap) * factor. count: number of
    vectors of 16."""

    def build(context, builder, signature, args):
        scores, count, *numbers = args
        softcap, factor = (splat(builder, number, LANES) for number in numbers)
        whole = builder.fmul(softcap, factor)

        def step(offset, values):
            ratio = builder.fdiv(row_at(builder, scores, offset), softcap)
            power = exp2_rows(builder, builder.fmul(ratio, _all(2 / math.log(2))))
            below = builder.fadd(power, _all(1.0))
            tanh = builder.fsub(_all(1.0), builder.fdiv(_all(2.0), below))
            _put(builder, builder.fmul(tanh, whole), scores, offset)
            return []

        over_rows(builder, (scores, _I64(LINE), count), [], step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 2, *[types.float32] * 2), build


def exp2_rows(builder, x):
    """2 ** x of a vector, to about one unit in the last place. NaN stays NaN; x is clamped to
    limits that avoid overflow."""
    for limit, order in ((SMALLEST, "<"), (LARGEST, ">")):
        x = builder.select(builder.fcmp_ordered(order, x, _all(limit)), _all(limit), x)
    exponent = builder.fptosi(builder.fadd(x, _all(BIAS + 0.5)), _WORDS)
    r = builder.fsub(x, builder.sitofp(builder.sub(exponent, _all(BIAS)), _FLOATS))
    mantissa = _all(EXP2_TERMS[-1])
    for term in EXP2_TERMS[-2::-1]:
        mantissa = fma(builder, mantissa, r, _all(term))
    power = builder.bitcast(builder.shl(exponent, _all(MANTISSA)), _FLOATS)
    return builder.fmul(mantissa, power)


def silu_rows(builder, x):
    """Emit x / (1 + e ** -x) of a vector."""
    power = exp2_rows(builder, builder.fmul(x, _all(-1 / math.log(2))))
    # An estimate of the reciprocal and a Newton step, which take a third of a division's time.
    return builder.fdiv(x, builder.fadd(power, _all(1.0)), flags=("arcp", "afn"))


def store_floats(builder, floats, address, size):
    """Emit the store of a vector of 16 float32 as elements of `size` bytes: 4 for float32, 2 for
    bfloat16, rounded to nearest even."""
    if size == 4:
        _put(builder, floats, address, _I64(0))
        return
    if isa.has("avx512bf16"):
        halves = builder.fptrunc(floats, ir.VectorType(BFloat(), LANES))
    else:
        words = builder.lshr(_rounded(builder, floats), _all(16))
        halves = builder.trunc(words, ir.VectorType(_I16, LANES))
    builder.store(halves, _at(builder, address, _I64(0), halves.type), align=2)


@intrinsic(prefer_literal=True)
def transpose16(typing_context, source, ld_source, target, ld_target, size):
    """Transpose a 16 x 16 matrix into words of 4 bytes; bfloat16 becomes float32. ld_source,
    ld_target: row strides in bytes; size: bytes of a source element, a literal 4 or 2."""
    if not isinstance(size, types.Literal):
        return None

    def build(context, builder, signature, args):
        source, ld_source, target, ld_target = args[:4]
        rows = [
            load_floats(builder, source, builder.mul(ld_source, _I64(i)), LANES, size.literal_value)
            for i in range(LANES)
        ]
        rows = _turned(builder, rows)
        for i, row in enumerate(rows):
            _put(builder, row, target, builder.mul(ld_target, _I64(i)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, size), build


def _turned(builder, rows):
    """Transpose 16 vectors of 16 words each."""
    step = LANES // 2
    while step:
        after = list(rows)
        for i in range(LANES):
            if not i & step:
                after[i], after[i + step] = _exchange(builder, rows[i], rows[i + step], step)
        rows = after
        step //= 2
    return rows


def _exchange(builder, low, high, step):
    """Emit a step of a transposition: swap off-diagonal blocks of `step` lanes between two rows."""
    first = [j if not j & step else LANES + j - step for j in range(LANES)]
    second = [j + step if not j & step else LANES + j for j in range(LANES)]
    kind = ir.VectorType(_I32, LANES)
    return (
        builder.shuffle_vector(low, high, ir.Constant(kind, first)),
        builder.shuffle_vector(low, high, ir.Constant(kind, second)),
    )
