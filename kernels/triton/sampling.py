"""Samples tokens without sorting, in five launches; for greedy rows only the first two compute.

The first four launches choose the tokens of greedy rows and truncate the others
(`kernels.triton.truncate`). Then `race_kernel` adds noise to the remaining tokens of each block:
float32 scores exclude most tokens, and the few that may win are scored in float64. The row's last
program compares the blocks' winners. Tokens equal those of `kernels.cpu.sampling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels.reference.sampling import Rows, SamplingColumns
from kernels.triton.bitmask import apply_bitmask
from kernels.triton.cut import load_part
from kernels.triton.launch import Launch
from kernels.triton.noise import gumbel, rough_gumbel, row_key, steps_of
from kernels.triton.truncate import (
    MARKS,
    MASSES,
    STATE,
    aim_kernel,
    count_kernel,
    gather_kernel,
    is_last,
    survey_kernel,
)
from kernels.tuning import pad_power

MARGIN = tl.constexpr(1e-3)  # error allowed for float32 scores; it is below 1e-4


class Sizes(NamedTuple):
    """Compile-time parameters of the sampling kernels."""

    BLOCK: int = 4096  # logits per program
    STRETCH: int = 128  # logits per stored maximum
    BINS: int = 256
    TILE: int = 4096  # candidates per step
    CAPACITY: int = 16384  # with more candidates, the row itself is searched


SIZES = Sizes()


class Cuts(NamedTuple):
    """Which tokens of each row remain: those with a logit above ``value``, and those with a logit
    equal to ``value`` and an id of at most ``last_tie``."""

    value: torch.Tensor  # [R] float32; +inf if the row is greedy or invalid
    last_tie: torch.Tensor  # [R] int32
    greedy: torch.Tensor  # [R] int32, argmax of greedy rows, else -1
    arrived: torch.Tensor  # [R] int32, number of programs that finished a row's race; starts at 0


@triton.jit
def race(row, x, ids, key, heat, S: tl.constexpr):
    """Returns (score, id) of a block's token with the largest score: logit + temperature * noise.
    x: the block's logits, -inf for excluded tokens, at least one finite; heat: temperature."""
    peak = tl.max(x)
    per_unit = tl.minimum(1.0 / heat, 1e30).to(tl.float32)
    rough = (x - peak) * per_unit + rough_gumbel(steps_of(key, ids))
    rough = tl.where(x > float("-inf"), rough, float("-inf"))
    top = tl.max(rough)
    limit = top - MARGIN
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.max(ids) + 1
    while top >= limit:
        at = tl.argmax(rough, 0)
        token = tl.min(ids) + at
        logit = tl.load(row + token).to(tl.float64)
        score = logit + heat * gumbel(steps_of(key, token))
        wins = (score > best) | ((score == best) & (token < winner))
        winner = tl.where(wins, token, winner)
        best = tl.maximum(best, score)
        rough = tl.where(tl.arange(0, S.BLOCK) == at, float("-inf"), rough)
        top = tl.max(rough)
    return best, winner


@triton.jit
def kept(row, start, vocab_size, value, last_tie, S: tl.constexpr):
    """Load a block's logits, -inf for tokens outside the cut. Returns (logits, token ids)."""
    x = load_part(row, start, vocab_size, S.BLOCK)
    ids = start + tl.arange(0, S.BLOCK)
    stays = (x > value) | ((x == value) & (ids <= last_tie))
    return tl.where(stays, x, float("-inf")), ids


@triton.jit(do_not_specialize=["num_blocks"])
def race_kernel(  # noqa: PLR0913
    logits, slots, positions, temperature, seeds, value, last_tie, greedy, arrived, scores,
    winners, chosen, stride, vocab_size, num_blocks, PAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Sample tokens: one program per (row, block); a row's last program picks the best token."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cut = tl.load(value + n)
    slot = tl.load(slots + n)
    if (cut == float("inf")) | (slot < 0):
        tl.store(chosen + n, tl.load(greedy + n), mask=block == 0)
        return
    scores += n * num_blocks
    winners += n * num_blocks
    heat = tl.load(temperature + slot)
    row = logits + n * stride
    x, ids = kept(row, block * S.BLOCK, vocab_size, cut, tl.load(last_tie + n), S)
    if tl.max(x) > float("-inf"):
        key = row_key(tl.load(seeds + slot), tl.load(positions + n))
        best, winner = race(row, x, ids, key, heat, S)
        tl.store(scores + block, best)
        tl.store(winners + block, winner)
    else:
        tl.store(scores + block, float("-inf"))
    if is_last(arrived + n, num_blocks):
        tl.store(chosen + n, finish(scores, winners, num_blocks, PAD))


@triton.jit
def finish(scores, winners, num_blocks, PAD: tl.constexpr):
    """Returns the token with the largest score in a row; of several, the one with the lowest id."""
    place = tl.arange(0, PAD)
    score = tl.load(scores + place, mask=place < num_blocks, other=float("-inf"))
    is_best = (score == tl.max(score)) & (score > float("-inf"))
    return tl.min(tl.load(winners + place, mask=is_best, other=2**31 - 1))


def choose_tokens(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Sample a token per row, and wait for it; see kernels.reference.sampling.choose_tokens."""
    host = (temperature, top_k, top_p, min_p, seeds.view(np.int64), positions)
    on_device = [torch.from_numpy(np.ascontiguousarray(c)).to(logits.device) for c in host]
    slots = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    rows = Rows(logits, slots, on_device.pop())
    return sample(rows, SamplingColumns(*on_device)).cpu().numpy()


def sample(rows: Rows, columns: SamplingColumns, sizes: Sizes = SIZES) -> torch.Tensor:
    """Sample a token per row, without waiting; see `kernels.reference.sampling.sample`."""
    chosen = torch.empty_like(rows.slots)
    if len(chosen):
        cuts = cut(rows, columns, sizes)
        race_launch(rows, columns, cuts, chosen, sizes).run()
    return chosen


def sample_allowed(
    rows: Rows, columns: SamplingColumns, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> torch.Tensor:
    """Sample among allowed tokens; see `kernels.reference.sampling.sample_allowed`."""
    logits = rows.logits.clone()
    apply_bitmask(logits, masks, mask_of_row)
    return sample(rows._replace(logits=logits), columns)


def cut(rows: Rows, columns: SamplingColumns, sizes: Sizes = SIZES) -> Cuts:
    """Find where min-p, top-k and top-p cut each row, and choose the tokens of greedy rows."""
    slots = rows.slots
    cuts = Cuts(
        torch.empty(len(slots), dtype=torch.float32, device=slots.device),
        torch.empty_like(slots),
        torch.empty_like(slots),
        torch.empty_like(slots),
    )
    for launch in cut_launches(rows, columns, cuts, sizes):
        launch.run()
    return cuts


def cut_launches(rows: Rows, columns: SamplingColumns, cuts: Cuts, sizes: Sizes) -> list[Launch]:
    logits, slots, _ = rows
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, sizes.BLOCK)
    num_maxima = num_blocks * (sizes.BLOCK // sizes.STRETCH)
    room = (num_rows, sizes.CAPACITY)
    everything = {
        **columns._asdict(),
        **cuts._asdict(),
        "logits": logits,
        "slots": slots,
        "maxima": logits.new_empty((num_rows, num_maxima), dtype=torch.float32),
        "state": slots.new_empty((num_rows, STATE.value)),
        "marks": logits.new_empty((num_rows, MARKS.value), dtype=torch.float32),
        "bins": slots.new_empty((num_rows, sizes.BINS)),
        "masses": slots.new_empty((num_rows, MASSES.value), dtype=torch.int64),
        "room": logits.new_empty(room),
        "room_ids": slots.new_empty(room),
        "stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_maxima": num_maxima,
        "PAD": pad_power(num_maxima),
        "S": sizes,
    }
    plan = (
        (survey_kernel, (num_rows, num_blocks), 4),
        (aim_kernel, (num_rows,), 8),
        (count_kernel, (num_rows, num_blocks), 8),
        (gather_kernel, (num_rows, num_blocks), 16),
    )
    return [
        Launch(kernel, grid, {name: everything[name] for name in kernel.arg_names}, warps, 1)
        for kernel, grid, warps in plan
    ]


def race_launch(
    rows: Rows, columns: SamplingColumns, cuts: Cuts, chosen: torch.Tensor, sizes: Sizes
) -> Launch:
    num_rows, vocab_size = rows.logits.shape
    num_blocks = triton.cdiv(vocab_size, sizes.BLOCK)
    shape = (num_rows, num_blocks)
    args = {
        **rows._asdict(),
        **cuts._asdict(),
        "temperature": columns.temperature,
        "seeds": columns.seeds,
        "scores": rows.logits.new_empty(shape, dtype=torch.float64),
        "winners": rows.slots.new_empty(shape),
        "chosen": chosen,
        "stride": rows.logits.stride(0),
        "vocab_size": vocab_size,
        "num_blocks": num_blocks,
        "PAD": pad_power(num_blocks),
        "S": sizes,
    }
    return Launch(race_kernel, shape, args, 8, 1)


def meta_rows(dtype: torch.dtype, vocab_size: int) -> tuple[Rows, SamplingColumns]:
    """Returns example arguments on torch's meta device, for compiling kernels ahead."""
    row = torch.empty(64, dtype=torch.int32, device="meta")
    logits = torch.empty((64, vocab_size), dtype=dtype, device="meta")
    numbers = row.double()
    return Rows(logits, row, row), SamplingColumns(numbers, row, numbers, numbers, row.long())


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: vocabularies of 32k and 152k in all dtypes of logits."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for vocab_size in (32000, 151936):
            rows, columns = meta_rows(dtype, vocab_size)
            cuts = Cuts(columns.top_p.float(), *[rows.slots] * 3)
            yield from cut_launches(rows, columns, cuts, SIZES)
            yield race_launch(rows, columns, cuts, rows.slots, SIZES)
