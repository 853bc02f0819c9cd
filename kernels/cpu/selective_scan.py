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
    channel_inputs,
    decay_of_steps,
    scale_inputs,
    scan_channels,
    scan_heads,
    time_steps,
    widen_rows,
    write_gated,
)
from kernels.cpu.state_cells import STATE_TYPES, state_bytes
from kernels.cpu.states import clear_rows, count_written, sequences_of, step_parameters
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import LANES, LINE, prefetch
from kernels.meta import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan

_CHANNELS = 64  # of an item of a scan by channels
_TOKENS = LANES  # of a tile: their time steps are computed together
_ENOUGH = 65536  # with fewer products of states and inputs, one thread is faster
_ZERO = np.float32(0)
_WIDEST = 16 if isa.has("avx512f") else 8
_MOST_VECTORS = 4 if _WIDEST == 16 else 2  # so that sums stay in registers
_PARAMETERS = 20
_LOW_BITS = 0xFFFFFFFF


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
    groups = (xbc.shape[1] - heads * width) // (2 * depth)
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
        heads << 32 | _heads_per_item(heads, groups) << 16 | groups,
        depth,
        width,
    )
    return out


def _heads_per_item(heads: int, groups: int) -> int:
    """Heads of an item: they share b and c, and there are enough items for all threads."""
    most = heads // (2 * num_threads())
    return next((num for num in (4, 2) if num <= most and heads // groups % num == 0), 1)


def _shape_of(width: int) -> tuple[int, int]:
    """Vectors of a block of a state and lanes of a vector, for heads of this width."""
    vectors = next(num for num in (_MOST_VECTORS, 2, 1) if width % (num * _WIDEST) == 0)
    return vectors, _WIDEST


@njit(**EXACT)
def _first_place(tensor, read, size):
    """The address of a sequence's first state, of `size` contiguous bytes. tensor: (address of
    the part of row 0, bytes of a row, scratch memory). read: the row; -1: the state is zero."""
    base, stride, scratch = tensor
    if read < 0:
        u8(scratch, (size,))[:] = 0
        return scratch
    return base + read * stride


@njit(**EXACT)
def _clear(address, stride, num, size):
    """Fill `num` rows of `size` bytes with zeros. stride: bytes between rows."""
    for r in range(num):
        u8(address + r * stride, (size,))[:] = 0


@njit(inline="always")
def _read_factors(source, target, size):
    """Fill the float32 array `target` with elements of `size` bytes, a literal, from an address."""
    count = target.shape[0]
    whole = count // LANES
    if whole:
        widen_rows(source, whole, target.ctypes.data, size)
    read_cells(source + whole * LANES * size, target[whole * LANES :], size)


@njit(inline="always")
def _read_head(sources, num, scalars, rows, size):
    """Read `num` tokens of a tile for one head. Compute their time steps and decays, and x times
    the steps and times the factor of the skip.

    sources: (address, stride) of the raw time steps, and those of x. scalars: factor of the skip,
    bias of the time steps, their limits, and A. rows: raw time steps, biases, steps and decays,
    each [tile]; then x times the steps, and x times the skip, each [tile, width]."""
    skip, bias, least, most, decay = scalars
    raw, biases, steps, decays, moved, sums = rows
    biases[:] = bias
    for i in range(num):
        raw[i] = get(elements(sources[0] + i * sources[1], (1,), size), 0)
    time_steps(raw.ctypes.data, biases.ctypes.data, least, most, steps.ctypes.data)
    decay_of_steps(steps.ctypes.data, decay, decays.ctypes.data)
    vectors = moved.shape[1] // LANES
    for i in range(num):
        targets = moved[i].ctypes.data, sums[i].ctypes.data
        scale_inputs(sources[2] + i * sources[3], vectors, (steps[i], skip), targets, size)


@njit(**EXACT)
def _prefetch(place, stride, num, count):
    """Prefetch `count` bytes of `num` rows. They are so far apart that the processor prefetches
    nothing by itself."""
    for i in range(num):
        for line in range(0, count, LINE):
            prefetch(place + i * stride + line, 1, LANES, 4)


@njit(**EXACT)
def _place_after(tensor, writes, num_written, rest):
    """The address of the state before the last `rest` tokens of a sequence, in scratch memory if it
    is not kept. tensor: see `_first_place`; num_written: number of rows in `writes`."""
    base, stride, scratch = tensor
    index = num_written - 1 - rest
    return base + writes[index] * stride if index >= 0 else scratch


@njit(inline="always")
def _scan_tile(place, targets, span, sizes, arrays, kind, vectors, lanes):  # noqa: PLR0913
    """Advance the state of a head by the tokens of a tile. Tokens after which no state is kept are
    computed in one pass.

    place: address of the state before the tile. targets: (tensor, offset of the head, rows of kept
    states, their number), see `_place_after`. span: (first token of the tile, number of its tokens,
    tokens of the sequence). sizes: (depth, width, bytes of a
    state's element). arrays: addresses of decays, of x times steps,
    of sums, and of b and c. Returns the address of the state after the tile."""
    tensor, offset, writes, written = targets
    depth, row, held = sizes[0], sizes[1] * 4, sizes[2]
    first, num, length = span
    n = 0
    while n < num:
        end = min(num, max(n + 1, length - written + 1 - first))
        after = _place_after(tensor, writes, written, length - first - end)
        # At the next step caches would hold other states.
        streams = np.int64(length == 1 and (after + offset) % LINE == 0)
        for k in range(0, sizes[1], vectors * lanes):
            scan_heads(
                (place + offset + k * held, after + offset + k * held),
                sizes[1] * held,
                depth,
                end - n,
                (
                    arrays[0] + n * 4,
                    arrays[1] + n * row + k * 4,
                    arrays[2] + n * row + k * 4,
                    arrays[3] + n * depth * 8,
                ),
                (row, depth * 8),
                streams,
                kind,
                vectors,
                lanes,
            )
        n, place = end, after
    return place


def _head_body(cell: int, kind: int, vectors: int, lanes: int):
    """Make the body of `head_scan`. cell: bytes of an activation; kind: type of the state; vectors,
    lanes: of a block of the state's columns."""
    held = state_bytes(kind)

    def body(row):
        p, limits = i64(row, (_PARAMETERS + 1,)), f64(row, (_PARAMETERS + 1,))
        starts, reads, writes = sequences_of(p, 12)
        heads, per, groups = p[18] >> 32, p[18] >> 16 & 0xFFFF, p[18] & 0xFFFF
        depth, width = p[19], p[20]
        sizes, least, most = (depth, width, held), np.float32(limits[8]), np.float32(limits[9])
        size, stride, parts = depth * width * held, heads * width * cell, heads // per
        a, skips, biases = f32(p[5], (heads,)), f32(p[6], (heads,)), f32(p[7], (heads,))
        memory = np.empty(2 * _TOKENS * (depth + width) + per * depth * width + LANES, np.float32)
        at = (np.int64(memory.ctypes.data) + LINE - 1) // LINE * LINE
        moved = f32(at, (_TOKENS, width))
        sums = f32(at + moved.size * 4, (_TOKENS, width))
        factors = f32(at + moved.size * 8, (_TOKENS, 2, depth))
        scratch = at + moved.size * 8 + factors.size * 4
        scalars = np.zeros((4, _TOKENS), np.float32)
        rows = scalars[0], scalars[1], scalars[2], scalars[3], moved, sums
        addresses = rows[3].ctypes.data, moved.ctypes.data, sums.ctypes.data, factors.ctypes.data
        while True:
            item = next_item(row)
            if item > len(reads) * parts:
                break
            if item == len(reads) * parts:
                clear_rows(p[11], stride, starts[len(reads)], p[17], heads * width, cell)
                continue
            s, head = item // parts, item % parts * per
            length, written = starts[s + 1] - starts[s], count_written(writes[s])
            tensor = p[10] + head * size, heads * size, scratch
            place = _first_place(tensor, reads[s], per * size)
            b = (heads * width + head * groups // heads * depth) * cell
            for first in range(0, length, _TOKENS):
                num, start = min(_TOKENS, length - first), starts[s] + first
                source, ahead = p[1] + start * p[2], min(_TOKENS, length - first - num)
                other, after = b + groups * depth * cell, source + num * p[2]
                for i in range(num):
                    _read_factors(source + i * p[2] + b, factors[i, 0], cell)
                    _read_factors(source + i * p[2] + other, factors[i, 1], cell)
                _prefetch(after + b, p[2], ahead, depth * cell)
                _prefetch(after + other, p[2], ahead, depth * cell)
                _prefetch(after + head * width * cell, p[2], ahead, per * width * cell)
                _prefetch(p[3] + (start + num) * p[4] + head * cell, p[4], ahead, cell)
                following = place
                for h in range(head, head + per):
                    own, row_of = h * width * cell, p[3] + start * p[4] + h * cell
                    given = skips[h], biases[h], least, most, a[h]
                    _read_head((row_of, p[4], source + own, p[2]), num, given, rows, cell)
                    targets = tensor, (h - head) * size, writes[s], written
                    following = _scan_tile(
                        place, targets, (first, num, length), sizes, addresses, kind, vectors, lanes
                    )
                    for i in range(num):
                        write_cells(p[11] + (start + i) * stride + own, sums[i], cell)
                place = following
        memory[0] = _ZERO  # it must not be freed before its last use, by address

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


@njit(inline="always")
def _read_channels(sources, num, parameters, arrays, size):
    """Prepare the scan of 16 channels for the tokens of a tile; see `channel_inputs`. sources:
    (address, stride) of x, and those of the raw time steps. arrays: addresses of the results."""
    for i in range(num):
        places = arrays[0] + i * LINE, arrays[1] + i * LINE, arrays[2] + i * LINE
        x, raw = sources[0] + i * sources[1], sources[2] + i * sources[3]
        channel_inputs(x, raw, parameters, places, size)


@njit(inline="always")
def _scan_channel_tile(place, targets, span, sizes, decays, arrays, kind):
    """Advance the states of 16 channels by the tokens of a tile; see `_scan_tile`. decays: address
    of their A. sizes: (depth, width, bytes of a state's element)."""
    tensor, offset, writes, written = targets
    first, num, length = span
    n = 0
    while n < num:
        end = min(num, max(n + 1, length - written + 1 - first))
        after = _place_after(tensor, writes, written, length - first - end)
        # At the next step caches would hold other states. Lines are written as a whole.
        streams = np.int64(length == 1 and sizes[2] == 4 and (after + offset) % LINE == 0)
        tokens = (
            arrays[0] + n * LINE,
            arrays[1] + n * LINE,
            arrays[2] + n * LINE,
            arrays[3] + n * sizes[0] * 8,
        )
        ends = place + offset, after + offset
        scan_channels(ends, sizes[1], sizes[0], end - n, decays, tokens, streams, kind)
        n, place = end, after
    return place


def _channel_body(cell: int, kind: int):
    """Make the body of `channel_scan`. cell: bytes of an activation; kind: type of the state."""
    held = state_bytes(kind)

    def body(row):
        p = i64(row, (_PARAMETERS + 1,))
        starts, reads, writes = sequences_of(p, 12)
        num_seqs, depth, width = len(reads), p[18], p[19]
        blocks = (width + _CHANNELS - 1) // _CHANNELS
        x_row, step_row, bc_row, gate_row = (
            p[5] >> 32,
            p[5] & _LOW_BITS,
            p[6] >> 32,
            p[6] & _LOW_BITS,
        )
        state = np.empty((depth, width), np.float32)
        memory = np.empty(_TOKENS * (3 * LANES + 2 * depth) + LANES, np.float32)
        base = (np.int64(memory.ctypes.data) + LINE - 1) // LINE * LINE
        arrays = base, base + _TOKENS * LINE, base + 2 * _TOKENS * LINE, base + 3 * _TOKENS * LINE
        factors = f32(arrays[3], (_TOKENS, 2 * depth))
        while True:
            item = next_item(row)
            if item > num_seqs * blocks:
                break
            if item == num_seqs * blocks:
                clear_rows(p[11], width * cell, starts[num_seqs], p[17], width, cell)
                continue
            s, at = item // blocks, item % blocks * _CHANNELS
            count = min(_CHANNELS, width - at)
            length, written = starts[s + 1] - starts[s], count_written(writes[s])
            scratch = np.int64(state.ctypes.data) + at * held
            tensor = p[10] + at * held, depth * width * held, scratch
            place = scratch if reads[s] < 0 else tensor[0] + reads[s] * tensor[1]
            if reads[s] < 0:
                _clear(scratch, width * held, depth, count * held)
            for first in range(0, length, _TOKENS):
                num, start = min(_TOKENS, length - first), starts[s] + first
                ahead, following = min(_TOKENS, length - first - num), place
                x, raw = p[1] + start * x_row + at * cell, p[2] + start * step_row + at * cell
                gate, bc = p[4] + start * gate_row + at * cell, p[3] + start * bc_row
                for i in range(num):
                    _read_factors(bc + i * bc_row, factors[i], cell)
                _prefetch(x + num * x_row, x_row, ahead, count * cell)
                _prefetch(raw + num * step_row, step_row, ahead, count * cell)
                _prefetch(gate + num * gate_row, gate_row, ahead, count * cell)
                _prefetch(bc + num * bc_row, bc_row, ahead, 2 * depth * cell)
                for c in range(0, count, LANES):
                    given = p[9] + (at + c) * 4, p[8] + (at + c) * 4
                    sources = x + c * cell, x_row, raw + c * cell, step_row
                    _read_channels(sources, num, given, arrays, cell)
                    targets = tensor, c * held, writes[s], written
                    span, sizes = (first, num, length), (depth, width, held)
                    decays = p[7] + (at + c) * 4
                    following = _scan_channel_tile(
                        place, targets, span, sizes, decays, arrays, kind
                    )
                    target = p[11] + (start * width + at + c) * cell
                    for i in range(num):
                        own = gate + i * gate_row + c * cell
                        write_gated(arrays[2] + i * LINE, own, target + i * width * cell, cell)
                place = following
        # Memory must not be freed before its last use, by address.
        memory[0] = state[0, 0]

    return body


@cache
def channel_kernel(cell: int, kind: int) -> Kernel:
    """The kernel of `channel_scan` for activations of `cell` bytes. kind: type of the state."""
    return Kernel(_channel_body(cell, kind), heavy=True, exact=True)
