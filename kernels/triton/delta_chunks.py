"""The gated delta rule in chunks, for prompts.

With g the sums of a chunk's log-decays, k and q normalised and S the state before the chunk, the
changes u of the state solve a triangular system:

    (I + A) u = diag(b) (v - diag(e^g) k S)     A[i, j] = b[i] e^(g[i] - g[j]) k[i] k[j],  j < i
    out       = diag(e^g) q S + P u             P[i, j] = e^(g[i] - g[j]) q[i] k[j],       j <= i
    S after   = e^g[last] S + (diag(e^(g[last] - g)) k)^T u

`delta_prepare_kernel` computes (I + A)^-1 diag(b) and P of all chunks at once,
`delta_advance_kernel` the rest, chunk after chunk. The equations are those of Yang, Kautz and
Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.delta_rule import NORM_EPS
from kernels.triton.chunks import (
    CHUNK,
    SHORTEST,
    divide,
    find_chunk,
    inverse,
    is_chunked,
    most_chunks,
    multiply_exact,
    multiply_parts,
)
from kernels.triton.launch import Launch, arch_of
from kernels.triton.states import count_states, example_step, step_arguments
from kernels.tuning import pad_power

COLUMNS = {"sm_90": 32, "gfx942": 16}  # value columns of a program; sm_80 has too few registers
LEAST_KEY = 64  # rows of a state in registers: as many as a group of warps multiplies on sm_90
PARTS = 5  # three of (I + A)^-1 diag(b), and two of P


@triton.jit(do_not_specialize=["num_seqs", "rounds"])
def delta_prepare_kernel(  # noqa: PLR0913
    qkv, gates, rate, bias, matrices, factors, query_start, writes, num_seqs, rounds, key_heads,
    HEADS: tl.constexpr, KEY: tl.constexpr, DIM: tl.constexpr, WRITES: tl.constexpr,
    EPS: tl.constexpr, PAD_KEY: tl.constexpr, CHUNK: tl.constexpr,
    SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program computes the two matrices and the factors of one head and chunk."""
    seq, first = find_chunk(query_start, tl.program_id(0), num_seqs, rounds, CHUNK)
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    num_written = count_states(writes, seq, WRITES)
    if is_chunked(end - begin, num_written, SHORTEST) & (first < end):
        head = tl.program_id(1)
        at, row = tl.arange(0, CHUNK), tl.arange(0, PAD_KEY)
        token = first.to(tl.int64) + at
        here = token < end
        width = 2 * key_heads * KEY + HEADS * DIM
        place = head // (HEADS // key_heads) * KEY + row
        place = token[:, None] * width + place[None, :]
        mask = here[:, None] & (row < KEY)[None, :]
        query = tl.load(qkv + place, mask=mask, other=0.0)
        key = tl.load(qkv + key_heads * KEY + place, mask=mask, other=0.0)
        squares = query.to(tl.float32) * query.to(tl.float32)
        query_scale = tl.rsqrt(tl.sum(squares, 1) + EPS) * KEY**-0.5
        squares = key.to(tl.float32) * key.to(tl.float32)
        key_scale = tl.rsqrt(tl.sum(squares, 1) + EPS)
        gate = gates + token * (2 * HEADS) + head
        beta = tl.load(gate, mask=here, other=0.0).to(tl.float32)
        beta = tl.where(here, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
        step = tl.load(gate + HEADS, mask=here, other=0.0).to(tl.float32) + tl.load(bias + head)
        softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
        total = tl.cumsum(tl.where(here, tl.load(rate + head) * softplus, 0.0), 0)
        decay = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * key_scale[None, :]
        keys = tl.trans(key)
        weights = tl.dot(query, keys) * decay * query_scale[:, None]
        weights = tl.where(at[:, None] >= at[None, :], weights, 0.0)
        place = matrices + ((token * HEADS + head) * (5 * CHUNK))[:, None] + at[None, :]
        high, middle, low = divide(weights)
        tl.store(place + 3 * CHUNK, high, mask=here[:, None])
        tl.store(place + 4 * CHUNK, middle, mask=here[:, None])
        last = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)
        so_far = tl.exp(total)
        factor = factors + (token * HEADS + head) * 4
        tl.store(factor, so_far * key_scale, mask=here)
        tl.store(factor + 1, so_far * query_scale, mask=here)
        tl.store(factor + 2, tl.exp(last - total) * key_scale, mask=here)
        tl.store(factor + 3, so_far, mask=here)
        below = tl.dot(key, keys) * decay * (beta * key_scale)[:, None]
        below = tl.where(at[:, None] > at[None, :], below, 0.0)
        high, middle, low = divide(inverse(below, CHUNK) * beta[None, :])
        tl.store(place, high, mask=here[:, None])
        tl.store(place + CHUNK, middle, mask=here[:, None])
        tl.store(place + 2 * CHUNK, low, mask=here[:, None])


@triton.jit
def delta_advance_kernel(  # noqa: PLR0913
    qkv, matrices, factors, state, query_start, reads, writes, out, key_heads,
    HEADS: tl.constexpr, KEY: tl.constexpr, DIM: tl.constexpr, WRITES: tl.constexpr,
    PAD_KEY: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program computes COLUMNS value columns of one head over the chunks of one sequence."""
    seq, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    if is_chunked(end - begin, count_states(writes, seq, WRITES), SHORTEST):
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        at, row = tl.arange(0, CHUNK), tl.arange(0, PAD_KEY)
        is_column, is_key = column < DIM, row < KEY
        inside = head * KEY * DIM + row[:, None] * DIM + column[None, :]
        mask = is_key[:, None] & is_column[None, :]
        read = tl.load(reads + seq).to(tl.int64)
        before = state + read * (HEADS * KEY * DIM) + inside
        matrix = tl.load(before, mask=mask & (read >= 0), other=0.0)
        width = 2 * key_heads * KEY + HEADS * DIM
        queries = head // (HEADS // key_heads) * KEY + row
        values = 2 * key_heads * KEY + head * DIM + column
        nothing = tl.zeros([CHUNK, COLUMNS], tl.float32)
        for number in range(tl.cdiv(end - begin, CHUNK)):
            token = begin.to(tl.int64) + number * CHUNK + at
            here = token < end
            is_part, is_value = here[:, None] & is_key[None, :], here[:, None] & is_column[None, :]
            line = qkv + token[:, None] * width
            key = tl.load(line + key_heads * KEY + queries[None, :], mask=is_part, other=0.0)
            parts = divide(matrix)
            expected = multiply_exact(key, parts, nothing)
            query = tl.load(line + queries[None, :], mask=is_part, other=0.0)
            result = tl.dot(query, parts[0], tl.dot(query, parts[1], nothing))
            own = factors + (token * HEADS + head) * 4
            expected *= tl.load(own, mask=here, other=0.0)[:, None]
            result *= tl.load(own + 1, mask=here, other=0.0)[:, None]
            value = tl.load(line + values[None, :], mask=is_value, other=0.0).to(tl.float32)
            place = matrices + ((token * HEADS + head) * (5 * CHUNK))[:, None] + at[None, :]
            high = tl.load(place, mask=here[:, None], other=0.0)
            middle = tl.load(place + CHUNK, mask=here[:, None], other=0.0)
            low = tl.load(place + 2 * CHUNK, mask=here[:, None], other=0.0)
            change = multiply_parts((high, middle, low), divide(value - expected), nothing)
            high = tl.load(place + 3 * CHUNK, mask=here[:, None], other=0.0)
            middle = tl.load(place + 4 * CHUNK, mask=here[:, None], other=0.0)
            parts = divide(change)
            result = tl.dot(middle, parts[0], tl.dot(high, parts[1], result))
            result = tl.dot(high, parts[0], result)
            target = out + ((token * HEADS + head) * DIM)[:, None] + column[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=is_value)
            last = tl.minimum(begin + number * CHUNK + CHUNK, end).to(tl.int64) - 1
            kept = matrix * tl.load(factors + (last * HEADS + head) * 4 + 3)
            parts = divide(change * tl.load(own + 2, mask=here, other=0.0)[:, None])
            # Loaded again, since `tl.trans(key)` takes registers.
            line = qkv + token[None, :] * width + key_heads * KEY
            keys = tl.load(line + queries[:, None], mask=is_key[:, None] & here[None, :], other=0.0)
            matrix = multiply_exact(keys, parts, kept)
        written = tl.load(writes + seq * WRITES).to(tl.int64)
        after = state + written * (HEADS * KEY * DIM) + inside
        tl.store(after, matrix, mask=mask & (written >= 0))


def chunk_launches(
    given: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> list[Launch]:
    """The launches that compute the rule of long sequences. given: qkv and gates; weights: rate and
    bias."""
    qkv, gates = given
    _, heads, key_dim, dim = state.shape
    num, num_seqs, columns = len(qkv), len(meta.state_reads), COLUMNS[arch_of(qkv)]
    common = step_arguments(meta) | {
        "qkv": qkv,
        "matrices": qkv.new_empty((num, heads, PARTS, CHUNK)),
        "factors": qkv.new_empty((num, heads, 4), dtype=torch.float32),
        "key_heads": (qkv.shape[1] - heads * dim) // (2 * key_dim),
        "HEADS": heads,
        "KEY": key_dim,
        "DIM": dim,
        "PAD_KEY": max(LEAST_KEY, pad_power(key_dim)),
        "CHUNK": CHUNK,
        "SHORTEST": SHORTEST,
    }
    advance = common | {"state": state, "out": out, "COLUMNS": columns}
    del common["reads"]
    prepare = common | {
        "gates": gates,
        "rate": weights[0],
        "bias": weights[1],
        "num_seqs": num_seqs,
        "EPS": NORM_EPS,
        "rounds": num_seqs.bit_length(),
    }
    grid = (most_chunks(num, num_seqs), heads)
    return [
        Launch(delta_prepare_kernel, grid, prepare, 4, 1),
        Launch(delta_advance_kernel, (num_seqs, heads, triton.cdiv(dim, columns)), advance, 4, 1),
    ]


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: the sizes of Qwen3-Next."""
    numbers = torch.empty(32, device="meta")
    state = torch.empty((128, 32, 128, 128), device="meta")
    qkv = torch.empty((64, 8192), dtype=torch.bfloat16, device="meta")
    given = qkv, qkv[:, :64].contiguous()
    out = qkv[:, :4096].contiguous()
    if arch_of(qkv) in COLUMNS:
        yield from chunk_launches(given, (numbers, numbers), state, example_step(1, 64), out)
