"""The gated delta rule, token by token, and in chunks for long sequences (`delta_chunks`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.delta_rule import NORM_EPS
from kernels.triton.chunks import SHORTEST, is_chunked, takes_chunks
from kernels.triton.delta_chunks import COLUMNS as COLUMNS_BY_ARCH
from kernels.triton.delta_chunks import chunk_launches
from kernels.triton.launch import Launch, arch_of
from kernels.triton.states import count_states, example_step, step_arguments
from kernels.tuning import pad_power

COLUMNS = 32  # value columns of a program


@triton.jit
def gated_delta_rule_kernel(  # noqa: PLR0913
    qkv, gates, rate, bias, state, query_start, reads, writes, out, key_heads,
    HEADS: tl.constexpr, KEY: tl.constexpr, DIM: tl.constexpr, WRITES: tl.constexpr,
    EPS: tl.constexpr, PAD_KEY: tl.constexpr, COLUMNS: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program computes COLUMNS value columns of one head over the tokens of one sequence. Its
    block of the state, [PAD_KEY, COLUMNS] float32, stays in registers. Sequences that are computed
    in chunks are left out."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, PAD_KEY)
    here, is_key = column < DIM, row < KEY
    place = head * KEY * DIM + row[:, None] * DIM + column[None, :]
    mask = is_key[:, None] & here[None, :]
    begin = tl.load(query_start + seq)
    end = tl.load(query_start + seq + 1)
    num_written = count_states(writes, seq, WRITES)
    if is_chunked(end - begin, num_written, SHORTEST):
        return
    read = tl.load(reads + seq).to(tl.int64)
    matrix = tl.load(state + read * (HEADS * KEY * DIM) + place, mask=mask & (read >= 0), other=0.0)
    matrix = matrix.to(tl.float32)
    factor = tl.load(rate + head)
    added = tl.load(bias + head)
    width = 2 * key_heads * KEY + HEADS * DIM
    first = head // (HEADS // key_heads) * KEY + row
    token = begin.to(tl.int64)
    for _ in range(begin, end):
        start = qkv + token * width
        query = tl.load(start + first, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(start + key_heads * KEY + first, mask=is_key, other=0.0).to(tl.float32)
        values = start + 2 * key_heads * KEY + head * DIM + column
        value = tl.load(values, mask=here, other=0.0).to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + EPS) * KEY**-0.5)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + EPS)
        gate = gates + token * (2 * HEADS) + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
        step = tl.load(gate + HEADS).to(tl.float32) + added
        softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
        matrix = matrix * tl.exp(factor * softplus)
        change = (value - tl.sum(matrix * key[:, None], 0)) * beta
        matrix += key[:, None] * change[None, :]
        result = tl.sum(matrix * query[:, None], 0)
        target = out + token * (HEADS * DIM) + head * DIM + column
        tl.store(target, result.to(out.dtype.element_ty), mask=here)
        entry = num_written - (end - token)
        if entry >= 0:
            written = tl.load(writes + seq * WRITES + entry).to(tl.int64)
            copy = state + written * (HEADS * KEY * DIM) + place
            tl.store(copy, matrix.to(state.dtype.element_ty), mask=mask)
        # Rounded after each token, so that results do not depend on how prompts are cut.
        matrix = matrix.to(state.dtype.element_ty).to(tl.float32)
        token += 1


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """See kernels.ops.gated_delta_rule."""
    _, heads, _, dim = state.shape
    # Only rows of sequences are computed.
    out = qkv.new_zeros((len(qkv), heads * dim))
    if len(qkv):
        step = ((qkv, gates), (rate, bias), state, meta, out)
        is_divided = takes_chunks(qkv, state, meta) and has_chunks(qkv)
        for launch in chunk_launches(*step) if is_divided else ():
            launch.run()
        rule_launch(*step, SHORTEST if is_divided else 0).run()
    return out


def has_chunks(x: torch.Tensor) -> bool:
    """True if a device computes long sequences in chunks.

    Not on sm_90, where Triton 3.6 compiles ``delta_advance_kernel`` wrongly: on an H100, results of
    most sizes were wrong, and of some it read addresses that do not exist. With two warps, without
    instructions for four, results of the size that was tried were right."""
    is_wrong = x.is_cuda and arch_of(x) == "sm_90"
    return arch_of(x) in COLUMNS_BY_ARCH and not is_wrong


def rule_launch(
    given: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
    least: int = 0,
) -> Launch:
    """The launch of `gated_delta_rule_kernel`. given: qkv and gates; weights: rate and bias.
    least: tokens of the shortest sequence that is computed in chunks; 0 if none is."""
    _, heads, key_dim, dim = state.shape
    columns = min(COLUMNS, pad_power(dim))
    args = step_arguments(meta) | {
        "qkv": given[0],
        "gates": given[1],
        "rate": weights[0],
        "bias": weights[1],
        "state": state,
        "out": out,
        "key_heads": (given[0].shape[1] - heads * dim) // (2 * key_dim),
        "HEADS": heads,
        "KEY": key_dim,
        "DIM": dim,
        "EPS": NORM_EPS,
        "PAD_KEY": pad_power(key_dim),
        "COLUMNS": columns,
        "SHORTEST": least,
    }
    grid = (len(meta.state_reads), heads, triton.cdiv(dim, columns))
    return Launch(gated_delta_rule_kernel, grid, args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: the sizes of Qwen3-Next, with and without drafts."""
    numbers = torch.empty(32, device="meta")
    state = torch.empty((128, 32, 128, 128), device="meta")
    for dtype in (torch.bfloat16, torch.float32):
        qkv = torch.empty((64, 8192), dtype=dtype, device="meta")
        gates, out = qkv[:, :64].contiguous(), qkv[:, :4096].contiguous()
        for meta in (example_step(1), example_step(5)):
            yield rule_launch((qkv, gates), (numbers, numbers), state, meta, out, SHORTEST)
