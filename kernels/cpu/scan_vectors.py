"""Steps of selective scans, generated as LLVM code that keeps sums in registers. Addresses and
strides are in bytes."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.block_vectors import load, same, store
from kernels.cpu.columns import exp2_rows, row_at, silu_rows
from kernels.cpu.state_cells import load_state, round_state, state_bytes
from kernels.cpu.vectors import LANES, fma, splat

ROWS = 4  # rows of a state per iteration, each with its own sums

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_F32, LANES)
_LOG2_E = 1 / math.log(2)
# Terms of log(1 + u) = 2 * atanh(u / (2 + u)), for u from 0 to 1.
_LOG_TERMS = tuple(2 / (2 * n + 1) for n in range(8))


def _literals(*given):
    """Returns the values of literals; ``None`` if one is not a literal."""
    if not all(isinstance(one, types.Literal) for one in given):
        return None
    return [one.literal_value for one in given]


def _place(builder, address, number, lanes, size=4):
    """Emit the address of vector `number` of a row."""
    return builder.add(address, _I64(number * lanes * size))


def _loop(builder, count, carried, step):
    """Emit a loop of `count` > 0 rounds. step(number of the round, values of the loop's variables)
    emits the body and returns their next values. Returns their last values."""
    before, loop = builder.block, builder.append_basic_block("rows")
    done = builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    number, *values = (builder.phi(kind) for kind in [_I64, *(one.type for one in carried)])
    following, ends = step(number, values), builder.block
    after = builder.add(number, _I64(1))
    for phi, first, last in zip(
        (number, *values), (_I64(0), *carried), (after, *following), strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(last, ends)
    builder.cbranch(builder.icmp_signed("<", after, count), loop, done)
    builder.position_at_end(done)
    return following


@intrinsic(prefer_literal=True)
def scan_heads(  # noqa: PLR0913
    typing_context, places, stride, depth, decay, moved, factors, sums, kind, vectors, lanes
):
    """Advance a block of a state, [depth, vectors * lanes], by one token: target = decay * source +
    b * moved; the sums become the products of c and the target.

    places: (source, target), with the same row stride. moved, sums: addresses of a row. factors:
    addresses of b and c, [depth] float32. depth: a multiple of ROWS. kind: the state's type in
    memory (see `kernels.cpu.state_cells`). kind, vectors, lanes: literals."""
    literals = _literals(kind, vectors, lanes)
    if literals is None:
        return None
    stored, num, width = literals
    size = state_bytes(stored)

    def build(context, builder, signature, args):
        source, target, b, c = (
            builder.extract_value(args[which], i) for which in (0, 5) for i in range(2)
        )
        stride, depth, decay, moved = args[1:5]
        kind = ir.VectorType(_F32, width)
        decays = splat(builder, decay, width)
        changes = [load(builder, _place(builder, moved, v, width), kind) for v in range(num)]

        def step(number, totals):
            results = []
            for r in range(ROWS):
                row = builder.add(builder.mul(number, _I64(ROWS)), _I64(r))
                at, byte = builder.mul(row, stride), builder.mul(row, _I64(4))
                own, read = (
                    splat(builder, load(builder, builder.add(base, byte), _F32), width)
                    for base in (b, c)
                )
                for v in range(num):
                    place = builder.add(at, _I64(v * width * size))
                    value = load_state(builder, builder.add(source, place), stored, width)
                    value = fma(builder, own, changes[v], builder.fmul(value, decays))
                    rounded, _ = round_state(builder, value, stored)
                    store(builder, rounded, builder.add(target, place), size)
                    results.append(fma(builder, read, value, totals[r * num + v]))
            return results

        rounds = builder.sdiv(depth, _I64(ROWS))
        totals = _loop(builder, rounds, [same(kind, 0.0)] * (ROWS * num), step)
        for v in range(num):
            one, two, three, four = totals[v::num]
            total = builder.fadd(builder.fadd(one, two), builder.fadd(three, four))
            store(builder, total, _place(builder, args[6], v, width))
        return context.get_dummy_value()

    two = types.UniTuple(types.intp, 2)
    kinds = (two, types.intp, types.intp, types.float32, types.intp, two, types.intp)
    return types.void(*kinds, kind, vectors, lanes), build


@intrinsic(prefer_literal=True)
def scan_channels(  # noqa: PLR0913
    typing_context, places, width, depth, decays, step, moved, factors, sums, kind
):
    """Advance the states [depth, 16] of 16 channels by one token: target = exp(step * decays) *
    source + b * moved; the sums become the products of c and the target.

    places: (source, target); decays: A, float32. Rows of all three have `width` elements. step,
    moved, sums: addresses of a row. factors: addresses of b and c, [depth] float32. kind: the
    state's type in memory, a literal (see `kernels.cpu.state_cells`)."""
    literals = _literals(kind)
    if literals is None:
        return None
    (stored,) = literals
    size = state_bytes(stored)

    def build(context, builder, signature, args):
        source, target, b, c = (
            builder.extract_value(args[which], i) for which in (0, 6) for i in range(2)
        )
        width, depth, decays, step_at, moved = args[1:6]
        zero = _I64(0)
        times = builder.fmul(row_at(builder, step_at, zero), same(_FLOATS, _LOG2_E))
        change = row_at(builder, moved, zero)

        def step(row, totals):
            first, byte = builder.mul(row, width), builder.mul(row, _I64(4))
            own, read = (
                splat(builder, load(builder, builder.add(base, byte), _F32), LANES)
                for base in (b, c)
            )
            decay = row_at(builder, decays, builder.mul(first, _I64(4)))
            kept = exp2_rows(builder, builder.fmul(times, decay))
            at = builder.mul(first, _I64(size))
            value = load_state(builder, builder.add(source, at), stored, LANES)
            value = fma(builder, own, change, builder.fmul(value, kept))
            rounded, _ = round_state(builder, value, stored)
            store(builder, rounded, builder.add(target, at), size)
            return [fma(builder, read, value, totals[0])]

        (total,) = _loop(builder, depth, [same(_FLOATS, 0.0)], step)
        store(builder, total, args[7])
        return context.get_dummy_value()

    two = types.UniTuple(types.intp, 2)
    kinds = (two, *[types.intp] * 5, two, types.intp)
    return types.void(*kinds, kind), build


def _softplus(builder, x):
    """Emit log(1 + e ** x) of a vector. NaN stays NaN."""
    zero = same(_FLOATS, 0.0)
    is_positive = builder.fcmp_ordered(">", x, zero)
    negative = builder.select(is_positive, builder.fsub(zero, x), x)
    u = exp2_rows(builder, builder.fmul(negative, same(_FLOATS, _LOG2_E)))
    s = builder.fdiv(u, builder.fadd(u, same(_FLOATS, 2.0)))
    square = builder.fmul(s, s)
    series = same(_FLOATS, _LOG_TERMS[-1])
    for term in _LOG_TERMS[-2::-1]:
        series = fma(builder, series, square, same(_FLOATS, term))
    return fma(builder, series, s, builder.select(is_positive, x, zero))


@intrinsic
def time_steps(typing_context, raw, bias, least, most, target):
    """Compute the time steps of 16 lanes: softplus(raw + bias), limited to [least, most]. raw,
    bias, target: addresses of 16 float32."""

    def build(context, builder, signature, args):
        raw, bias, least, most, target = args
        total = builder.fadd(*(row_at(builder, place, _I64(0)) for place in (raw, bias)))
        steps = _softplus(builder, total)
        for limit, order in ((least, "<"), (most, ">")):
            bound = splat(builder, limit, LANES)
            steps = builder.select(builder.fcmp_ordered(order, steps, bound), bound, steps)
        store(builder, steps, target)
        return context.get_dummy_value()

    kinds = (types.intp, types.intp, types.float32, types.float32, types.intp)
    return types.void(*kinds), build


@intrinsic
def decay_of_steps(typing_context, steps, decay, target):
    """Compute exp(step * decay) of 16 lanes. steps, target: addresses of 16 float32."""

    def build(context, builder, signature, args):
        steps, decay, target = args
        power = builder.fmul(row_at(builder, steps, _I64(0)), splat(builder, decay, LANES))
        power = builder.fmul(power, same(_FLOATS, _LOG2_E))
        store(builder, exp2_rows(builder, power), target)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), build


@intrinsic
def gate_row(typing_context, y, x, skip, gate, target):
    """Compute (y + x * skip) * silu(gate) of 16 lanes. All arguments are addresses of 16
    float32."""

    def build(context, builder, signature, args):
        y, x, skip, gate = (row_at(builder, place, _I64(0)) for place in args[:4])
        total = fma(builder, x, skip, y)
        store(builder, builder.fmul(total, silu_rows(builder, gate)), args[4])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), build


@intrinsic
def add_skip(typing_context, y, x, skip, target):
    """Compute y + x * skip of 16 lanes. y, x, target: addresses of 16 float32."""

    def build(context, builder, signature, args):
        y, x = (row_at(builder, place, _I64(0)) for place in args[:2])
        store(builder, fma(builder, x, splat(builder, args[2], LANES), y), args[3])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.intp), build
