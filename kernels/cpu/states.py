"""Layers with a recurrent state, for float32 or bfloat16 activations."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu.cells import elements, get, narrow, read_cells, widen, write_cells
from kernels.cpu.native import EXACT, Kernel, i32, i64, next_item
from kernels.cpu.threads import num_threads
from kernels.meta import StateMeta

_ENOUGH = 16384  # with fewer elements one thread is faster
_TOKENS = 16  # per item
_CHANNELS = 512  # per item
_ZERO = np.float32(0)


def short_conv(
    bcx: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Gated causal convolution over each sequence; see kernels.ops.short_conv. All tensors are
    contiguous and of one dtype. The number of sequences is read from memory, since recordings of
    this launch serve any number."""
    width, taps = weight.shape
    out = bcx.new_empty((bcx.shape[0], width))
    SHORT_CONV[bcx.element_size()].run(
        num_threads() if out.numel() >= _ENOUGH else 1,
        bcx.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        state.data_ptr(),
        meta.query_start.data_ptr(),
        meta.state_reads.data_ptr(),
        meta.state_writes.data_ptr(),
        meta.num_seqs.data_ptr(),
        out.data_ptr(),
        bcx.shape[0],
        width,
        taps,
        meta.state_writes.shape[1],
    )
    return out


@njit(**EXACT)
def _sequence_of(starts, token):
    """Index of the sequence that contains a token: the last one that starts at or before it."""
    low, high = 0, starts.shape[0]
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@njit(**EXACT)
def _rounded(value, cell):
    """A float32 as an element of `cell` bytes stores it."""
    return widen(narrow(value)) if cell == 2 else value


@njit(**EXACT)
def _fill_window(window, places, first, begin, cell):
    """Fill the rows of window [rows, channels] with the inputs b * x of a sequence, rounded as the
    state stores them. places: address of bcx at token 0, address of the state at the sequence's
    first token (0: the state is zero), bytes of their rows; first: the token of the window's first
    row; begin: the sequence's first token."""
    bcx, before, row_bytes, width_bytes = places
    num = window.shape[1]
    for r in range(window.shape[0]):
        row, token = window[r], first + r
        if token >= begin:
            source = bcx + token * row_bytes
            gates = elements(source, (num,), cell)
            inputs = elements(source + 2 * width_bytes, (num,), cell)
            for i in range(num):
                row[i] = _rounded(get(gates, i) * get(inputs, i), cell)
        elif before == 0:
            row[:] = _ZERO
        else:
            read_cells(before + (token - begin) * width_bytes, row, cell)


@njit(**EXACT)
def _convolve(window, weights, bias, gates, total):
    """Set total [channels] to gates * (bias + the sum over L of window [L, channels] * weights [L,
    channels]). bias: empty for none."""
    num = total.shape[0]
    for i in range(num):
        total[i] = window[0, i] * weights[0, i]
    for k in range(1, weights.shape[0]):
        for i in range(num):
            total[i] += window[k, i] * weights[k, i]
    if bias.shape[0]:
        for i in range(num):
            total[i] += get(bias, i)
    for i in range(num):
        total[i] *= get(gates, i)


@njit(**EXACT)
def _load_weights(p, channel, weights, cell):
    """Fill weights [L, channels] with those of the channels from `channel` on. p: the parameters of
    the body."""
    taps, count = weights.shape
    stored = elements(p[2] + channel * taps * cell, (count * taps,), cell)
    for i in range(count):
        for k in range(taps):
            weights[k, i] = get(stored, i * taps + k)


@njit(**EXACT)
def _convolve_sequence(p, s, span, channel, buffers, cell):
    """Compute some channels of tokens of one sequence, and write the states after them. p: the
    parameters of the body; s: index of the sequence; span: first token and end; channel: the first
    channel; buffers: memory of a window, weights [L, channels], total [channels]."""
    token, stop = span
    held, weights, total = buffers
    taps, count = weights.shape
    line, shift, most = p[11] * cell, channel * cell, p[13]
    begin, end = i32(p[5] + 4 * s, (2,))
    read, writes = i32(p[6] + 4 * s, (1,))[0], i32(p[7] + 4 * s * most, (most,))
    size = (taps - 1) * line
    before = p[4] + (read + 1) * size + shift if read >= 0 else 0
    rows = stop - token + taps - 1
    window = held[: rows * count].reshape((rows, count))
    _fill_window(window, (p[1] + shift, before, 3 * line, line), token - taps + 1, begin, cell)
    bias = elements(p[3] + shift, (count if p[3] else 0,), cell)
    num_written = 0
    while num_written < most and writes[num_written] >= 0:
        num_written += 1
    for t in range(token, stop):
        used = window[t - token : t - token + taps]
        gates = elements(p[1] + (3 * t + 1) * line + shift, (count,), cell)
        _convolve(used, weights, bias, gates, total)
        write_cells(p[9] + t * line + shift, total, cell)
        entry = num_written - (end - t)
        if entry >= 0:
            target = p[4] + writes[entry] * size + shift
            for k in range(1, taps):
                write_cells(target + (k - 1) * line, used[k], cell)


def _short_conv_body(cell: int):
    def body(row):
        p = i64(row, (14,))
        num, width, taps = p[10], p[11], p[12]
        num_seqs = i32(p[8], (1,))[0]
        starts = i32(p[5], (num_seqs + 1,))
        slices = (width + _CHANNELS - 1) // _CHANNELS
        held = np.empty((_TOKENS + taps - 1) * _CHANNELS, np.float32)
        memory = np.empty((taps + 1) * _CHANNELS, np.float32)
        while True:
            item = next_item(row)
            tile = item // slices
            if tile * _TOKENS >= num:
                break
            channel = (item - tile * slices) * _CHANNELS
            count = min(_CHANNELS, width - channel)
            weights, total = memory[: taps * count].reshape((taps, count)), memory[-count:]
            _load_weights(p, channel, weights, cell)
            token, last = tile * _TOKENS, min(num, (tile + 1) * _TOKENS)
            s = _sequence_of(starts, token)
            while token < min(last, starts[num_seqs]):
                while starts[s + 1] <= token:
                    s += 1
                stop = min(last, starts[s + 1])
                _convolve_sequence(p, s, (token, stop), channel, (held, weights, total), cell)
                token = stop
            total[:] = _ZERO
            for t in range(token, last):  # padding
                write_cells(p[9] + (t * width + channel) * cell, total, cell)

    return body


# By bytes per element.
SHORT_CONV = {cell: Kernel(_short_conv_body(cell), exact=True) for cell in (4, 2)}
