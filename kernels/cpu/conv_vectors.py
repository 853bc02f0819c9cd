"""A causal convolution of 16 channels, generated as LLVM code that keeps weights and the latest
inputs in registers. Addresses and strides are in bytes."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.columns import over_rows, row_at, silu_rows, store_floats
from kernels.cpu.vectors import LANES, LINE, fma, load_floats

WINDOW = 128  # channels of a window's row

_I64 = ir.IntType(64)


@intrinsic(prefer_literal=True)
def convolve(  # noqa: PLR0913
    typing_context, source, target, count, weights, window, size, taps, silu
):
    """Convolve `count` rows of 16 channels.

    source, target: (address, row stride) of inputs and outputs. weights: address of [taps + 1, 16]
    float32, oldest tap first, then the bias. window: address of [taps - 1, WINDOW] float32, whose
    first 16 columns are the inputs before the first row, oldest first; they are replaced by those
    before the row after the last one. size: bytes of an element; silu: 1 to apply it to the
    outputs, else 0. size, taps and silu are literals."""
    literals = (size, taps, silu)
    if not all(isinstance(given, types.Literal) for given in literals):
        return None
    num_bytes, num_taps, has_silu = (given.literal_value for given in literals)

    def build(context, builder, signature, args):
        (x, stride), (out, out_stride) = (
            [builder.extract_value(args[number], i) for i in range(2)] for number in (0, 1)
        )
        count, weights, window = args[2:5]
        *factors, bias = (row_at(builder, weights, _I64(LINE * tap)) for tap in range(num_taps + 1))

        def step(offset, values):
            target, *before = values
            inputs = [*before, load_floats(builder, x, offset, LANES, num_bytes)]
            total = bias
            for value, factor in zip(inputs, factors, strict=True):
                total = fma(builder, value, factor, total)
            if has_silu:
                total = silu_rows(builder, total)
            store_floats(builder, total, target, num_bytes)
            return [builder.add(target, out_stride), *inputs[1:]]

        rows = [_I64(4 * WINDOW * tap) for tap in range(num_taps - 1)]
        carried = [out, *(row_at(builder, window, row) for row in rows)]
        _, *last = over_rows(builder, (x, stride, count), carried, step)
        for row, value in zip(rows, last, strict=True):
            store_floats(builder, value, builder.add(window, row), 4)
        return context.get_dummy_value()

    two = types.UniTuple(types.intp, 2)
    return types.void(two, two, types.intp, types.intp, types.intp, *literals), build
