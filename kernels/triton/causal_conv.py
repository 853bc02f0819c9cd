"""Causal convolution of each channel over the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.meta import StateMeta
from kernels.reference.causal_conv import check_activation
from kernels.triton.activation import activated
from kernels.triton.launch import Launch
from kernels.triton.states import count_states, example_step, step_arguments

CHANNELS = 128  # per program
TOKENS = 16  # per program, in a step with prompts


@triton.jit
def find_sequence(query_start, token, num_seqs, rounds):
    """Index of each token's sequence: the last one that starts at the token or before it. rounds:
    of a binary search over num_seqs sequences."""
    low = token * 0
    high = low + num_seqs
    for _ in range(rounds):
        middle = (low + high) // 2
        is_later = (tl.load(query_start + middle) <= token) & (middle > low)
        high = tl.where(is_later, high, middle)
        low = tl.where(is_later, middle, low)
    return low


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "rounds"])
def conv_kernel(  # noqa: PLR0913
    x, weight, bias, state, query_start, reads, writes, out, num_tokens, num_seqs, rounds, stride,
    width, TAPS: tl.constexpr, WRITES: tl.constexpr, ACT: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program computes some channels of some tokens, and writes the states after these tokens.
    stride: elements between rows of x; WRITES: states that a sequence may write."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    seq = find_sequence(query_start, token, num_seqs, rounds)
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    is_real = (token < num_tokens) & (token >= begin) & (token < end)
    is_channel = channel < width
    mask = is_real[:, None] & is_channel[None, :]
    read = tl.load(reads + seq, mask=is_real, other=-1).to(tl.int64)
    entry = count_states(writes, seq, WRITES) - (end - token)
    is_written = is_real & (entry >= 0)
    written = tl.load(writes + seq * WRITES + entry, mask=is_written, other=0).to(tl.int64)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        is_new = source >= begin
        place = x + source.to(tl.int64)[:, None] * stride + channel[None, :]
        new = tl.load(place, mask=mask & is_new[:, None], other=0.0)
        # Row of the state before the step.
        row = read * (TAPS - 1) + (source - begin + TAPS - 1)
        is_old = mask & ((source < begin) & (read >= 0))[:, None]
        old = tl.load(state + row[:, None] * width + channel[None, :], mask=is_old, other=0.0)
        value = tl.where(is_new[:, None], new, old)
        factor = tl.load(weight + channel * TAPS + tap, mask=is_channel, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
        if tap > 0:
            row = written * (TAPS - 1) + tap - 1
            place = state + row[:, None] * width + channel[None, :]
            tl.store(place, value, mask=mask & is_written[:, None])
    if ACT != "":
        total = activated(total, ACT)
    target = out + token.to(tl.int64)[:, None] * width + channel[None, :]
    result = tl.where(mask, total, 0.0).to(out.dtype.element_ty)
    tl.store(target, result, mask=(token < num_tokens)[:, None] & is_channel[None, :])


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    meta: StateMeta,
) -> torch.Tensor:
    """See kernels.ops.causal_conv."""
    check_activation(activation)
    out = x.new_empty(x.shape)
    if len(x):
        conv_launch(x, (weight, bias, activation), state, meta, out).run()
    return out


def conv_launch(
    x: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor | None, str],
    state: torch.Tensor,
    meta: StateMeta,
    out: torch.Tensor,
) -> Launch:
    """The launch of `conv_kernel`. layer: weight, bias and activation; out: [N, C], contiguous."""
    weight, bias, activation = layer
    num, width = x.shape
    num_seqs = len(meta.state_reads)
    tokens = 1 if meta.max_query_len <= 1 else TOKENS
    args = step_arguments(meta) | {
        "x": x,
        "weight": weight,
        "bias": bias,
        "state": state,
        "out": out,
        "num_tokens": num,
        "num_seqs": num_seqs,
        "stride": x.stride(0),
        "width": width,
        "TAPS": weight.shape[1],
        "rounds": num_seqs.bit_length(),
        "ACT": activation,
        "TOKENS": tokens,
        "CHANNELS": CHANNELS,
    }
    grid = (triton.cdiv(num, tokens), triton.cdiv(width, CHANNELS))
    return Launch(conv_kernel, grid, args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: Granite 4 H 1B, with and without drafts and bias, and LFM2 1.2B,
    without an activation."""
    width, stride = 3328, 6448
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = torch.empty((64, stride), dtype=dtype, device="meta")
        weight = torch.empty((width, 4), dtype=dtype, device="meta")
        state = torch.empty((128, 3, width), dtype=dtype, device="meta")
        for longest, writes, bias in ((1, 1, None), (64, 5, rows[0, :width])):
            layer, step = (weight, bias, "silu"), example_step(writes, longest)
            yield conv_launch(rows[:, :width], layer, state, step, weight.new_empty((64, width)))
        layer = (weight[:2048, :3].contiguous(), None, "")
        x, state = rows[:, :2048].contiguous(), state[:, :2, :2048].contiguous()
        yield conv_launch(x, layer, state, example_step(1), x)
