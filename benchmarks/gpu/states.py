"""Measures the kernels of recurrent states, or estimates their times without a device.

An estimate is the time of a step's bytes, or that of the programs that advance states token by
token or chunk by chunk, whichever is longer, and that of what is computed before for all chunks.
Seconds of a token and of a chunk are derived from compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import NamedTuple

import torch
from figures import print_table

import kernels
from gpu.box import Box, Call, Ceilings, Rows, share
from kernels import StateMeta
from kernels.reference.selective_scan import ChannelScan, HeadScan
from kernels.triton.chunks import CHUNK

H100 = Ceilings(2.43e12, 783e12)  # as measured by other sections of this benchmark
PROCESSORS = 132
STATE_COPIES = 2  # the state that is read, and the one that is written
TOKEN_SECONDS = 0.8e-6  # a program's token, in a chain of reductions and loads
START_SECONDS = 3e-6  # of a launch in a graph
SHARE_OF_PEAK = 0.4  # of small products


SNAPSHOT_BYTES = 75e6  # of the states of Qwen3-Next


class Sizes(NamedTuple):
    """Sizes of a layer with a recurrent state. ``columns``: of its largest input; ``rows``,
    ``width``: of the state of each of ``heads`` heads."""

    model: str
    columns: int
    heads: int
    rows: int
    width: int


class Chunks(NamedTuple):
    """Prompts in chunks. seconds: in which a program advances a state by a chunk; operations: of a
    chunk and head, before that."""

    seconds: float
    operations: float


class Kernel(NamedTuple):
    """An operation on the states of a layer.

    num_inputs, num_outputs: numbers of two bytes per token; state_bytes: of a sequence; programs:
    that advance the state of a sequence. chunks: ``None`` if prompts go token by token."""

    name: str
    sizes: Sizes
    num_inputs: int
    num_outputs: int
    state_bytes: int
    programs: int
    chunks: Chunks | None
    make: Callable[[Box, Sizes, StateMeta, int], Call]

    def num_bytes(self, num_seqs: int, num_tokens: int) -> int:
        """Bytes that a step must read and write."""
        of_tokens = 2 * num_tokens * (self.num_inputs + self.num_outputs)
        return of_tokens + STATE_COPIES * num_seqs * self.state_bytes

    def estimate(self, num_seqs: int, length: int) -> float:
        """Estimated seconds on an H100, of sequences of one length."""
        floor = self.num_bytes(num_seqs, num_seqs * length) / H100.bytes
        waves = ceil(num_seqs * self.programs / (2 * PROCESSORS))
        if length == 1:
            return START_SECONDS + floor
        if self.chunks is None:
            return START_SECONDS + max(floor, waves * length * TOKEN_SECONDS)
        num = ceil(length / CHUNK)
        before = num_seqs * num * self.sizes.heads * self.chunks.operations
        before /= SHARE_OF_PEAK * H100.operations
        return 2 * START_SECONDS + before + max(floor, waves * num * self.chunks.seconds)


def _tokens(box: Box, num: int, columns: int) -> torch.Tensor:
    return torch.randn(num, columns, device=box.device, dtype=box.dtype)


def _state(box: Box, meta: StateMeta, *shape: int) -> torch.Tensor:
    return torch.zeros(STATE_COPIES * len(meta.state_reads), *shape, device=box.device)


def _numbers(box: Box, *shape: int) -> torch.Tensor:
    return -torch.rand(*shape, device=box.device)


def _conv(box: Box, sizes: Sizes, meta: StateMeta, num: int) -> Call:
    x, weight = _tokens(box, num, sizes.columns), _tokens(box, sizes.columns, 4)
    state = _state(box, meta, 3, sizes.columns).to(box.dtype)
    return lambda: kernels.causal_conv(x, weight, None, "silu", state, meta)


def _delta(box: Box, sizes: Sizes, meta: StateMeta, num: int) -> Call:
    qkv, gates = _tokens(box, num, sizes.columns), _tokens(box, num, 2 * sizes.heads)
    rate = _numbers(box, sizes.heads)
    state = _state(box, meta, sizes.heads, sizes.rows, sizes.width)
    return lambda: kernels.gated_delta_rule(qkv, gates, rate, rate, state, meta)


def _heads(box: Box, sizes: Sizes, meta: StateMeta, num: int) -> Call:
    xbc, dt = _tokens(box, num, sizes.columns), _tokens(box, num, sizes.heads)
    numbers = _numbers(box, sizes.heads)
    state = _state(box, meta, sizes.heads, sizes.rows, sizes.width)
    layer = HeadScan(numbers, numbers, numbers)
    return lambda: kernels.head_scan(xbc, dt, layer, state, meta)


def _channels(box: Box, sizes: Sizes, meta: StateMeta, num: int) -> Call:
    x, bc = _tokens(box, num, sizes.width), _tokens(box, num, 2 * sizes.rows)
    decay = _numbers(box, sizes.rows, sizes.width)
    state = _state(box, meta, sizes.rows, sizes.width)
    layer = ChannelScan(decay, decay[0], decay[0])
    return lambda: kernels.channel_scan(x, x, bc, x, layer, state, meta)


def all_kernels(*, is_small: bool = False) -> Iterator[Kernel]:
    """The operations with the sizes of published models, or with small ones."""
    delta = Sizes("Qwen3-Next", 8192, 32, 128, 128)
    heads = Sizes("Granite 4 H 1B", 3328, 48, 128, 64)
    channels = Sizes("Jamba Mini", 16384, 1, 16, 8192)
    if is_small:
        delta, heads = Sizes("small", 96, 2, 16, 16), Sizes("small", 64, 2, 16, 16)
        channels = Sizes("small", 64, 1, 4, 32)
    for sizes in (delta, heads):
        num, window = sizes.columns, 3 * 2 * sizes.columns
        yield Kernel("convolution", sizes, num, num, window, 0, None, _conv)
    num, size = delta.heads * delta.width, 4 * delta.heads * delta.rows * delta.width
    inputs, programs = delta.columns + 2 * delta.heads, delta.heads * ceil(delta.width / 32)
    yield Kernel("gated delta rule", delta, inputs, num, size, programs, Chunks(5e-6, 15e6), _delta)
    num, size = heads.heads * heads.width, 4 * heads.heads * heads.rows * heads.width
    inputs, programs = heads.columns + heads.heads, heads.heads * ceil(heads.width / 16)
    yield Kernel("scan by heads", heads, inputs, num, size, programs, Chunks(3e-6, 1e6), _heads)
    num, size = channels.width, 4 * channels.rows * channels.width
    inputs, programs = 3 * num + 2 * channels.rows, ceil(num / 64)
    yield Kernel("scan by channels", channels, inputs, num, size, programs, None, _channels)


def meta_of(box: Box, num_seqs: int, length: int) -> StateMeta:
    """A step of sequences of one length, each with a state before it."""
    order = torch.arange(num_seqs, dtype=torch.int32, device=box.device)
    return StateMeta(
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=box.device) * length,
        state_reads=STATE_COPIES * order,
        state_writes=(STATE_COPIES * order + 1)[:, None],
        num_seqs=torch.full((1,), num_seqs, dtype=torch.int32, device=box.device),
        num_decodes=num_seqs if length == 1 else 0,
        max_query_len=length,
    )


LOADS = ((1, 1), (64, 1), (1, 8192), (8, 1024))  # sequences, and tokens of each


def states(box: Box) -> Rows:
    """Time each operation on a layer's states, next to the time of its bytes."""
    for num_seqs, length in ((2, 1), (2, 20)) if box.is_dry else LOADS:
        meta = meta_of(box, num_seqs, length)
        for kernel in all_kernels(is_small=box.is_dry):
            taken = box.time([kernel.make(box, kernel.sizes, meta, num_seqs * length)]).least
            floor = kernel.num_bytes(num_seqs, num_seqs * length) / box.ceilings.bytes
            yield {
                "operation": kernel.name,
                "model": kernel.sizes.model,
                "sequences": num_seqs,
                "tokens of each": length,
                "us": 1e6 * taken,
                "floor us": 1e6 * floor,
                "%": share(floor, taken),
            }


def show_estimates() -> None:
    """Print floors and estimated times on an H100."""
    rows = []
    for kernel in all_kernels():
        for num_seqs, length in LOADS:
            floor = kernel.num_bytes(num_seqs, num_seqs * length) / H100.bytes
            times = (f"{1e6 * one:.3g}" for one in (floor, kernel.estimate(num_seqs, length)))
            rows.append([kernel.name, kernel.sizes.model, f"{num_seqs} x {length:,}", *times])
    floor = 2 * SNAPSHOT_BYTES / H100.bytes
    times = (f"{1e6 * one:.3g}" for one in (floor, START_SECONDS + floor))
    rows.append(["copy of a snapshot", "Qwen3-Next", "1", *times])
    print_table("H100, estimated", ("operation", "model", "step", "floor us", "estimate us"), rows)
