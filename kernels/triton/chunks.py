"""Functions that the chunked forms of recurrences share: which sequences are computed in chunks,
and products of float32 matrices on tensor cores.

A long piece of a prompt is divided into chunks of CHUNK tokens, beginning with the first token of
the step. Within a chunk a recurrence is written as products of matrices; only the state at the end
of each chunk is computed one after the other. All other sequences are computed token by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta

CHUNK = 64
SHORTEST = 16  # tokens of a sequence that is computed in chunks
MOST_ROWS = 128  # of a head's state; larger ones do not fit into registers


def takes_chunks(x: torch.Tensor, state: torch.Tensor, meta: StateMeta) -> bool:
    """True if sequences of at least SHORTEST tokens are computed in chunks. With `batch_invariant`
    none are, because bits depend on where chunks begin. Products are exact for bfloat16 inputs
    only. state: [rows, heads, state rows, columns]."""
    is_long = meta.max_query_len >= SHORTEST and not meta.batch_invariant
    is_exact = x.dtype is torch.bfloat16 and state.dtype is torch.float32
    return is_long and is_exact and state.shape[2] <= MOST_ROWS


def most_chunks(num_tokens: int, num_seqs: int) -> int:
    """The number of chunks for which `find_chunk` has a number."""
    return num_tokens // CHUNK + num_seqs


@triton.jit
def is_chunked(num_tokens, num_written, SHORTEST: tl.constexpr):
    """True for a sequence that is computed in chunks: it has SHORTEST tokens or more, and its only
    state that is kept is the last one. SHORTEST: 0 if no sequence is."""
    return (SHORTEST > 0) & (num_tokens >= SHORTEST) & (num_written <= 1)


@triton.jit
def find_chunk(query_start, number, num_seqs, rounds, CHUNK: tl.constexpr):
    """Returns the sequence and the first token of a chunk. Sequence s has the numbers from
    query_start[s] // CHUNK + s on; some of them are after its last token. rounds: of a binary
    search over num_seqs sequences."""
    low, high = number * 0, number * 0 + num_seqs
    for _ in range(rounds):
        middle = (low + high) // 2
        is_later = (tl.load(query_start + middle) // CHUNK + middle <= number) & (middle > low)
        high = tl.where(is_later, high, middle)
        low = tl.where(is_later, middle, low)
    begin = tl.load(query_start + low)
    return low, begin + (number - begin // CHUNK - low) * CHUNK


@triton.jit
def divide(x):
    """Divides float32 numbers into three bfloat16 parts, whose sum has all their bits."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def multiply_exact(x, y, sums):
    """Returns sums + x @ y. x: bfloat16; y: the three parts of float32 numbers."""
    return tl.dot(x, y[0], tl.dot(x, y[1], tl.dot(x, y[2], sums)))


@triton.jit
def multiply_parts(x, y, sums):
    """Returns sums + x @ y, of three parts each; products of the least parts are left out."""
    sums = tl.dot(x[2], y[0], multiply_exact(x[0], y, sums))
    return tl.dot(x[1], y[0], tl.dot(x[1], y[1], sums))


@triton.jit
def multiply(x, y):
    """Returns x @ y of float32 matrices."""
    sums = tl.zeros([x.shape[0], y.shape[1]], tl.float32)
    return multiply_parts(divide(x), divide(y), sums)


@triton.jit
def inverse(below, CHUNK: tl.constexpr):
    """Returns the inverse of I + below, [CHUNK, CHUNK] float32. All numbers of ``below`` are below
    its diagonal; CHUNK is 64. Blocks of 16 rows on the diagonal are inverted row by row; the rest
    is I - n + n ** 2 - n ** 3, since n ** 4 is 0 for a matrix n of 4 x 4 blocks."""
    block = tl.arange(0, CHUNK // 16)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.reshape(below, [CHUNK // 16, 16, CHUNK // 16, 16])
    own = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)  # [blocks, 16, 16]
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    found = tl.where(row == column, 1.0, 0.0) + own * 0.0
    for i in range(1, 16):
        factors = tl.sum(tl.where(row == i, own, 0.0), 1)
        change = tl.sum(factors[:, :, None] * found, 1)
        found -= tl.where(row == i, change[:, None, :], 0.0)
    inner = tl.reshape(tl.where(on_diagonal, found[:, :, None, :], 0.0), [CHUNK, CHUNK])
    outer = tl.reshape(tl.where(on_diagonal, 0.0, blocks), [CHUNK, CHUNK])
    at = tl.arange(0, CHUNK)
    n = multiply(inner, outer)
    factor = tl.where(at[:, None] == at[None, :], 1.0, 0.0) - n
    factor += multiply(factor, multiply(n, n))
    return multiply(factor, inner)
