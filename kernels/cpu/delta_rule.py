"""The gated delta rule, for float32 or bfloat16 activations.

A work item is some value columns of one head of one sequence. The state's columns are independent,
so a block of them stays in the first cache over all tokens of a tile, and the state of a long
prompt leaves the processor once. Tokens are computed one after the other, so the bits do not depend
on how a sequence is cut into steps.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numba import njit

from kernels.cpu import isa
from kernels.cpu.cells import elements, get, read_cells, write_cells
from kernels.cpu.delta_vectors import BOTH, READ, STREAMED, UPDATE, state_pass
from kernels.cpu.native import INLINE, Kernel, f32, i32, i64, next_item
from kernels.cpu.state_cells import STATE_TYPES
from kernels.cpu.states import clear_rows, count_written, step_parameters
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import prefetch
from kernels.meta import StateMeta
from kernels.reference.delta_rule import NORM_EPS

_NUM_PARAMETERS = 18
_TILE = 16  # tokens whose queries and keys are normalised together
_VECTORS = 4 if isa.has("avx512f") else 1  # of a block of columns
_BLOCK = 16 * _VECTORS
_ENOUGH = 16384  # with fewer elements one thread is faster
_ZERO, _ONE, _EPS = np.float32(0), np.float32(1), np.float32(NORM_EPS)


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """The recurrence over each sequence; see kernels.ops.gated_delta_rule. qkv and gates are
    contiguous and of one dtype; the state is of a type of `STATE_TYPES`, all else is float32."""
    _, heads, key_dim, dim = state.shape
    num, width = qkv.shape
    out = qkv.new_empty((num, heads * dim))
    threads = num_threads() if num * heads * key_dim * dim >= _ENOUGH else 1
    rule_kernel(qkv.element_size(), STATE_TYPES[state.dtype]).run(
        threads,
        qkv.data_ptr(),
        gates.data_ptr(),
        rate.data_ptr(),
        bias.data_ptr(),
        state.data_ptr(),
        *step_parameters(meta),
        out.data_ptr(),
        num,
        width,
        (width - heads * dim) // (2 * key_dim),
        heads,
        key_dim,
        dim,
        _parts(len(meta.state_reads) * heads, dim, threads),
    )
    return out


def _parts(heads: int, dim: int, threads: int) -> int:
    """Number of parts into which the columns of a head are divided, so that each thread gets some
    work. heads: of all sequences."""
    parts = 1
    while heads * parts < 4 * threads and dim % (2 * parts * _BLOCK) == 0:
        parts *= 2
    return parts


@njit(**INLINE)
def _prepare(place, scalars, prepared, cell):
    """Normalise the key and query of one token and head, and compute its gates. place: addresses of
    the query, the key, and the two gates; scalars: rate and bias of the head. prepared: the token's
    key and query, then decay, beta, and the product of query and key."""
    size = (prepared.shape[0] - 3) // 2
    key, query = prepared[:size], prepared[size : 2 * size]
    read_cells(place[0], query, cell)
    read_cells(place[1], key, cell)
    keys, queries, both = _ZERO, _ZERO, _ZERO
    for i in range(size):
        keys += key[i] * key[i]
        queries += query[i] * query[i]
        both += key[i] * query[i]
    by_key = np.float32(1 / math.sqrt(keys + _EPS))
    by_query = np.float32(1 / math.sqrt(queries + _EPS) / math.sqrt(size))
    for i in range(size):
        key[i] *= by_key
        query[i] *= by_query
    beta = np.float64(get(elements(place[2], (1,), cell), 0))
    step = np.float64(get(elements(place[3], (1,), cell), 0)) + scalars[1]
    softplus = max(step, 0.0) + math.log1p(math.exp(-abs(step)))
    prepared[2 * size] = math.exp(scalars[0] * softplus)
    prepared[2 * size + 1] = 1 / (1 + math.exp(-beta))
    prepared[2 * size + 2] = both * by_key * by_query
    return 0


@njit(**INLINE)
def _row_after(writes, token, total):
    """The row of the state tensor for the state after a token of a sequence of ``total`` tokens;
    -1: it is not written. writes: the rows of the last tokens, then -1."""
    index = token - (total - count_written(writes))
    return np.int64(writes[index]) if index >= 0 else np.int64(-1)


@njit(**INLINE)
def _matrix(p, row, head, column, spare, held):
    """Address and row stride of some columns of a head's state; those of ``spare`` if it is in no
    row of the state tensor. held: bytes of an element of a state."""
    if row < 0:
        return spare
    return p[5] + ((row * p[15] + head) * p[16] * p[17] + column) * held, p[17] * held


@njit(inline="always")
def _block(p, span, column, prepared, buffers, cell, kind, vectors, lanes):  # noqa: PLR0913
    """Compute vectors * lanes columns of one head for a tile of tokens. span: (sequence, head,
    first token of the tile, its end), counted from the sequence's first token of this step;
    prepared: [tile, ...], see `_prepare`; buffers: (address of memory for this block's state, sums,
    changes, values)."""
    seq, head, first, end = span
    memory, sums, change, value = buffers
    width, size, held = vectors * lanes, p[16], 2 if kind else 4
    base = i32(p[6] + seq * 4, (2,))[0]
    total = i32(p[6] + seq * 4, (2,))[1] - base
    writes = i32(p[8] + seq * p[9] * 4, (p[9],))
    row = np.int64(i32(p[7] + seq * 4, (1,))[0])
    if first > 0:
        row = _row_after(writes, first - 1, total)
    spare = memory, np.int64(width * held)
    if first == 0 and row < 0:
        f32(memory, (size * width,))[:] = _ZERO
    source = _matrix(p, row, head, column, spare, held)
    key, step = np.int64(prepared.ctypes.data), prepared.shape[1] * 4
    to_sums, to_change = np.int64(sums.ctypes.data), np.int64(change.ctypes.data)
    places = (source[0], source[1], source[0], source[1])
    state_pass(places, (key, key), size, _ONE, to_change, to_sums, kind, vectors, lanes, READ)
    for t in range(first, end):
        gates = prepared[t - first, 2 * size :]
        decay, beta, both = gates[0], gates[1], gates[2]
        given = (base + t + 1) * p[13] - (p[15] - head) * p[17] + column  # values are the last
        read_cells(p[1] + given * cell, value[:width], cell)
        for j in range(width):
            change[j] = (value[j] - sums[j] * decay) * beta
            value[j] = sums[width + j] * decay + both * change[j]
        made = ((base + t) * p[15] + head) * p[17] + column
        write_cells(p[11] + made * cell, value[:width], cell)
        target = _matrix(p, _row_after(writes, t, total), head, column, spare, held)
        places = (source[0], source[1], target[0], target[1])
        keys = (key, key + step)
        if t + 1 < end:
            state_pass(places, keys, size, decay, to_change, to_sums, kind, vectors, lanes, BOTH)
        # At the next step caches would hold other states; to fill them would read the target first.
        elif lanes == 16 and total == 1 and target[0] % 64 == 0 and target[1] % 64 == 0:
            state_pass(
                places, keys, size, decay, to_change, to_sums, kind, vectors, lanes, STREAMED
            )
        else:
            state_pass(places, keys, size, decay, to_change, to_sums, kind, vectors, lanes, UPDATE)
        source, key = target, key + step


@njit(**INLINE)
def _prefetch_token(p, token, head, columns, cell):
    """Prefetch one head's query and key, and some columns of its values. They are a whole row apart
    from those of the token before, where the processor prefetches nothing by itself."""
    size, key_heads, heads, dim = p[16], p[14], p[15], p[17]
    row = p[1] + token * p[13] * cell
    query = row + head // (heads // key_heads) * size * cell
    for line in range(0, size * cell, 64):
        prefetch(query + line, 1, 16, 4)
        prefetch(query + key_heads * size * cell + line, 1, 16, 4)
    values = row + (p[13] - (heads - head) * dim) * cell
    for line in range(columns[0] * cell, columns[1] * cell, 64):
        prefetch(values + line, 1, 16, 4)
    return 0


@njit(**INLINE)
def _columns(p, span, columns, buffers, cell, kind):
    """Compute some columns of one head for all tokens of a sequence. span: (sequence, head);
    columns: (first, end); kind: type of the state."""
    seq, head = span
    prepared, memory, sums, change, value = buffers
    size, per_key = p[16], p[15] // p[14]
    base, after = i32(p[6] + seq * 4, (2,))[0], i32(p[6] + seq * 4, (2,))[1]
    scalars = np.float64(f32(p[3], (p[15],))[head]), np.float64(f32(p[4], (p[15],))[head])
    for first in range(0, after - base, _TILE):
        end = min(first + _TILE, after - base)
        for t in range(first, end):
            query = p[1] + ((base + t) * p[13] + head // per_key * size) * cell
            gate = p[2] + ((base + t) * 2 * p[15] + head) * cell
            place = query, query + p[14] * size * cell, gate, gate + p[15] * cell
            _prepare(place, scalars, prepared[t - first], cell)
        for t in range(end, min(end + _TILE, after - base)):
            _prefetch_token(p, base + t, head, columns, cell)
        column = columns[0]
        while column < columns[1]:
            held = memory + (column - columns[0]) * size * 4, sums, change, value
            tile = seq, head, first, end
            if columns[1] - column >= _BLOCK:
                _block(p, tile, column, prepared, held, cell, kind, _VECTORS, 16)
                column += _BLOCK
            elif columns[1] - column >= 16:
                _block(p, tile, column, prepared, held, cell, kind, 1, 16)
                column += 16
            else:
                _block(p, tile, column, prepared, held, cell, kind, 1, 1)
                column += 1
    return 0


def _rule_body(cell: int, kind: int):
    """Make the body of `gated_delta_rule`. cell: bytes of an activation; kind: type of states."""

    def body(row):
        p = i64(row, (_NUM_PARAMETERS + 1,))
        seqs, num = np.int64(i32(p[10], (1,))[0]), p[12]
        heads, dim, parts = p[15], p[17], p[18]
        width = dim // parts
        memory = np.empty(p[16] * width + 16, np.float32)
        start = (np.int64(memory.ctypes.data) + 63) // 64 * 64
        buffers = (
            np.empty((_TILE, 2 * p[16] + 3), np.float32),
            start,
            np.empty(2 * _BLOCK, np.float32),
            np.empty(_BLOCK, np.float32),
            np.empty(_BLOCK, np.float32),
        )
        while True:
            item = next_item(row)
            if item > seqs * heads * parts:
                break
            if item == seqs * heads * parts:  # padding tokens
                first = np.int64(i32(p[6], (seqs + 1,))[seqs])
                clear_rows(p[11], heads * dim * cell, first, num, heads * dim, cell)
                continue
            column = item % parts * width
            head = item // parts
            span = head // heads, head % heads
            _columns(p, span, (column, column + width), buffers, cell, kind)
        # The compiler must not free the memory before its last use, of which it sees an address.
        memory[0] = _ZERO

    return body


@cache
def rule_kernel(cell: int, kind: int) -> Kernel:
    """The kernel of `gated_delta_rule` for activations of `cell` bytes. kind: type of the state."""
    return Kernel(_rule_body(cell, kind), heavy=True)
