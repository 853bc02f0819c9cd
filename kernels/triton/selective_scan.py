"""Selective scans over the tokens of each sequence, one token after the other: by heads (Mamba-2)
and by channels (Mamba-1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan
from kernels.triton.launch import Launch
from kernels.triton.states import count_states, example_step, step_arguments
from kernels.tuning import pad_power

COLUMNS = 16  # of a head's state per program
CHANNELS = 64  # per program


@triton.jit
def softplus(x):
    """Returns log(1 + e ** x)."""
    u = tl.exp(-tl.abs(x))
    # A series of log(1 + u) = 2 * atanh(u / (2 + u)), exact for small u.
    s = u / (2.0 + u)
    square = s * s
    series = 2.0 / 15.0
    for n in tl.static_range(7):
        series = series * square + 2.0 / (13 - 2 * n)
    return tl.maximum(x, 0.0) + series * s


@triton.jit(do_not_specialize=["least", "most", "num_tokens"])
def head_kernel(  # noqa: PLR0913
    xbc, dt, decay, skip, dt_bias, state, out, query_start, reads, writes, least, most, num_tokens,
    stride_xbc, stride_dt, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """One program advances some columns of one head's state by all tokens of one sequence; the last
    sequence's programs also clear the rows after it."""
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
    held = tl.load(place, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    a, d = tl.load(decay + head), tl.load(skip + head)
    bias = tl.load(dt_bias + head)
    group = head // (HEADS // GROUPS)
    for number in range(end - begin):
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
        # As if each token were a step, so that results do not depend on how prompts are cut.
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
        # As if each token were a step, so that results do not depend on how prompts are cut.
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
        head_launch((xbc, dt), layer, state, meta, out).run()
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


def head_launch(
    inputs: tuple[torch.Tensor, torch.Tensor],
    layer: HeadScan,
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> Launch:
    """The launch of `head_kernel`. inputs: xbc and dt."""
    xbc, dt = inputs
    _, heads, size, width = state.shape
    args = step_arguments(meta) | {
        "num_tokens": len(xbc),
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
        "COLUMNS": COLUMNS,
    }
    grid = (len(meta.state_reads), heads, triton.cdiv(width, COLUMNS))
    return Launch(head_kernel, grid, args, 4, 1)


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
                rows = torch.empty((64, columns + heads), dtype=dtype, device="meta")
                out = rows.new_empty((64, heads * width))
                layer = HeadScan(floats, floats, floats)
                given = rows[:, :columns], rows[:, columns:]
                yield head_launch(given, layer, state, meta, out)
            x = torch.empty((64, 8192), dtype=dtype, device="meta")
            state = torch.empty((128, 16, 8192), device="meta")
            channels = ChannelScan(state[0], state[0, 0], state[0, 0])
            yield channel_launch((x, x, x[:, :32], x), channels, state, meta, x)
