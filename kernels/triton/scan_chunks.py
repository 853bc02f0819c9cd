"""The selective scan by heads in chunks, for prompts.

With g the sums of a chunk's t * A, and S the state before the chunk:

    y       = diag(e^g) c S + M x + D x      M[i, j] = e^(g[i] - g[j]) t[j] c[i] b[j],  j <= i
    S after = e^g[last] S + b^T diag(e^(g[last] - g) t) x

`scan_prepare_kernel` computes M of all chunks at once, `scan_advance_kernel` the rest, chunk after
chunk. The equations are those of Dao and Gu, "Transformers are SSMs: Generalized Models and
Efficient Algorithms Through Structured State Space Duality", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.selective_scan import HeadScan
from kernels.triton.activation import softplus
from kernels.triton.chunks import (
    CHUNK,
    SHORTEST,
    divide,
    find_chunk,
    is_chunked,
    most_chunks,
    multiply_exact,
)
from kernels.triton.launch import Launch
from kernels.triton.states import count_states, example_step, step_arguments
from kernels.tuning import pad_power

COLUMNS = 16  # of a head's state per program
PARTS = 2  # of M


@triton.jit(do_not_specialize=["least", "most", "num_seqs", "rounds"])
def scan_prepare_kernel(  # noqa: PLR0913
    xbc, dt, decay, dt_bias, matrices, factors, query_start, writes, least, most, num_seqs,
    rounds, stride_xbc, stride_dt, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, WRITES: tl.constexpr,
    CHUNK: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program computes the matrix M and the factors of one head and chunk."""
    seq, start = find_chunk(query_start, tl.program_id(0), num_seqs, rounds, CHUNK)
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    if is_chunked(end - begin, count_states(writes, seq, WRITES), SHORTEST) & (start < end):
        head = tl.program_id(1)
        at, row = tl.arange(0, CHUNK), tl.arange(0, PAD)
        here, first = at < end - start, start.to(tl.int64)
        raw = tl.load(dt + first * stride_dt + head + at * stride_dt, mask=here, other=0.0)
        time = softplus(raw.to(tl.float32) + tl.load(dt_bias + head))
        time = tl.where(here, tl.minimum(tl.maximum(time, least), most), 0.0)
        total = tl.cumsum(time * tl.load(decay + head), 0)
        mask = here[:, None] & (row < SIZE)[None, :]
        own = HEADS * WIDTH + head // (HEADS // GROUPS) * SIZE + row
        line = xbc + first * stride_xbc + at[:, None] * stride_xbc + own[None, :]
        b = tl.load(line, mask=mask, other=0.0)
        c = tl.load(line + GROUPS * SIZE, mask=mask, other=0.0)
        weights = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * time[None, :]
        weights = tl.where(at[:, None] >= at[None, :], weights * tl.dot(c, tl.trans(b)), 0.0)
        high, middle, _ = divide(weights)
        target = matrices + (first * HEADS + head) * (2 * CHUNK)
        target += at[:, None] * (HEADS * 2 * CHUNK) + at[None, :]
        tl.store(target, high, mask=here[:, None])
        tl.store(target + CHUNK, middle, mask=here[:, None])
        last = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)
        target = factors + (first * HEADS + head) * 2 + at * (HEADS * 2)
        tl.store(target, tl.exp(total), mask=here)
        tl.store(target + 1, tl.exp(last - total) * time, mask=here)


@triton.jit
def scan_advance_kernel(  # noqa: PLR0913
    xbc, matrices, factors, skip, state, out, query_start, reads, writes, stride_xbc,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAD: tl.constexpr, COLUMNS: tl.constexpr, WRITES: tl.constexpr, CHUNK: tl.constexpr,
    SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program advances some columns of one head's state by the chunks of one sequence."""
    seq, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    if is_chunked(end - begin, count_states(writes, seq, WRITES), SHORTEST):
        at, row = tl.arange(0, CHUNK), tl.arange(0, PAD)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = row < SIZE, column < WIDTH
        mask = is_row[:, None] & is_column[None, :]
        inside = row[:, None] * WIDTH + column[None, :]
        read = tl.load(reads + seq).to(tl.int64)
        before = state + (read * HEADS + head) * (SIZE * WIDTH) + inside
        held = tl.load(before, mask=mask & (read >= 0), other=0.0)
        own = HEADS * WIDTH + head // (HEADS // GROUPS) * SIZE + row
        nothing = tl.zeros([CHUNK, COLUMNS], tl.float32)
        for number in range(tl.cdiv(end - begin, CHUNK)):
            token = begin.to(tl.int64) + number * CHUNK + at
            here = token < end
            is_part, is_value = here[:, None] & is_row[None, :], here[:, None] & is_column[None, :]
            line = xbc + token[:, None] * stride_xbc
            c = tl.load(line + GROUPS * SIZE + own[None, :], mask=is_part, other=0.0)
            high, middle, _ = divide(held)
            y = tl.dot(c, high, tl.dot(c, middle, nothing))
            factor = factors + (token * HEADS + head) * 2
            y *= tl.load(factor, mask=here, other=0.0)[:, None]
            x = tl.load(line + (head * WIDTH + column)[None, :], mask=is_value, other=0.0)
            matrix = matrices + ((token * HEADS + head) * (2 * CHUNK))[:, None] + at[None, :]
            high = tl.load(matrix, mask=here[:, None], other=0.0)
            middle = tl.load(matrix + CHUNK, mask=here[:, None], other=0.0)
            y = tl.dot(high, x, tl.dot(middle, x, y))
            y += x.to(tl.float32) * tl.load(skip + head)
            target = out + ((token * HEADS + head) * WIDTH)[:, None] + column[None, :]
            tl.store(target, y.to(out.dtype.element_ty), mask=is_value)
            of_x = tl.load(factor + 1, mask=here, other=0.0)
            added = divide(x.to(tl.float32) * of_x[:, None])
            last = tl.minimum(begin + number * CHUNK + CHUNK, end).to(tl.int64) - 1
            kept = held * tl.load(factors + (last * HEADS + head) * 2)
            b = tl.load(line + own[None, :], mask=is_part, other=0.0)
            held = multiply_exact(tl.trans(b), added, kept)
        written = tl.load(writes + seq * WRITES).to(tl.int64)
        after = state + (written * HEADS + head) * (SIZE * WIDTH) + inside
        tl.store(after, held, mask=mask & (written >= 0))


def head_arguments(
    inputs: tuple[torch.Tensor, torch.Tensor],
    layer: HeadScan,
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> dict[str, Any]:
    """The arguments that kernels of the scan by heads have in common. inputs: xbc and dt."""
    xbc, dt = inputs
    _, heads, size, width = state.shape
    return step_arguments(meta) | {
        "xbc": xbc,
        "dt": dt,
        "decay": layer.decay,
        "skip": layer.skip,
        "dt_bias": layer.dt_bias,
        "state": state,
        "out": out,
        "least": layer.dt_limits[0],
        "most": layer.dt_limits[1],
        "stride_xbc": xbc.stride(0),
        "stride_dt": dt.stride(0),
        "HEADS": heads,
        "GROUPS": (xbc.shape[1] - heads * width) // (2 * size),
        "SIZE": size,
        "WIDTH": width,
        "PAD": pad_power(size),
    }


def chunk_launches(args: Mapping[str, Any], num_tokens: int, num_seqs: int) -> list[Launch]:
    """The launches that compute the scan of long sequences. ``args``: see `head_arguments`."""
    xbc, heads = args["xbc"], args["HEADS"]
    args = dict(args) | {
        "matrices": xbc.new_empty((num_tokens, heads, PARTS, CHUNK)),
        "factors": xbc.new_empty((num_tokens, heads, 2), dtype=torch.float32),
        "num_seqs": num_seqs,
        "rounds": num_seqs.bit_length(),
        "COLUMNS": COLUMNS,
        "CHUNK": CHUNK,
        "SHORTEST": SHORTEST,
    }
    columns = triton.cdiv(args["WIDTH"], COLUMNS)

    def launch(kernel: Any, *grid: int) -> Launch:
        return Launch(kernel, grid, {name: args[name] for name in kernel.arg_names}, 4, 1)

    return [
        launch(scan_prepare_kernel, most_chunks(num_tokens, num_seqs), heads),
        launch(scan_advance_kernel, num_seqs, heads, columns),
    ]


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: the sizes of Granite 4 H."""
    heads, size, width = 48, 128, 64
    floats = torch.empty(heads, device="meta")
    state = torch.empty((128, heads, size, width), device="meta")
    xbc = torch.empty((64, heads * width + 2 * size), dtype=torch.bfloat16, device="meta")
    rows = xbc.new_empty((64, 2 * heads * width + 2 * size + heads))
    out = xbc.new_empty((64, heads * width))
    layer, given = HeadScan(floats, floats, floats), (xbc, rows[:, -heads:])
    args = head_arguments(given, layer, state, example_step(1, 64), out)
    yield from chunk_launches(args, len(xbc), 1)
