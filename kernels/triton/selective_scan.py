"""Selective scans over the tokens of each sequence: by heads (Mamba-2) and by channels (Mamba-1).
They go token by token, but by heads also in chunks (`scan_chunks`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan
from kernels.triton.activation import softplus
from kernels.triton.chunks import SHORTEST, is_chunked, takes_chunks
from kernels.triton.launch import Launch
from kernels.triton.scan_chunks import chunk_launches, head_arguments
from kernels.triton.states import count_states, example_step, step_arguments
from kernels.tuning import pad_power

COLUMNS = 16  # of a head's state per program
CHANNELS = 64  # per program


@triton.jit(do_not_specialize=["least", "most", "num_tokens"])
def head_kernel(  # noqa: PLR0913
    xbc, dt, decay, skip, dt_bias, state, out, query_start, reads, writes, least, most, num_tokens,
    stride_xbc, stride_dt, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, WRITES: tl.constexpr,
    SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program advances some columns of one head's state by all tokens of one sequence, unless
    it is computed in chunks; the last sequence's programs also clear the rows after it."""
    seq, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, PAD)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    is_row = row < SIZE
    mask = is_row[:, None] & is_column[None, :]
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    num_written = count_states(writes, seq, WRITES)
    read = tl.load(reads + seq).to(tl.int64)
    inside = row[:, None] * WIDTH + column[None, :]
    place = state + (read * HEADS + head) * (SIZE * WIDTH) + inside
    num = tl.where(is_chunked(end - begin, num_written, SHORTEST), 0, end - begin)
    is_read = (read >= 0) & (num > 0)
    held = tl.load(place, mask=mask & is_read, other=0.0).to(tl.float32)
    a, d = tl.load(decay + head), tl.load(skip + head)
    bias = tl.load(dt_bias + head)
    group = head // (HEADS // GROUPS)
    for number in range(num):
        token = begin.to(tl.int64) + number
        line = xbc + token * stride_xbc
        x = tl.load(line + head * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        own = line + HEADS * WIDTH + group * SIZE + row
        b = tl.load(own, mask=is_row, other=0.0).to(tl.float32)
        c = tl.load(own + GROUPS * SIZE, mask=is_row, other=0.0).to(tl.float32)
        raw = tl.load(dt + token * stride_dt + head).to(tl.float32)
        time = softplus(raw + bias)
        time = tl.minimum(tl.maximum(time, least), most)
        held = held * tl.exp(time * a) + b[:, None] * (x * time)[None, :]
        y = tl.sum(c[:, None] * held, 0) + x * d
        target = out + (token * HEADS + head) * WIDTH + column
        tl.store(target, y.to(out.dtype.element_ty), mask=is_column)
        entry = token - (end - num_written)
        if entry >= 0:
            written = tl.load(writes + seq * WRITES + entry).to(tl.int64)
            place = state + (written * HEADS + head) * (SIZE * WIDTH) + inside
            tl.store(place, held.to(state.dtype.element_ty), mask=mask)
        # Rounded after each token, so that results do not depend on how prompts are cut.
        held = held.to(state.dtype.element_ty).to(tl.float32)
    if seq == tl.num_programs(0) - 1:
        for number in range(num_tokens - end):
            token = end.to(tl.int64) + number
            target = out + (token * HEADS + head) * WIDTH + column
            tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_tokens"])
def channel_kernel(  # noqa: PLR0913
    x, dt, bc, gate, decay, skip, dt_bias, state, out, query_start, reads, writes, num_tokens,
    stride_x, stride_dt, stride_bc, stride_gate, width,
    SIZE: tl.constexpr, PAD: tl.constexpr, CHANNELS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """One program advances some channels' states by all tokens of one sequence; the last sequence's
    programs also clear the rows after it."""
    seq = tl.program_id(0)
    row = tl.arange(0, PAD)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < width
    is_row = row < SIZE
    mask = is_row[:, None] & is_channel[None, :]
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    num_written = count_states(writes, seq, WRITES)
    read = tl.load(reads + seq).to(tl.int64)
    inside = row[:, None] * width + channel[None, :]
    place = state + read * SIZE * width + inside
    held = tl.load(place, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    a = tl.load(decay + inside, mask=mask, other=0.0)
    d = tl.load(skip + channel, mask=is_channel, other=0.0)
    bias = tl.load(dt_bias + channel, mask=is_channel, other=0.0)
    for number in range(end - begin):
        token = begin.to(tl.int64) + number
        value = tl.load(x + token * stride_x + channel, mask=is_channel, other=0.0).to(tl.float32)
        raw = tl.load(dt + token * stride_dt + channel, mask=is_channel, other=0.0).to(tl.float32)
        b = tl.load(bc + token * stride_bc + row, mask=is_row, other=0.0).to(tl.float32)
        c = tl.load(bc + token * stride_bc + SIZE + row, mask=is_row, other=0.0).to(tl.float32)
        z = tl.load(gate + token * stride_gate + channel, mask=is_channel, other=0.0).to(tl.float32)
        time = softplus(raw + bias)
        held = held * tl.exp(time[None, :] * a) + b[:, None] * (value * time)[None, :]
        y = tl.sum(c[:, None] * held, 0) + value * d
        y = y * (z / (1.0 + tl.exp(-z)))
        tl.store(out + token * width + channel, y.to(out.dtype.element_ty), mask=is_channel)
        entry = token - (end - num_written)
        if entry >= 0:
            written = tl.load(writes + seq * WRITES + entry).to(tl.int64)
            place = state + written * SIZE * width + inside
            tl.store(place, held.to(state.dtype.element_ty), mask=mask)
        # Rounded after each token, so that results do not depend on how prompts are cut.
        held = held.to(state.dtype.element_ty).to(tl.float32)
    if seq == tl.num_programs(0) - 1:
        for number in range(num_tokens - end):
            token = end.to(tl.int64) + number
            target = out + token * width + channel
            tl.store(target, tl.zeros([CHANNELS], out.dtype.element_ty), mask=is_channel)


def head_scan(
    xbc: torch.Tensor, dt: torch.Tensor, layer: HeadScan, state: torch.Tensor, meta: StateMeta
) -> torch.Tensor:
    """See kernels.ops.head_scan."""
    out = xbc.new_empty((len(xbc), state.shape[1] * state.shape[3]))
    if len(xbc):
        for launch in head_launches((xbc, dt), layer, state, meta, out):
            launch.run()
    return out


def channel_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    bc: torch.Tensor,
    gate: torch.Tensor,
    layer: ChannelScan,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """See kernels.ops.channel_scan."""
    out = x.new_empty(x.shape)
    if len(x):
        channel_launch((x, dt, bc, gate), layer, state, meta, out).run()
    return out


def head_launches(
    inputs: tuple[torch.Tensor, torch.Tensor],
    layer: HeadScan,
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> list[Launch]:
    """The launches of `head_kernel` and of the chunks of long sequences. inputs: xbc and dt."""
    xbc = inputs[0]
    args = head_arguments(inputs, layer, state, meta, out)
    is_divided = takes_chunks(xbc, state, meta)
    grid = (len(meta.state_reads), args["HEADS"], triton.cdiv(args["WIDTH"], COLUMNS))
    own = {"COLUMNS": COLUMNS, "SHORTEST": SHORTEST if is_divided else 0, "num_tokens": len(xbc)}
    launches = [Launch(head_kernel, grid, args | own, 4, 1)]
    if is_divided:
        launches += chunk_launches(args, len(xbc), len(meta.state_reads))
    return launches


def channel_launch(
    inputs: tuple[torch.Tensor, ...],
    layer: ChannelScan,
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> Launch:
    """The launch of `channel_kernel`. inputs: x, dt, bc and gate."""
    x, dt, bc, gate = inputs
    _, size, width = state.shape
    args = step_arguments(meta) | {
        "num_tokens": len(x),
        "x": x,
        "dt": dt,
        "bc": bc,
        "gate": gate,
        "decay": layer.decay,
        "skip": layer.skip,
        "dt_bias": layer.dt_bias,
        "state": state,
        "out": out,
        "stride_x": x.stride(0),
        "stride_dt": dt.stride(0),
        "stride_bc": bc.stride(0),
        "stride_gate": gate.stride(0),
        "width": width,
        "SIZE": size,
        "PAD": pad_power(size),
        "CHANNELS": CHANNELS,
    }
    grid = (len(meta.state_reads), triton.cdiv(width, CHANNELS))
    return Launch(channel_kernel, grid, args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: sizes of Granite 4 H, Falcon-H1 and Jamba, with and without
    drafts."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for meta in (example_step(1), example_step(5)):
            for heads, groups, size, width in ((48, 1, 128, 64), (24, 2, 256, 64)):
                floats = torch.empty(heads, device="meta")
                state = torch.empty((128, heads, size, width), device="meta")
                columns = heads * width + 2 * groups * size
                xbc = torch.empty((64, columns), dtype=dtype, device="meta")
                rows = xbc.new_empty((64, heads * width + columns + heads))
                out = xbc.new_empty((64, heads * width))
                layer = HeadScan(floats, floats, floats)
                given = xbc, rows[:, heads * width + columns :]
                yield from head_launches(given, layer, state, meta, out)
            x = torch.empty((64, 8192), dtype=dtype, device="meta")
            state = torch.empty((128, 16, 8192), device="meta")
            channels = ChannelScan(state[0], state[0, 0], state[0, 0])
            yield channel_launch((x, x, x[:, :32], x), channels, state, meta, x)
