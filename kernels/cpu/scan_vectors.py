"""Steps of selective scans, generated as LLVM code that keeps sums in registers. Addresses and
strides are in bytes."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.block_vectors import load, same, store
from kernels.cpu.columns import exp2_rows, row_at, silu_rows, store_floats
from kernels.cpu.state_cells import load_state, round_state, state_bytes
from kernels.cpu.vectors import LANES, emit_prefetch, fma, load_floats, splat

_AHEAD = 4096  # bytes of a state that are prefetched
ROWS = 4  # rows of a state that are in registers at a time

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


def _place(builder, address, number, lanes):
    """Emit the address of vector `number` of a row of float32."""
    return builder.add(address, builder.mul(number, _I64(lanes * 4)))


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
    typing_context, places, stride, depth, num, tokens, strides, streams, kind, vectors, lanes
):
    """Advance a block of a state, [depth, vectors * lanes], by `num` > 0 tokens: for each
    token, state = decay * state + b * moved, and the products of c and the state are added to the
    token's sums. Each ROWS rows of the state stay in registers for all tokens.

    places: (source, target) of the state, with the same row stride. depth: a multiple of ROWS.
    tokens: addresses of the decays [num], of the rows of moved and of sums, and of those of b and
    c, [num, 2, depth]; all are float32. strides: bytes between rows of moved and of sums, and
    between tokens of b and c. streams: 1 to write the target past the caches; it must then be
    aligned to a vector. kind: the state's type in memory (see `kernels.cpu.state_cells`). kind,
    vectors, lanes: literals."""
    literals = _literals(kind, vectors, lanes)
    if literals is None:
        return None

    def build(context, builder, signature, args):
        given = list(args[:7])
        for which, count in ((0, 2), (4, 4), (5, 2)):
            given[which] = [builder.extract_value(args[which], i) for i in range(count)]
        _HeadBlock(builder, given, *literals).emit()
        return context.get_dummy_value()

    two, four = types.UniTuple(types.intp, 2), types.UniTuple(types.intp, 4)
    kinds = (two, types.intp, types.intp, types.intp, four, two, types.intp)
    return types.void(*kinds, kind, vectors, lanes), build


class _HeadBlock:
    """Emits the loops over the rows of a block of a state and over tokens."""

    def __init__(self, builder, given, kind, vectors, lanes) -> None:
        """given: values of the other arguments of `scan_heads`, with tuples as lists."""
        self.builder = builder
        (self.source, self.target), self.stride, self.depth, self.num = given[:4]
        (self.decays, self.moved, self.sums, self.factors) = given[4]
        (self.row_bytes, self.factor_bytes), self.streams = given[5:]
        self.vectors = range(vectors)
        self.stored, self.size = kind, state_bytes(kind)
        self.kind = ir.VectorType(_F32, lanes)

    def emit(self) -> None:
        rounds = self.builder.sdiv(self.depth, _I64(ROWS))
        _loop(self.builder, rounds, [], lambda number, _: self._rows(number))

    def _rows(self, number):
        """Emit the loop over tokens for rows number * ROWS to (number + 1) * ROWS."""
        builder = self.builder
        first = builder.mul(number, _I64(ROWS))
        offset = builder.mul(first, self.stride)
        cells = [
            builder.add(
                builder.add(offset, builder.mul(self.stride, _I64(r))), self._offset(v, self.size)
            )
            for r in range(ROWS)
            for v in self.vectors
        ]
        states = [
            load_state(builder, builder.add(self.source, cell), self.stored, self.kind.count)
            for cell in cells
        ]
        for cell in cells:
            emit_prefetch(builder, builder.add(builder.add(self.source, cell), _I64(_AHEAD)))
        own = builder.add(self.factors, builder.mul(first, _I64(4)))
        states = _loop(
            builder, self.num, states, lambda token, values: self._token(token, own, values)
        )
        places = [builder.add(self.target, cell) for cell in cells]
        _store_states(builder, states, places, self.stored, self.streams)
        return []

    def _token(self, token, own, states):
        """Emit one token. own: address of its factors b; states: the block's values. Returns the
        new values."""
        builder, kind = self.builder, self.kind
        decay = builder.add(self.decays, builder.mul(token, _I64(4)))
        decays = splat(builder, load(builder, decay, _F32), kind.count)
        at = builder.mul(token, self.row_bytes)
        moved, places = (
            [builder.add(builder.add(base, at), self._offset(v)) for v in self.vectors]
            for base in (self.moved, self.sums)
        )
        changes = [load(builder, place, kind) for place in moved]
        b = builder.add(own, builder.mul(token, self.factor_bytes))
        c = builder.add(b, builder.mul(self.depth, _I64(4)))
        results, parts = [], []  # the rows' products are added first, which rounds less
        for r in range(ROWS):
            gain, read = (
                splat(builder, load(builder, builder.add(base, _I64(4 * r)), _F32), kind.count)
                for base in (b, c)
            )
            for v in self.vectors:
                kept = builder.fmul(states[r * len(self.vectors) + v], decays)
                value = fma(builder, gain, changes[v], kept)
                results.append(round_state(builder, value, self.stored)[1])
                if r == 0:
                    parts.append(builder.fmul(read, value))
                else:
                    parts[v] = fma(builder, read, value, parts[v])
        for part, place in zip(parts, places, strict=True):
            store(builder, builder.fadd(load(builder, place, kind), part), place)
        return results

    def _offset(self, vector, size=4):
        return _I64(vector * self.kind.count * size)


def _store_past(builder, value, address):
    """Emit a store of a vector to an aligned address, past the caches."""
    size = value.type.count * (4 if value.type.element == _F32 else 2)
    place = builder.inttoptr(address, value.type.as_pointer())
    stored = builder.store(value, place, align=size)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


@intrinsic(prefer_literal=True)
def scan_channels(  # noqa: PLR0913
    typing_context, places, width, depth, num, decays, tokens, streams, kind
):
    """Advance the states [depth, 16] of 16 channels by `num` > 0 tokens: for each token, state =
    2 ** (time * A) * state + b * moved, and the products of c and the state are added to the
    token's sums. Some rows of the state stay in registers for all tokens.

    places: (source, target) of the state; decays: A, float32. Rows of all three have `width`
    elements. tokens: addresses of times, of moved and of sums, [num, 16], and of b and c, [num, 2,
    depth]; all are float32. streams: 1 to write the target past the caches; it must then be aligned
    to a vector. kind: the state's type in memory, a literal (see `kernels.cpu.state_cells`)."""
    literals = _literals(kind)
    if literals is None:
        return None

    def build(context, builder, signature, args):
        given = list(args[:7])
        for which, count in ((0, 2), (5, 4)):
            given[which] = [builder.extract_value(args[which], i) for i in range(count)]
        block = _ChannelBlock(builder, given, *literals)
        whole = builder.sdiv(args[2], _I64(ROWS))
        block.emit(_I64(0), whole, ROWS)
        first = builder.mul(whole, _I64(ROWS))
        block.emit(first, builder.sub(args[2], first), 1)
        return context.get_dummy_value()

    two, four = types.UniTuple(types.intp, 2), types.UniTuple(types.intp, 4)
    kinds = (two, *[types.intp] * 4, four, types.intp)
    return types.void(*kinds, kind), build


class _ChannelBlock:
    """Emits the loops over the rows of the states of 16 channels and over tokens."""

    def __init__(self, builder, given, kind) -> None:
        """given: values of the other arguments of `scan_channels`, with tuples as lists."""
        self.builder = builder
        (self.source, self.target), self.width, self.depth, self.num, self.decays = given[:5]
        self.times, self.moved, self.sums, self.factors = given[5]
        self.streams = given[6]
        self.stored = kind

    def emit(self, first, rounds, rows) -> None:
        """Emit `rounds` >= 0 rounds of this many rows each, from row `first` on."""
        builder = self.builder

        def step(number, _):
            self._rows(builder.add(first, builder.mul(number, _I64(rows))), rows)
            return []

        with builder.if_then(builder.icmp_signed(">", rounds, _I64(0))):
            _loop(builder, rounds, [], step)

    def _rows(self, first, rows):
        builder, size = self.builder, state_bytes(self.stored)
        cells = [builder.mul(builder.add(first, _I64(r)), self.width) for r in range(rows)]
        offsets = [builder.mul(cell, _I64(size)) for cell in cells]
        decays = [row_at(builder, self.decays, builder.mul(cell, _I64(4))) for cell in cells]
        states = [
            load_state(builder, builder.add(self.source, offset), self.stored, LANES)
            for offset in offsets
        ]
        own = builder.add(self.factors, builder.mul(first, _I64(4)))
        states = _loop(
            builder,
            self.num,
            states,
            lambda token, values: self._token(token, own, decays, values),
        )
        places = [builder.add(self.target, offset) for offset in offsets]
        _store_states(builder, states, places, self.stored, self.streams)

    def _token(self, token, own, decays, states):
        """Emit one token. own: address of its factors b; decays, states: vectors of the rows.
        Returns the new states."""
        builder = self.builder
        at = builder.mul(token, _I64(LANES * 4))
        times, moved = (row_at(builder, base, at) for base in (self.times, self.moved))
        row = builder.mul(self.depth, _I64(4))
        b = builder.add(own, builder.mul(token, builder.mul(row, _I64(2))))
        c = builder.add(b, row)
        results, part = [], None
        for r, (state, decay) in enumerate(zip(states, decays, strict=True)):
            gain, read = (
                splat(builder, load(builder, builder.add(base, _I64(4 * r)), _F32), LANES)
                for base in (b, c)
            )
            kept = builder.fmul(state, exp2_rows(builder, builder.fmul(times, decay)))
            value = fma(builder, gain, moved, kept)
            results.append(round_state(builder, value, self.stored)[1])
            part = builder.fmul(read, value) if part is None else fma(builder, read, value, part)
        place = builder.add(self.sums, at)
        store(builder, builder.fadd(row_at(builder, self.sums, at), part), place)
        return results


def _store_states(builder, states, places, kind, streams):
    """Emit the stores of vectors of a state; past the caches if `streams` is not 0."""
    states = [round_state(builder, value, kind)[0] for value in states]
    with builder.if_else(builder.icmp_signed("!=", streams, _I64(0))) as (past, into):
        with past:
            for value, place in zip(states, places, strict=True):
                _store_past(builder, value, place)
        with into:
            for value, place in zip(states, places, strict=True):
                store(builder, value, place, state_bytes(kind))


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


@intrinsic(prefer_literal=True)
def channel_inputs(typing_context, x, raw, parameters, targets, size):
    """Prepare a token's scan of 16 channels: compute the time steps, softplus(raw + bias), times
    log2(e); x times the steps; and x times the skip.

    x, raw: addresses of elements of `size` bytes, a literal. parameters: addresses of the bias and
    of the skip; targets: those of the three results. They are float32."""
    literals = _literals(size)
    if literals is None:
        return None

    def build(context, builder, signature, args):
        zero = _I64(0)
        x, raw = (load_floats(builder, place, zero, LANES, literals[0]) for place in args[:2])
        bias, skip = (row_at(builder, builder.extract_value(args[2], i), zero) for i in range(2))
        steps = _softplus(builder, builder.fadd(raw, bias))
        times = builder.fmul(steps, same(_FLOATS, _LOG2_E))
        for i, value in enumerate((times, builder.fmul(x, steps), builder.fmul(x, skip))):
            store(builder, value, builder.extract_value(args[3], i))
        return context.get_dummy_value()

    two, three = types.UniTuple(types.intp, 2), types.UniTuple(types.intp, 3)
    return types.void(types.intp, types.intp, two, three, size), build


@intrinsic(prefer_literal=True)
def write_gated(typing_context, y, gate, target, size):
    """Write y * silu(gate) of 16 channels. y: address of float32; gate, target: those of elements
    of `size` bytes, a literal."""
    literals = _literals(size)
    if literals is None:
        return None

    def build(context, builder, signature, args):
        gate = load_floats(builder, args[1], _I64(0), LANES, literals[0])
        value = builder.fmul(row_at(builder, args[0], _I64(0)), silu_rows(builder, gate))
        store_floats(builder, value, args[2], literals[0])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, size), build


@intrinsic(prefer_literal=True)
def widen_rows(typing_context, source, vectors, target, size):
    """Copy vectors of 16 elements of `size` bytes, a literal, to an address as float32. vectors:
    their number, > 0."""
    literals = _literals(size)
    if literals is None:
        return None

    def build(context, builder, signature, args):
        source, vectors, target, _ = args

        def step(number, _):
            value = load_floats(
                builder, source, builder.mul(number, _I64(LANES * literals[0])), LANES, literals[0]
            )
            store(builder, value, _place(builder, target, number, LANES))
            return []

        _loop(builder, vectors, [], step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, size), build


@intrinsic(prefer_literal=True)
def scale_inputs(typing_context, x, vectors, factors, targets, size):
    """Multiply a row of vectors of 16 elements of `size` bytes, a literal, by two factors.
    targets: addresses of the two rows of float32. vectors: their number, > 0."""
    literals = _literals(size)
    if literals is None:
        return None

    def build(context, builder, signature, args):
        x, vectors = args[:2]
        factors, targets = (
            [builder.extract_value(args[which], i) for i in range(2)] for which in (2, 3)
        )
        factors = [splat(builder, factor, LANES) for factor in factors]

        def step(number, _):
            value = load_floats(
                builder, x, builder.mul(number, _I64(LANES * literals[0])), LANES, literals[0]
            )
            for factor, target in zip(factors, targets, strict=True):
                place = _place(builder, target, number, LANES)
                store(builder, builder.fmul(value, factor), place)
            return []

        _loop(builder, vectors, [], step)
        return context.get_dummy_value()

    two, floats = types.UniTuple(types.intp, 2), types.UniTuple(types.float32, 2)
    return types.void(types.intp, types.intp, floats, two, size), build
