"""Selective scans over the tokens of each sequence, one token after the other.

A work item of a scan by heads is one head of a sequence; by channels, some channels of a sequence.
Each token is computed alike in every step, so results do not depend on how a prompt is divided.
The state is updated in the row of the state tensor to which it is written."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import njit

from kernels.cpu import isa
from kernels.cpu.cells import elements, get, read_cells, write_cells
from kernels.cpu.native import EXACT, Kernel, bits, f32, f64, i64, next_item, u8
from kernels.cpu.scan_vectors import (
    ROWS,
    add_skip,
    decay_of_steps,
    gate_row,
    scan_channels,
    scan_heads,
    time_steps,
)
from kernels.cpu.state_cells import STATE_TYPES, state_bytes
from kernels.cpu.states import clear_rows, count_written, sequences_of, step_parameters
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import LANES
from kernels.meta import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan

_TOKENS = LANES  # of a tile: their time steps are computed together
_ENOUGH = 65536  # with fewer products of states and inputs, one thread is faster
_ZERO = np.float32(0)
_WIDEST = 16 if isa.has("avx512f") else 8
_MOST_VECTORS = 4 if _WIDEST == 16 else 2  # so that sums stay in registers
_PARAMETERS = 20
_INFINITY, _LOW_BITS = np.float32(np.inf), 0xFFFFFFFF


def supports_heads(state: torch.Tensor) -> bool:
    """True if there are compiled loops for these states, [rows, H, S, P]."""
    is_whole = state.shape[2] % ROWS == 0 and state.shape[3] % LANES == 0
    return state.dtype in STATE_TYPES and state.is_contiguous() and is_whole


def supports_channels(state: torch.Tensor) -> bool:
    """True if there are compiled loops for these states, [rows, S, C]."""
    is_whole = state.shape[2] % LANES == 0
    return state.dtype in STATE_TYPES and state.is_contiguous() and is_whole


def head_scan(
    xbc: torch.Tensor, dt: torch.Tensor, layer: HeadScan, state: torch.Tensor, meta: StateMeta
) -> torch.Tensor:
    """Scan by heads; see kernels.ops.head_scan. The rows of xbc and dt are contiguous."""
    num, size = len(xbc), xbc.element_size()
    _, heads, depth, width = state.shape
    out = xbc.new_empty((num, heads * width))
    head_kernel(size, STATE_TYPES[state.dtype], *_shape_of(width)).run(
        num_threads() if num * state[0].numel() >= _ENOUGH else 1,
        xbc.data_ptr(),
        xbc.stride(0) * size,
        dt.data_ptr(),
        dt.stride(0) * size,
        layer.decay.data_ptr(),
        layer.skip.data_ptr(),
        layer.dt_bias.data_ptr(),
        bits(layer.dt_limits[0]),
        bits(layer.dt_limits[1]),
        state.data_ptr(),
        out.data_ptr(),
        *step_parameters(meta),
        num,
        heads << 32 | (xbc.shape[1] - heads * width) // (2 * depth),
        depth,
        width,
    )
    return out


def _shape_of(width: int) -> tuple[int, int]:
    """Vectors of a block of a state and lanes of a vector, for heads of this width."""
    vectors = next(num for num in (_MOST_VECTORS, 2, 1) if width % (num * _WIDEST) == 0)
    return vectors, _WIDEST


@njit(**EXACT)
def _find_states(tensor, reads, writes, span, places):
    """Fill places [2, tokens] with the address of the state before each token of a tile and with
    that of the state after it.

    tensor: (address of the part of row 0, bytes of a row, scratch memory for a state that is not
    kept). reads, writes: of the sequence. span: (first token of the tile, number of its tokens,
    tokens of the sequence). Returns True if the caller must fill the first state with zeros."""
    base, stride, scratch = tensor
    first, num, length = span
    num_written = count_written(writes)
    for i in range(-1, num):
        n = first + i
        place = scratch
        if n < 0 and reads >= 0:
            place = base + reads * stride
        elif num_written:
            place = base + writes[max(n - (length - num_written), 0)] * stride
        if i >= 0:
            places[1, i] = place
        if i < num - 1:
            places[0, i + 1] = place
    return first == 0 and reads < 0


@njit(**EXACT)
def _clear(address, stride, num, size):
    """Fill `num` rows of `size` bytes with zeros. stride: bytes between rows."""
    for r in range(num):
        u8(address + r * stride, (size,))[:] = 0


@njit(**EXACT)
def _read_head(sources, span, cell, arrays):
    """Read the tokens of a tile for one head: time steps, x, and b and c.

    sources: (address, row stride) of time steps and of x, then the offsets of b and c in a row of
    x. span: (first token, number of tokens)."""
    raw, x, factors = arrays
    steps, steps_stride, rows, stride, b, c = sources
    first, num = span
    for i in range(num):
        n = first + i
        raw[i] = get(elements(steps + n * steps_stride, (1,), cell), 0)
        read_cells(rows + n * stride, x[i], cell)
        read_cells(rows + n * stride + b, factors[i, 0], cell)
        read_cells(rows + n * stride + c, factors[i, 1], cell)


@njit(**EXACT)
def _times(values, steps, num, result):
    """result[i] = values[i] * steps[i] for `num` rows."""
    for i in range(num):
        for k in range(values.shape[1]):
            result[i, k] = values[i, k] * steps[i]


@njit(**EXACT)
def _write_head(sums, x, skip, num, target, stride, cell):
    """Write the outputs of a tile: sums + x * skip."""
    for i in range(num):
        row = sums[i]
        for k in range(0, row.shape[0], LANES):
            place = row.ctypes.data + k * 4
            add_skip(place, x[i].ctypes.data + k * 4, skip, place)
        write_cells(target + i * stride, row, cell)


def _head_body(cell: int, kind: int, vectors: int, lanes: int):
    """Make the body of `head_scan`. cell: bytes of an activation; kind: type of the state; vectors,
    lanes: of a block of the state's columns."""
    block, held = vectors * lanes, state_bytes(kind)

    def body(row):
        p, limits = i64(row, (_PARAMETERS + 1,)), f64(row, (_PARAMETERS + 1,))
        least, most = np.float32(limits[8]), np.float32(limits[9])
        starts, reads, writes = sequences_of(p, 12)
        num_seqs, heads, groups = len(reads), p[18] >> 32, p[18] & _LOW_BITS
        depth, width = p[19], p[20]
        stride = heads * width * cell
        a, skips, biases = f32(p[5], (heads,)), f32(p[6], (heads,)), f32(p[7], (heads,))
        scratch = np.empty((depth, width), np.float32)
        raw, bias = np.zeros(_TOKENS, np.float32), np.empty(_TOKENS, np.float32)
        steps, decays = np.empty(_TOKENS, np.float32), np.empty(_TOKENS, np.float32)
        x, moved = np.empty((_TOKENS, width), np.float32), np.empty((_TOKENS, width), np.float32)
        sums = np.empty((_TOKENS, width), np.float32)
        factors = np.empty((_TOKENS, 2, depth), np.float32)
        places = np.empty((2, _TOKENS), np.int64)
        while True:
            item = next_item(row)
            if item > num_seqs * heads:
                break
            if item == num_seqs * heads:
                clear_rows(p[11], stride, starts[num_seqs], p[17], heads * width, cell)
                continue
            s, head = item // heads, item % heads
            bias[:] = biases[head]
            size = depth * width * held
            tensor = p[10] + head * size, heads * size, scratch.ctypes.data
            group = (head * groups) // heads
            b = ((heads - head) * width + group * depth) * cell
            sources = (
                p[3] + head * cell,
                p[4],
                p[1] + head * width * cell,
                p[2],
                b,
                b + groups * depth * cell,
            )
            start, length = starts[s], starts[s + 1] - starts[s]
            for first in range(0, length, _TOKENS):
                num = min(_TOKENS, length - first)
                if _find_states(tensor, reads[s], writes[s], (first, num, length), places):
                    _clear(places[0, 0], 0, 1, size)
                _read_head(sources, (start + first, num), cell, (raw, x, factors))
                time_steps(raw.ctypes.data, bias.ctypes.data, least, most, steps.ctypes.data)
                decay_of_steps(steps.ctypes.data, a[head], decays.ctypes.data)
                _times(x, steps, num, moved)
                for k in range(0, width, block):
                    for i in range(num):
                        scan_heads(
                            (places[0, i] + k * held, places[1, i] + k * held),
                            width * held,
                            depth,
                            decays[i],
                            moved[i].ctypes.data + k * 4,
                            (factors[i, 0].ctypes.data, factors[i, 1].ctypes.data),
                            sums[i].ctypes.data + k * 4,
                            kind,
                            vectors,
                            lanes,
                        )
                target = p[11] + (start + first) * stride + head * width * cell
                _write_head(sums, x, skips[head], num, target, stride, cell)

    return body


@cache
def head_kernel(cell: int, kind: int, vectors: int, lanes: int) -> Kernel:
    """The kernel of `head_scan` for activations of `cell` bytes. kind: type of the state; vectors,
    lanes: of a block of the state's columns."""
    return Kernel(_head_body(cell, kind, vectors, lanes), heavy=True, exact=True)


def channel_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    bc: torch.Tensor,
    gate: torch.Tensor,
    layer: ChannelScan,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Scan by channels; see kernels.ops.channel_scan. Rows of x, dt, bc and gate are contiguous."""
    num, size = len(x), x.element_size()
    _, depth, width = state.shape
    out = x.new_empty((num, width))
    strides = [tensor.stride(0) * size for tensor in (x, dt, bc, gate)]
    channel_kernel(size, STATE_TYPES[state.dtype]).run(
        num_threads() if num * state[0].numel() >= _ENOUGH else 1,
        x.data_ptr(),
        dt.data_ptr(),
        bc.data_ptr(),
        gate.data_ptr(),
        strides[0] << 32 | strides[1],
        strides[2] << 32 | strides[3],
        layer.decay.data_ptr(),
        layer.skip.data_ptr(),
        layer.dt_bias.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        *step_parameters(meta),
        num,
        depth,
        width,
    )
    return out


@njit(**EXACT)
def _read_channels(sources, strides, span, cell, arrays):
    """Read some channels of a tile's tokens. sources, strides: of x, time steps, b and c, gate;
    span: (first token, number of tokens)."""
    first, num = span
    for i in range(num):
        n = first + i
        for which in range(4):
            read_cells(sources[which] + n * strides[which], arrays[which][i], cell)


def _channel_body(cell: int, kind: int):
    """Make the body of `channel_scan`. cell: bytes of an activation; kind: type of the state."""
    held = state_bytes(kind)

    def body(row):
        p = i64(row, (_PARAMETERS + 1,))
        starts, reads, writes = sequences_of(p, 12)
        num_seqs, depth, width, blocks = len(reads), p[18], p[19], p[19] // LANES
        strides = p[5] >> 32, p[5] & _LOW_BITS, p[6] >> 32, p[6] & _LOW_BITS
        scratch = np.empty((depth, width), np.float32)
        x, raw = np.empty((_TOKENS, LANES), np.float32), np.empty((_TOKENS, LANES), np.float32)
        gate, bc = (
            np.empty((_TOKENS, LANES), np.float32),
            np.empty((_TOKENS, 2 * depth), np.float32),
        )
        steps, moved = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        sums, places = np.empty(LANES, np.float32), np.empty((2, _TOKENS), np.int64)
        while True:
            item = next_item(row)
            if item > num_seqs * blocks:
                break
            if item == num_seqs * blocks:
                clear_rows(p[11], width * cell, starts[num_seqs], p[17], width, cell)
                continue
            s, at = item // blocks, item % blocks * LANES
            tensor = p[10] + at * held, depth * width * held, scratch.ctypes.data + at * held
            skip, bias = p[8] + at * 4, p[9] + at * 4
            sources = p[1] + at * cell, p[2] + at * cell, p[3], p[4] + at * cell
            start, length = starts[s], starts[s + 1] - starts[s]
            for first in range(0, length, _TOKENS):
                num = min(_TOKENS, length - first)
                if _find_states(tensor, reads[s], writes[s], (first, num, length), places):
                    _clear(places[0, 0], width * held, depth, LANES * held)
                _read_channels(sources, strides, (start + first, num), cell, (x, raw, bc, gate))
                for i in range(num):
                    own = x[i].ctypes.data
                    time_steps(raw[i].ctypes.data, bias, _ZERO, _INFINITY, steps.ctypes.data)
                    for k in range(LANES):
                        moved[k] = x[i, k] * steps[k]
                    factors = bc[i].ctypes.data, bc[i].ctypes.data + depth * 4
                    scan_channels(
                        (places[0, i], places[1, i]),
                        width,
                        depth,
                        p[7] + at * 4,
                        steps.ctypes.data,
                        moved.ctypes.data,
                        factors,
                        sums.ctypes.data,
                        kind,
                    )
                    gate_row(sums.ctypes.data, own, skip, gate[i].ctypes.data, sums.ctypes.data)
                    write_cells(p[11] + ((start + first + i) * width + at) * cell, sums, cell)

    return body


@cache
def channel_kernel(cell: int, kind: int) -> Kernel:
    """The kernel of `channel_scan` for activations of `cell` bytes. kind: type of the state."""
    return Kernel(_channel_body(cell, kind), heavy=True, exact=True)
