"""A causal convolution of 16 or 32 channels, generated as LLVM code that keeps weights and the
latest inputs in registers. Addresses and strides are in bytes."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.columns import over_rows, row_at, silu_rows, store_floats
from kernels.cpu.vectors import LANES, LINE, emit_prefetch, fma, load_floats

WINDOW = 512  # channels of a window's row

_I64 = ir.IntType(64)
_AHEAD = 8  # rows between the one that is computed and the one that is prefetched


@intrinsic(prefer_literal=True)
def convolve(  # noqa: PLR0913
    typing_context, source, target, count, weights, window, size, taps, silu, vectors
):
    """Convolve `count` rows of 16 * vectors channels.

    source, target: (address, row stride) of inputs and outputs. weights: address of [vectors, taps
    + 1, 16] float32, oldest tap first, then the bias. window: address of [taps - 1, WINDOW]
    float32, whose first columns are the inputs before the first row, oldest first; they are
    replaced by those before the row after the last one. size: bytes of an element; silu: 1 to apply
    it to the outputs, else 0. size, taps, silu and vectors are literals."""
    literals = (size, taps, silu, vectors)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    num_bytes, num_taps, has_silu, num_vectors = (given.literal_value for given in literals)

    def build(context, builder, signature, args):
        (x, stride), (out, out_stride) = (
            [builder.extract_value(args[number], i) for i in range(2)] for number in (0, 1)
        )
        count, weights, window = args[2:5]
        every = range(num_vectors)
        places = [_I64(LINE * number) for number in range(num_vectors * (num_taps + 1))]
        loaded = [row_at(builder, weights, place) for place in places]
        parts = [loaded[v * (num_taps + 1) : (v + 1) * (num_taps + 1)] for v in every]
        shift = [_I64(LANES * num_bytes * v) for v in every]
        ahead, out_ahead = (builder.mul(each, _I64(_AHEAD)) for each in (stride, out_stride))

        def step(offset, values):
            target, *before = values
            emit_prefetch(builder, builder.add(builder.add(x, offset), ahead))
            emit_prefetch(builder, builder.add(target, out_ahead))
            after = []
            for v, (*factors, bias) in enumerate(parts):
                place = builder.add(offset, shift[v])
                held = before[v * (num_taps - 1) : (v + 1) * (num_taps - 1)]
                inputs = [*held, load_floats(builder, x, place, LANES, num_bytes)]
                total = bias
                for value, factor in zip(inputs, factors, strict=True):
                    total = fma(builder, value, factor, total)
                if has_silu:
                    total = silu_rows(builder, total)
                store_floats(builder, total, builder.add(target, shift[v]), num_bytes)
                after += inputs[1:]
            return [builder.add(target, out_stride), *after]

        rows = [_I64(4 * WINDOW * tap + LINE * v) for v in every for tap in range(num_taps - 1)]
        carried = [out, *(row_at(builder, window, row) for row in rows)]
        _, *last = over_rows(builder, (x, stride, count), carried, step)
        for row, value in zip(rows, last, strict=True):
            store_floats(builder, value, builder.add(window, row), 4)
        return context.get_dummy_value()

    two = types.UniTuple(types.intp, 2)
    return types.void(two, two, types.intp, types.intp, types.intp, *literals), build
