"""Recurrent states: which copies a step reads and writes, and the layers that update them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.index import Inputs, SlotState
from kernels.triton.launch import Launch

CHANNELS = 256  # per program of `short_conv_kernel`
TOKENS = 8  # per program, in a step with prompts


@triton.jit
def rows_kernel(
    slots, draw_starts, num_computed, copy, reads, writes, COPIES: tl.constexpr,
):  # fmt: skip
    """One program finds the rows of state tensors that one sequence reads and writes. COPIES: of
    each state."""
    seq = tl.program_id(0)
    slot = tl.load(slots + seq)
    held = tl.load(copy + slot, mask=slot >= 0, other=0)
    context = tl.load(num_computed + slot, mask=slot >= 0, other=0)
    tl.store(reads + seq, tl.where(context > 0, slot * COPIES + held, -1))
    num = tl.maximum(tl.load(draw_starts + seq + 1) - tl.load(draw_starts + seq), 1)
    for j in range(COPIES - 1):
        row = slot * COPIES + (held + 1 + j) % COPIES
        is_written = (slot >= 0) & (j < num)
        tl.store(writes + seq * (COPIES - 1) + j, tl.where(is_written, row, -1))


def rows_launch(state: SlotState, batch: tuple[torch.Tensor, ...], inputs: Inputs) -> Launch:
    """The launch of `rows_kernel`. batch: slots and draw_starts."""
    slots, draw_starts = batch
    args = {
        "slots": slots,
        "draw_starts": draw_starts,
        "num_computed": state.num_computed,
        "copy": state.copy,
        "reads": inputs.state_reads,
        "writes": inputs.state_writes,
        "COPIES": state.num_copies,
    }
    return Launch(rows_kernel, (len(slots),), args, 1, 1)


@triton.jit
def sequence_of(query_start, token, num_seqs, STEPS: tl.constexpr):
    """Index of the sequence of each token: the last s with query_start[s] <= token. STEPS: rounds
    of a binary search over ``num_seqs`` sequences."""
    low = token * 0
    high = low + num_seqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_before = tl.load(query_start + middle) <= token
        low = tl.where(is_before & (middle > low), middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def short_conv_kernel(  # noqa: PLR0913
    bcx, weight, bias, state, query_start, reads, writes, out, num_tokens, num_seqs, width,
    TAPS: tl.constexpr, WRITES: tl.constexpr, STEPS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program computes some channels of some tokens. Gated inputs are rounded as the state
    stores them, so that results do not depend on how a sequence is cut into steps."""
    dtype = out.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    seq = sequence_of(query_start, token, num_seqs, STEPS)
    begin = tl.load(query_start + seq)
    end = tl.load(query_start + seq + 1)
    is_real = (token < num_tokens) & (token >= begin) & (token < end)
    here = channel < width
    mask = is_real[:, None] & here[None, :]
    read = tl.load(reads + seq, mask=is_real, other=-1).to(tl.int64)
    # The row to which the state after this token is written.
    num_written = token * 0
    for j in range(WRITES):
        one = tl.load(writes + seq * WRITES + j, mask=is_real, other=-1)
        num_written += (one >= 0).to(tl.int32)
    entry = num_written - (end - token)
    written = tl.load(writes + seq * WRITES + entry, mask=is_real & (entry >= 0), other=-1)
    written = written.to(tl.int64)
    size = (TAPS - 1) * width
    row = token.to(tl.int64) * (3 * width)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        is_new = (token - back >= begin)[:, None] & mask
        place = bcx + (row - back * 3 * width)[:, None] + channel[None, :]
        gate = tl.load(place, mask=is_new, other=0.0).to(tl.float32)
        x = tl.load(place + 2 * width, mask=is_new, other=0.0).to(tl.float32)
        old = TAPS - 1 + (token - back - begin)  # index in the state before the step
        is_old = mask & (token - back < begin)[:, None] & (read >= 0)[:, None]
        place = state + (read * size + old * width)[:, None] + channel[None, :]
        before = tl.load(place, mask=is_old, other=0.0)
        value = tl.where(is_new, (gate * x).to(dtype), before)
        factor = tl.load(weight + channel * TAPS + tap, mask=here, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor[None, :]
        if tap > 0:
            place = state + (written * size + (tap - 1) * width)[:, None] + channel[None, :]
            tl.store(place, value, mask=mask & (written >= 0)[:, None])
    if bias is not None:
        total += tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)[None, :]
    gate = tl.load(bcx + row[:, None] + width + channel[None, :], mask=mask, other=0.0)
    result = (gate.to(tl.float32) * total.to(dtype).to(tl.float32)).to(dtype)
    target = out + (token.to(tl.int64) * width)[:, None] + channel[None, :]
    is_row = (token < num_tokens)[:, None] & here[None, :]
    tl.store(target, tl.where(mask, result, 0.0), mask=is_row)


def short_conv(
    bcx: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """Gated causal convolution over each sequence; see kernels.ops.short_conv."""
    out = bcx.new_empty((len(bcx), bcx.shape[1] // 3))
    if len(bcx):
        conv_launch(bcx, (weight, bias), state, meta, out).run()
    return out


def conv_launch(
    bcx: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> Launch:
    """The launch of `short_conv_kernel`. weights: those of the convolution, and its bias."""
    weight, bias = weights
    num, width = out.shape
    num_seqs = len(meta.state_reads)
    tokens = 1 if meta.max_query_len <= 1 else TOKENS
    args = {
        "bcx": bcx,
        "weight": weight,
        "bias": bias,
        "state": state,
        "query_start": meta.query_start,
        "reads": meta.state_reads,
        "writes": meta.state_writes,
        "out": out,
        "num_tokens": num,
        "num_seqs": num_seqs,
        "width": width,
        "TAPS": weight.shape[1],
        "WRITES": meta.state_writes.shape[1],
        "STEPS": num_seqs.bit_length(),
        "TOKENS": tokens,
        "CHANNELS": CHANNELS,
    }
    grid = (triton.cdiv(num, tokens), triton.cdiv(width, CHANNELS))
    return Launch(short_conv_kernel, grid, args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: the sizes of LFM2, with and without drafts and bias."""
    column = torch.empty(64, dtype=torch.int32, device="meta")
    table = torch.empty((64, 512), dtype=torch.int32, device="meta")
    state = SlotState(column, table, table[None], column[:1], column, 2)
    inputs = Inputs(column, column, table, column, table[None], column, table[:, :1], column[:1])
    yield rows_launch(state, (column, column), inputs)
    width = 1024
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.empty((width, 3), dtype=dtype, device="meta")
        bcx = torch.empty((64, 3 * width), dtype=dtype, device="meta")
        rows = torch.empty((128, 2, width), dtype=dtype, device="meta")
        for longest, writes, bias in ((1, 1, None), (64, 5, weight[:, 0].contiguous())):
            places = torch.empty((64, writes), dtype=torch.int32, device="meta")
            meta = StateMeta(column, column, places, column[:1], 64 // longest, longest)
            yield conv_launch(bcx, (weight, bias), rows, meta, bcx[:, :width].contiguous())
