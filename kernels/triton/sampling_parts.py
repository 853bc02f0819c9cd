"""Sampling where each rank has the logits of a part of the vocabulary, in two launches: one finds
the best token of each row in this rank's part, the other that of all parts. Tokens equal those of
`kernels.triton.sampling` over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.reference.sampling import Rows, SamplingColumns
from kernels.triton.bitmask import apply_bitmask
from kernels.triton.cut import load_part
from kernels.triton.launch import Launch
from kernels.triton.noise import row_key
from kernels.triton.sampling import SIZES, Sizes, meta_rows, race
from kernels.triton.truncate import is_last
from kernels.tuning import pad_power

WIDTH = tl.constexpr(3)  # numbers of a row: score, token, bits of the key


@triton.jit(do_not_specialize=["num_blocks", "first"])
def part_kernel(  # noqa: PLR0913
    logits, slots, positions, temperature, seeds, arrived, scores, winners, best, bits, stride,
    vocab_size, num_blocks, first, PAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One program per (row, block) finds the block's best token; a row's last program that of the
    row. vocab_size: tokens of this part."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + n)
    scores += n * num_blocks
    winners += n * num_blocks
    key = tl.zeros([], tl.uint64)
    score = tl.full([], float("-inf"), tl.float64)
    winner = first - 1
    if slot >= 0:
        key = row_key(tl.load(seeds + slot), tl.load(positions + n))
        heat = tl.load(temperature + slot)
        row = logits + n * stride
        x = load_part(row, block * S.BLOCK, vocab_size, S.BLOCK)
        ids = first + block * S.BLOCK + tl.arange(0, S.BLOCK)
        is_bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32)) > 0
        if is_bad:
            score = tl.full([], float("nan"), tl.float64)
        elif tl.max(x) > float("-inf"):
            if heat == 0:
                score = tl.max(x).to(tl.float64)
                winner = tl.min(tl.where(x == tl.max(x), ids, 2**31 - 1))
            else:
                score, winner = race(row - first, x, ids, key, heat, S)
    tl.store(scores + block, score)
    tl.store(winners + block, winner)
    if is_last(arrived + n, num_blocks):
        place = tl.arange(0, PAD)
        each = tl.load(scores + place, mask=place < num_blocks, other=float("-inf"))
        top, token = best_of(each, tl.load(winners + place, mask=place < num_blocks, other=0))
        tl.store(best + n * WIDTH, top)
        tl.store(best + n * WIDTH + 1, token.to(tl.float64))
        tl.store(bits + n * WIDTH + 2, key.to(tl.int64, bitcast=True))


@triton.jit
def best_of(scores, tokens):
    """Returns the largest score and its token, of several the lowest. The score is NaN if one is;
    the token -1 without a score above -inf."""
    has_nan = tl.max((scores != scores).to(tl.int32)) > 0
    known = tl.where(scores != scores, float("-inf"), scores)
    top = tl.max(known)
    token = tl.min(tl.where(known == top, tokens, 2**31 - 1))
    is_none = has_nan | (top == float("-inf"))
    return tl.where(has_nan, float("nan"), top), tl.where(is_none, -1, token)


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def merge_kernel(found, bits, chosen, differs, num_parts, num_rows, PAD: tl.constexpr):
    """One program per row chooses the best token of all parts."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PAD)
    place = (part * num_rows + n) * WIDTH
    scores = tl.load(found + place, mask=part < num_parts, other=float("-inf"))
    tokens = tl.load(found + place + 1, mask=part < num_parts, other=-1).to(tl.int32)
    keys = tl.load(bits + place + 2, mask=part < num_parts, other=0)
    first = tl.load(bits + n * WIDTH + 2)
    if tl.max(((keys != first) & (part < num_parts)).to(tl.int32)) > 0:
        tl.store(differs, 1)
    tl.store(chosen + n, best_of(scores, tokens)[1])


def sample_part(
    rows: Rows,
    columns: SamplingColumns,
    first: int,
    masks: torch.Tensor | None = None,
    mask_of_row: torch.Tensor | None = None,
    sizes: Sizes = SIZES,
) -> torch.Tensor:
    """The best of a part's tokens for each row; see `kernels.reference.sampling`. Scores are
    logit + temperature * noise."""
    best = rows.logits.new_empty((len(rows.slots), WIDTH.value), dtype=torch.float64)
    if masks is not None and mask_of_row is not None:
        rows = rows._replace(logits=rows.logits.clone())
        apply_bitmask(rows.logits, masks, mask_of_row)
    if len(best):
        part_launch(rows, columns, best, first, sizes).run()
    return best


def best_of_parts(found: torch.Tensor, differs: torch.Tensor) -> torch.Tensor:
    """The best of all parts; see `kernels.reference.sampling`."""
    chosen = found.new_empty(found.shape[1], dtype=torch.int32)
    if len(chosen):
        merge_launch(found, chosen, differs).run()
    return chosen


def part_launch(
    rows: Rows, columns: SamplingColumns, best: torch.Tensor, first: int, sizes: Sizes
) -> Launch:
    num_rows, width = rows.logits.shape
    shape = (num_rows, triton.cdiv(width, sizes.BLOCK))
    args = {
        **rows._asdict(),
        "temperature": columns.temperature,
        "seeds": columns.seeds,
        "arrived": rows.slots.new_zeros(num_rows),
        "scores": best.new_empty(shape),
        "winners": rows.slots.new_empty(shape),
        "best": best,
        "bits": best.view(torch.int64),
        "stride": rows.logits.stride(0),
        "vocab_size": width,
        "num_blocks": shape[1],
        "first": first,
        "PAD": pad_power(shape[1]),
        "S": sizes,
    }
    return Launch(part_kernel, shape, args, 8, 1)


def merge_launch(found: torch.Tensor, chosen: torch.Tensor, differs: torch.Tensor) -> Launch:
    num_parts, num_rows, _ = found.shape
    args = {
        "found": found,
        "bits": found.view(torch.int64),
        "chosen": chosen,
        "differs": differs,
        "num_parts": num_parts,
        "num_rows": num_rows,
        "PAD": pad_power(num_parts),
    }
    return Launch(merge_kernel, (num_rows,), args, 1, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: parts of 16k and 75k tokens in all dtypes of logits, of 2 and 8
    ranks."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (16000, 75968):
            rows, columns = meta_rows(dtype, width)
            best = rows.slots.new_empty((len(rows.slots), WIDTH.value), dtype=torch.float64)
            yield part_launch(rows, columns, best, width, SIZES)
    for size in (2, 8):
        found = best.new_empty((size, *best.shape))
        yield merge_launch(found, rows.slots, rows.slots.new_empty(1, dtype=torch.int64))
