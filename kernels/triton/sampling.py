"""Choosing tokens without a sort, in four launches of which greedy rows take part in two.

`survey` finds the largest logit of every short stretch. From these `cut` picks the tokens of greedy
rows and finds where the others are cut. `race` adds noise to what remains, block by block: numbers
of few digits tell which tokens of the block may win, and these few are worked out in float64.
`finish` compares the blocks' winners. Tokens are those of `kernels.cpu.sampling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels.reference.sampling import Columns, Rows
from kernels.triton.cut import cut_row, load_part
from kernels.triton.launch import Launch
from kernels.triton.noise import gumbel, rough_gumbel, row_key, steps_of
from kernels.tuning import pad_power

MARGIN = tl.constexpr(1e-3)  # by how much rough scores may be wrong; they are within 1e-4


class Sizes(NamedTuple):
    """What the kernels are compiled for."""

    BLOCK: int = 4096  # logits a program
    STRETCH: int = 128  # logits of which the largest is kept
    TILE: int = 1024  # candidates looked at together
    CAPACITY: int = 16384  # candidates a row


SIZES = Sizes()


class Cuts(NamedTuple):
    """What is left of each row: tokens above the cut, and those on it up to an id."""

    value: torch.Tensor  # [R] float32; +inf where nothing can be sampled
    last_tie: torch.Tensor  # [R] int32
    greedy: torch.Tensor  # [R] int32: the largest of greedy rows, else -1


@triton.jit(do_not_specialize=["num_maxima"])
def survey_kernel(logits, slots, maxima, stride, vocab_size, num_maxima, S: tl.constexpr):
    """Program (row, block). A NaN counts as +inf: neither can be sampled from."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(slots + row) < 0:
        return
    x = load_part(logits + row * stride, block * S.BLOCK, vocab_size, S.BLOCK)
    x = tl.where(x != x, float("inf"), x)
    largest = tl.max(tl.reshape(x, [S.BLOCK // S.STRETCH, S.STRETCH]), 1)
    place = block * (S.BLOCK // S.STRETCH) + tl.arange(0, S.BLOCK // S.STRETCH)
    tl.store(maxima + row * num_maxima + place, largest)


@triton.jit
def first_of(row, vocab_size, maxima, peak, PAD: tl.constexpr, S: tl.constexpr):
    """The lowest id of a logit equal to the peak."""
    stretch = tl.min(tl.where(maxima == peak, tl.arange(0, PAD), PAD))
    ids = stretch * S.STRETCH + tl.arange(0, S.STRETCH)
    x = load_part(row, stretch * S.STRETCH, vocab_size, S.STRETCH)
    return tl.min(tl.where(x == peak, ids, vocab_size))


@triton.jit(do_not_specialize=["num_maxima"])
def cut_kernel(  # noqa: PLR0913
    logits, slots, maxima, room, temperature, top_k, top_p, min_p, value, last_tie, greedy,
    stride, vocab_size, num_maxima, PAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Program row."""
    n = tl.program_id(0).to(tl.int64)
    tl.store(value + n, float("inf"))
    tl.store(greedy + n, -1)
    slot = tl.load(slots + n)
    if slot < 0:
        return
    place = tl.arange(0, PAD)
    peaks = tl.load(maxima + n * num_maxima + place, mask=place < num_maxima, other=float("-inf"))
    peak = tl.max(peaks)
    if (peak == float("inf")) | (peak == float("-inf")):
        return
    row = logits + n * stride
    heat = tl.load(temperature + slot)
    if heat == 0:
        tl.store(greedy + n, first_of(row, vocab_size, peaks, peak, PAD, S))
        return
    k = tl.load(top_k + slot)
    k = tl.where((k < 1) | (k > vocab_size), vocab_size, k)
    p = tl.load(top_p + slot)
    floor = tl.load(min_p + slot)
    if (k == vocab_size) & (p >= 1) & (floor <= 0):
        tl.store(value + n, float("-inf"))
        tl.store(last_tie + n, -1)
        return
    cut, last = cut_row(row, vocab_size, room + n * S.CAPACITY, peaks, heat, (k, p, floor), S)
    tl.store(value + n, cut)
    tl.store(last_tie + n, last)


@triton.jit
def race(row, x, ids, key, heat, S: tl.constexpr):
    """(score, id) of the best of a block; x: -inf for what was cut, at least one is not."""
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
    """(logits of a block, -inf where the cut leaves them out; their ids)."""
    x = load_part(row, start, vocab_size, S.BLOCK)
    ids = start + tl.arange(0, S.BLOCK)
    stays = (x > value) | ((x == value) & (ids <= last_tie))
    return tl.where(stays, x, float("-inf")), ids


@triton.jit(do_not_specialize=["num_blocks"])
def race_kernel(  # noqa: PLR0913
    logits, slots, positions, temperature, seeds, value, last_tie, scores, winners,
    stride, vocab_size, num_blocks, S: tl.constexpr,
):  # fmt: skip
    """Program (row, block)."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    here = n * num_blocks + block
    cut = tl.load(value + n)
    slot = tl.load(slots + n)
    if (cut == float("inf")) | (slot < 0):
        return
    heat = tl.load(temperature + slot)
    row = logits + n * stride
    x, ids = kept(row, block * S.BLOCK, vocab_size, cut, tl.load(last_tie + n), S)
    tl.store(scores + here, float("-inf"))
    if tl.max(x) > float("-inf"):
        key = row_key(tl.load(seeds + slot), tl.load(positions + n))
        best, winner = race(row, x, ids, key, heat, S)
        tl.store(scores + here, best)
        tl.store(winners + here, winner)


@triton.jit(do_not_specialize=["num_blocks"])
def finish_kernel(scores, winners, value, greedy, chosen, num_blocks, PAD: tl.constexpr):
    """Program row."""
    n = tl.program_id(0).to(tl.int64)
    token = tl.load(greedy + n)
    if tl.load(value + n) < float("inf"):
        place = tl.arange(0, PAD)
        is_block = place < num_blocks
        score = tl.load(scores + n * num_blocks + place, mask=is_block, other=float("-inf"))
        best = tl.max(score)
        is_best = (score == best) & (score > float("-inf"))
        ids = tl.load(winners + n * num_blocks + place, mask=is_best, other=2**31 - 1)
        token = tl.min(ids)
    tl.store(chosen + n, token)


def choose_tokens(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
) -> NDArray[np.int32]:
    """See kernels.reference.sampling.choose_tokens.

    Copies the columns to the logits' device and waits.
    """
    host = (temperature, top_k, top_p, min_p, seeds.view(np.int64), positions)
    on_device = [torch.from_numpy(np.ascontiguousarray(c)).to(logits.device) for c in host]
    slots = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    rows = Rows(logits, slots, on_device.pop())
    return sample(rows, Columns(*on_device)).cpu().numpy()


def sample(rows: Rows, columns: Columns, sizes: Sizes = SIZES) -> torch.Tensor:
    """The token of each row [R] int32, -1 where there is none; nothing leaves the device."""
    chosen = torch.empty_like(rows.slots)
    if len(chosen):
        cuts = cut(rows, columns, sizes)
        for launch in race_launches(rows, columns, cuts, chosen, sizes):
            launch.run()
    return chosen


def cut(rows: Rows, columns: Columns, sizes: Sizes = SIZES) -> Cuts:
    """Where each row is cut, and the tokens of greedy rows."""
    slots = rows.slots
    cuts = Cuts(
        torch.empty(len(slots), dtype=torch.float32, device=slots.device),
        torch.empty_like(slots),
        torch.empty_like(slots),
    )
    for launch in cut_launches(rows, columns, cuts, sizes):
        launch.run()
    return cuts


def cut_launches(rows: Rows, columns: Columns, cuts: Cuts, sizes: Sizes) -> list[Launch]:
    logits, slots, _ = rows
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, sizes.BLOCK)
    num_maxima = num_blocks * (sizes.BLOCK // sizes.STRETCH)
    common = {
        "logits": logits,
        "slots": slots,
        "maxima": logits.new_empty((num_rows, num_maxima), dtype=torch.float32),
        "stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_maxima": num_maxima,
        "S": sizes,
    }
    wanted = columns._asdict()
    del wanted["seeds"]
    cut = {
        **common,
        **wanted,
        **cuts._asdict(),
        "room": logits.new_empty((num_rows, sizes.CAPACITY)),
        "PAD": pad_power(num_maxima),
    }
    return [
        Launch(survey_kernel, (num_rows, num_blocks), common, 4, 1),
        Launch(cut_kernel, (num_rows,), cut, 8, 1),
    ]


def race_launches(
    rows: Rows, columns: Columns, cuts: Cuts, chosen: torch.Tensor, sizes: Sizes
) -> list[Launch]:
    num_rows, vocab_size = rows.logits.shape
    num_blocks = triton.cdiv(vocab_size, sizes.BLOCK)
    shape = (num_rows, num_blocks)
    between = {
        "scores": rows.logits.new_empty(shape, dtype=torch.float64),
        "winners": rows.slots.new_empty(shape),
        "value": cuts.value,
        "num_blocks": num_blocks,
    }
    race = {
        **rows._asdict(),
        **between,
        "temperature": columns.temperature,
        "seeds": columns.seeds,
        "last_tie": cuts.last_tie,
        "stride": rows.logits.stride(0),
        "vocab_size": vocab_size,
        "S": sizes,
    }
    finish = {**between, "greedy": cuts.greedy, "chosen": chosen, "PAD": pad_power(num_blocks)}
    return [
        Launch(race_kernel, shape, race, 8, 1),
        Launch(finish_kernel, (num_rows,), finish, 1, 1),
    ]


def meta_rows(dtype: torch.dtype, vocab_size: int) -> tuple[Rows, Columns]:
    """Empty tensors of the types that kernels are compiled for."""
    row = torch.empty(64, dtype=torch.int32, device="meta")
    logits = torch.empty((64, vocab_size), dtype=dtype, device="meta")
    numbers = row.double()
    return Rows(logits, row, row), Columns(numbers, row, numbers, numbers, row.long())


def configurations() -> Iterator[Launch]:
    """Vocabularies of 32k and 152k in the dtypes a model's head may give."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for vocab_size in (32000, 151936):
            rows, columns = meta_rows(dtype, vocab_size)
            cuts = Cuts(columns.top_p.float(), rows.slots, rows.slots)
            yield from cut_launches(rows, columns, cuts, SIZES)
            yield from race_launches(rows, columns, cuts, rows.slots, SIZES)
