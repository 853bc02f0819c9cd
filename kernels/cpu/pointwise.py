"""Norms, gated activations and concatenation of float32 or bfloat16 rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit

from kernels.cpu.cells import elements, get, put, read_cells, write_cells
from kernels.cpu.mathlib import gelu, gelu_tanh, sigmoid, silu
from kernels.cpu.native import INLINE, Kernel, bits, f64, i64, next_item
from kernels.cpu.norm_vectors import scale_row, widen_row
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import LANES

# With fewer elements one thread is faster, since waking others takes as long.
_ENOUGH = 16384
_ROWS = 4  # rows per item
_CHUNK = 1024  # elements per item
ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_ZERO = np.float32(0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, add_one: bool) -> torch.Tensor:
    """RMS norm of x [..., H], contiguous, with weight [H]; see kernels.ops.rms_norm."""
    y = torch.empty_like(x)
    _norm(x, None, weight, (eps, add_one), (y, None))
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual, both [N, H] contiguous; see kernels.ops.add_rms_norm."""
    y, total = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual, weight, (eps, add_one), (y, total))
    return y, total


def act_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """act(first half) * second half of gate_up [N, 2F], contiguous; act: a key of ACTS."""
    num, width = gate_up.shape
    half = width // 2
    out = gate_up.new_empty((num, half))
    threads = num_threads() if num * half >= _ENOUGH else 1
    ACT_MUL[out.element_size()].run(
        threads, gate_up.data_ptr(), out.data_ptr(), num, half, ACTS[act]
    )
    return out


def scale_in_place(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a contiguous tensor by a factor."""
    num = x.numel()
    threads = num_threads() if num >= _ENOUGH else 1
    SCALE[x.element_size()].run(threads, x.data_ptr(), num, bits(factor))
    return x


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add y to x, both contiguous."""
    num = x.numel()
    threads = num_threads() if num >= _ENOUGH else 1
    ADD[x.element_size()].run(threads, x.data_ptr(), y.data_ptr(), num)
    return x


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) ** 2 of a contiguous tensor."""
    out, num = torch.empty_like(x), x.numel()
    threads = num_threads() if num >= _ENOUGH else 1
    RELU_SQUARED[x.element_size()].run(threads, x.data_ptr(), out.data_ptr(), num)
    return out


def apply_gate(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """x * activation(gate), for matrices whose rows may be apart; see kernels.ops.apply_gate."""
    num, width = x.shape
    out, size = x.new_empty((num, width)), x.element_size()
    GATE[size, int(activation == "sigmoid")].run(
        num_threads() if num * width >= _ENOUGH else 1,
        x.data_ptr(),
        x.stride(0) * size,
        gate.data_ptr(),
        gate.stride(0) * size,
        out.data_ptr(),
        num,
        width,
        int(gate.shape[1] == width),
    )
    return out


def grouped_gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: tuple[int, bool],
) -> torch.Tensor:
    """Gated RMS norm of x [N, H]; see kernels.ops.grouped_gated_norm. Rows of x and gate may lie
    apart. kind: (columns of a group, True to normalise before the gate)."""
    num, width = x.shape
    size, (group, norm_first) = x.element_size(), kind
    out = x.new_empty((num, width))
    GATED_NORM[size].run(
        num_threads() if num * width >= _ENOUGH else 1,
        x.data_ptr(),
        x.stride(0) * size,
        gate.data_ptr(),
        gate.stride(0) * size,
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        num,
        width,
        group,
        bits(eps),
        int(norm_first),
    )
    return out


def join_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate matrices [N, C] of one dtype along their columns. Their rows may lie apart."""
    num, size = len(parts[0]), parts[0].element_size()
    out = parts[0].new_empty((num, sum(part.shape[1] for part in parts)))
    first = 0
    for part in parts:
        threads = num_threads() if part.numel() >= _ENOUGH else 1
        target = out.data_ptr() + first * size
        row, width = out.shape[1] * size, part.shape[1]
        JOIN[size].run(threads, part.data_ptr(), target, num, width, row, part.stride(0) * size)
        first += width
    return out


def _norm(x, residual, weight, how, out) -> None:
    width = x.shape[-1]
    num = x.numel() // width if width else 0
    threads = num_threads() if num * width >= _ENOUGH else 1
    NORM[x.element_size()].run(
        threads,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out[0].data_ptr(),
        0 if residual is None else out[1].data_ptr(),
        num,
        width,
        bits(how[0]),
        int(how[1]),
    )


def _norm_body(cell: int):
    def body(row):
        p = i64(row, (10,))
        num, width = p[6], p[7]
        eps, extra = f64(row, (10,))[8], np.float32(p[9])
        weight, adds, size = elements(p[3], (width,), cell), p[2] != 0, width * cell
        while True:
            first = next_item(row) * _ROWS
            if first >= num:
                break
            for n in range(first, min(first + _ROWS, num)):
                x, y = (
                    elements(p[1] + n * size, (width,), cell),
                    elements(p[4] + n * size, (width,), cell),
                )
                squares = _ZERO
                if adds:
                    residual = elements(p[2] + n * size, (width,), cell)
                    x_new = elements(p[5] + n * size, (width,), cell)
                    for i in range(width):
                        put(x_new, i, get(x, i) + get(residual, i))
                    x = x_new
                for i in range(width):
                    squares += get(x, i) * get(x, i)
                scale = np.float32(1 / np.sqrt(squares / width + eps))
                for i in range(width):
                    put(y, i, get(x, i) * scale * (get(weight, i) + extra))

    return body


def _scale_body(cell: int):
    def body(row):
        p, factor = i64(row, (4,)), np.float32(f64(row, (4,))[3])
        while True:
            first = next_item(row) * _CHUNK
            if first >= p[2]:
                break
            count = min(_CHUNK, p[2] - first)
            x = elements(p[1] + first * cell, (count,), cell)
            for i in range(count):
                put(x, i, get(x, i) * factor)

    return body


def _add_body(cell: int):
    def body(row):
        p = i64(row, (4,))
        while True:
            first = next_item(row) * _CHUNK
            if first >= p[3]:
                break
            count = min(_CHUNK, p[3] - first)
            x = elements(p[1] + first * cell, (count,), cell)
            y = elements(p[2] + first * cell, (count,), cell)
            for i in range(count):
                put(x, i, get(x, i) + get(y, i))

    return body


def _relu_squared_body(cell: int):
    def body(row):
        p = i64(row, (4,))
        while True:
            first = next_item(row) * _CHUNK
            if first >= p[3]:
                break
            count = min(_CHUNK, p[3] - first)
            x = elements(p[1] + first * cell, (count,), cell)
            out = elements(p[2] + first * cell, (count,), cell)
            for i in range(count):
                value = get(x, i)
                put(out, i, _ZERO if value < _ZERO else value * value)

    return body


@njit(**INLINE)
def _factor(gate, i, has_sigmoid):
    """Element i of a gate, or the sigmoid of it."""
    return sigmoid(get(gate, i)) if has_sigmoid else get(gate, i)


def _gate_body(cell: int, has_sigmoid: int):
    """Make the body of `apply_gate`. cell: bytes of an element; has_sigmoid: 0 or 1."""

    def body(row):
        p = i64(row, (9,))
        num, width, is_wide = p[6], p[7], p[8]
        while True:
            first = next_item(row) * _ROWS
            if first >= num:
                break
            for n in range(first, min(first + _ROWS, num)):
                x = elements(p[1] + n * p[2], (width,), cell)
                gate = elements(p[3] + n * p[4], (width,), cell)
                out = elements(p[5] + n * width * cell, (width,), cell)
                if is_wide:
                    for i in range(width):
                        put(out, i, get(x, i) * _factor(gate, i, has_sigmoid))
                else:
                    single = _factor(gate, 0, has_sigmoid)
                    for i in range(width):
                        put(out, i, get(x, i) * single)

    return body


@njit(**INLINE)
def _open(y, gate):
    """Multiply y by silu(gate) in place."""
    for i in range(y.shape[0]):
        y[i] *= silu(get(gate, i))


@njit(**INLINE)
def _normalise_groups(y, weight, group, eps):
    """Apply the RMS norm to each `group` elements of y in place."""
    for first in range(0, y.shape[0], group):
        part, squares = y[first : first + group], _ZERO
        for i in range(group):
            squares += part[i] * part[i]
        scale = np.float32(1 / np.sqrt(squares / group + eps))
        for i in range(group):
            part[i] *= scale * get(weight, first + i)


@njit(**INLINE)
def _gated_vectors(places, y, group, eps, norm_first, cell):
    """Apply the gated norm to a row whose groups are whole vectors. places: addresses of x, weight
    (0: no norm), gate and target; y: memory of the row in float32."""
    x, weight, gate, target = places
    step, memory = group * cell, y.ctypes.data
    if not weight:
        widen_row(x, gate, memory, y.shape[0] // LANES, cell, 1)
        write_cells(target, y, cell)
        return
    count = group // LANES
    for number in range(y.shape[0] // group):
        shift = number * step
        used = weight + shift, gate + shift, target + shift
        if norm_first:
            squares = widen_row(x + shift, gate + shift, memory, count, cell, 0)
        else:
            squares = widen_row(x + shift, gate + shift, memory, count, cell, 1)
        scale = np.float32(1 / np.sqrt(squares / group + eps))
        if norm_first:
            scale_row(memory, used, count, scale, cell, 1)
        else:
            scale_row(memory, used, count, scale, cell, 0)


def _gated_norm_body(cell: int):
    def body(row):
        p = i64(row, (12,))
        num, width, group, eps, norm_first = p[7], p[8], p[9], f64(row, (12,))[10], p[11]
        weight, y = elements(p[5], (width,), cell), np.empty(width, np.float32)
        while True:
            n = next_item(row)
            if n >= num:
                break
            places = p[1] + n * p[2], p[5], p[3] + n * p[4], p[6] + n * width * cell
            if group % LANES == 0:
                _gated_vectors(places, y, group, eps, norm_first, cell)
                continue
            gate = elements(places[2], (width,), cell)
            read_cells(places[0], y, cell)
            if not norm_first:
                _open(y, gate)
            if p[5]:
                _normalise_groups(y, weight, group, eps)
            if norm_first:
                _open(y, gate)
            write_cells(places[3], y, cell)

    return body


def _act_mul_body(cell: int):
    def body(row):
        p = i64(row, (6,))
        num, half, act = p[3], p[4], p[5]
        chunks = (half + _CHUNK - 1) // _CHUNK
        while True:
            item = next_item(row)
            if item >= num * chunks:
                break
            n = item // chunks
            first = (item - n * chunks) * _CHUNK
            count = min(_CHUNK, half - first)
            gates = elements(p[1] + (n * 2 * half + first) * cell, (count,), cell)
            ups = elements(p[1] + ((n * 2 + 1) * half + first) * cell, (count,), cell)
            out = elements(p[2] + (n * half + first) * cell, (count,), cell)
            if act == 0:
                for i in range(count):
                    put(out, i, silu(get(gates, i)) * get(ups, i))
            elif act == 1:
                for i in range(count):
                    put(out, i, gelu_tanh(get(gates, i)) * get(ups, i))
            else:
                for i in range(count):
                    put(out, i, gelu(get(gates, i)) * get(ups, i))

    return body


def _join_body(cell: int):
    def body(row):
        p = i64(row, (7,))
        num, width = p[3], p[4]
        while True:
            first = next_item(row) * _ROWS
            if first >= num:
                break
            for n in range(first, min(first + _ROWS, num)):
                source = elements(p[1] + n * p[6], (width,), cell)
                target = elements(p[2] + n * p[5], (width,), cell)
                for i in range(width):
                    target[i] = source[i]

    return body


# By bytes per element.
NORM = {cell: Kernel(_norm_body(cell)) for cell in (4, 2)}
GATE = {(cell, act): Kernel(_gate_body(cell, act)) for cell in (4, 2) for act in (0, 1)}
GATED_NORM = {cell: Kernel(_gated_norm_body(cell)) for cell in (4, 2)}
ADD = {cell: Kernel(_add_body(cell)) for cell in (4, 2)}
SCALE = {cell: Kernel(_scale_body(cell)) for cell in (4, 2)}
RELU_SQUARED = {cell: Kernel(_relu_squared_body(cell)) for cell in (4, 2)}
ACT_MUL = {cell: Kernel(_act_mul_body(cell)) for cell in (4, 2)}
JOIN = {cell: Kernel(_join_body(cell)) for cell in (4, 2)}
