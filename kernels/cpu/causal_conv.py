"""Causal convolution of each channel over the tokens of a sequence, one token after the other.

A work item is some channels of a few sequences. Each token is computed alike, whether its
predecessors come from the step or from the state, so results do not depend on how a prompt is
divided."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import njit

from kernels.cpu import isa
from kernels.cpu.cells import elements, get, read_cells, write_cells
from kernels.cpu.conv_vectors import WINDOW, convolve
from kernels.cpu.native import EXACT, Kernel, i64, next_item
from kernels.cpu.states import clear_rows, count_written, sequences_of, step_parameters
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import LANES, LINE
from kernels.meta import StateMeta

_CHANNELS = 128  # per item, at least
_VECTORS = WINDOW // LANES
_PAIR = 2 if isa.has("avx512f") else 1  # vectors whose weights and inputs fit the registers
_SEQS = 32  # sequences per item
_TOKENS = 8  # rows of a tile: with more, their pages and lines would not be read ahead
_ENOUGH = 16384  # with fewer outputs one thread is faster
_ZERO = np.float32(0)
_NUM_PARAMETERS = 14


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Causal convolution of x [N, C], whose rows are contiguous; see kernels.ops.causal_conv.
    activation: "silu" or ""."""
    num, width = x.shape
    out = x.new_empty((num, width))
    threads = num_threads() if out.numel() >= _ENOUGH else 1
    conv_kernel(x.element_size(), weight.shape[1], int(activation == "silu")).run(
        threads,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        *step_parameters(meta),
        num,
        width,
        _channels(width, threads),
    )
    return out


def _channels(width: int, threads: int) -> int:
    """Number of channels of an item. Many are read faster, since they are adjacent in memory, but
    each thread gets some items."""
    channels = WINDOW
    while channels > _CHANNELS and threads > 1 and width < 3 * threads * channels:
        channels //= 2
    return channels


@njit(**EXACT)
def _load_weights(weight, bias, count, weights, taps, cell):
    """Fill weights [vectors, taps + 1, 16] for `count` channels with the taps at address `weight`
    and the bias at address `bias`; 0: zeros."""
    weights[:] = _ZERO
    factors, offsets = elements(weight, (count, taps), cell), elements(bias, (count,), cell)
    for c in range(count):
        part, lane = weights[c // LANES], c % LANES
        for tap in range(taps):
            part[tap, lane] = get(factors[c], tap)
        if bias:
            part[taps, lane] = get(offsets, c)


@njit(inline="always")
def _convolve_rows(source, target, span, arrays, size, taps, silu):
    """Convolve rows of an item's channels. source, target: (address, row stride); span: (rows,
    channels); arrays: weights, window, and inputs and outputs of incomplete vectors. The others
    are literals as in `convolve`."""
    weights, window, inputs, outputs = arrays
    num, count = span
    whole = count // LANES
    for first in range(0, num, _TOKENS):
        rows = min(_TOKENS, num - first)
        x, out = source[0] + first * source[1], target[0] + first * target[1]
        v = 0
        while v < whole:
            places = (x + v * LANES * size, source[1]), (out + v * LANES * size, target[1])
            used = weights[v].ctypes.data, window.ctypes.data + v * LINE
            if v + _PAIR <= whole:
                convolve(places[0], places[1], rows, used[0], used[1], size, taps, silu, _PAIR)
                v += _PAIR
            else:
                convolve(places[0], places[1], rows, used[0], used[1], size, taps, silu, 1)
                v += 1
        if whole * LANES == count:
            continue
        x, out = x + whole * LANES * size, out + whole * LANES * size
        for n in range(rows):
            read_cells(x + n * source[1], inputs[n, : count - whole * LANES], size)
        convolve(
            (inputs.ctypes.data, LINE),
            (outputs.ctypes.data, LINE),
            rows,
            weights[whole].ctypes.data,
            window.ctypes.data + whole * LINE,
            4,
            taps,
            silu,
            1,
        )
        for n in range(rows):
            write_cells(out + n * target[1], outputs[n, : count - whole * LANES], size)


@njit(**EXACT)
def _load_state(row, window, stride, count, cell):
    """Fill window [taps - 1, channels] with the state at address `row`; 0: with zeros."""
    for tap in range(window.shape[0]):
        if row:
            read_cells(row + tap * stride, window[tap, :count], cell)
        else:
            window[tap] = _ZERO


@njit(**EXACT)
def _store_state(row, window, stride, count, cell):
    """Write window [taps - 1, channels] to the state at address `row`."""
    for tap in range(window.shape[0]):
        write_cells(row + tap * stride, window[tap, :count], cell)


def _conv_body(cell: int, taps: int, silu: int):
    """Make the body of `causal_conv`. cell: bytes of an element; silu: 1 to apply it, else 0."""

    def body(row):
        p = i64(row, (_NUM_PARAMETERS + 1,))
        starts, reads, writes = sequences_of(p, 7)
        num_seqs, width = len(reads), p[13]
        stride, size = width * cell, (taps - 1) * width * cell
        groups = (num_seqs + _SEQS - 1) // _SEQS
        channels = p[14]
        blocks = (width + channels - 1) // channels
        weights = np.empty((_VECTORS, taps + 1, LANES), np.float32)
        window = np.empty((taps - 1, WINDOW), np.float32)
        inputs = np.zeros((_TOKENS, LANES), np.float32)
        arrays = weights, window, inputs, np.empty((_TOKENS, LANES), np.float32)
        while True:
            item = next_item(row)
            if item >= blocks * (groups + 1):
                break
            first, group = (item % blocks) * channels, item // blocks
            count, at = min(channels, width - first), first * cell
            if group == groups:
                clear_rows(p[6] + at, stride, starts[num_seqs], p[12], count, cell)
                continue
            _load_weights(p[3] + at * taps, p[4] + at if p[4] else 0, count, weights, taps, cell)
            for s in range(group * _SEQS, min((group + 1) * _SEQS, num_seqs)):
                old = p[5] + reads[s] * size + at if reads[s] >= 0 else 0
                _load_state(old, window, stride, count, cell)
                # The tokens up to the first state that is written, then one after the other.
                n, end = starts[s], starts[s + 1]
                until = end - max(count_written(writes[s]) - 1, 0)
                while n < end:
                    num = max(until - n, 1)
                    _convolve_rows(
                        (p[1] + n * p[2] + at, p[2]),
                        (p[6] + n * stride + at, stride),
                        (num, count),
                        arrays,
                        cell,
                        taps,
                        silu,
                    )
                    n += num
                    if writes[s, n - until] >= 0:
                        place = p[5] + writes[s, n - until] * size + at
                        _store_state(place, window, stride, count, cell)

    return body


@cache
def conv_kernel(cell: int, taps: int, silu: int) -> Kernel:
    """The kernel for elements of `cell` bytes and this number of taps; silu: 1 to apply it."""
    return Kernel(_conv_body(cell, taps, silu), heavy=True, exact=True)
