"""Which drafts stand: see `kernels.reference.rejection`. Nothing leaves the device.

Logits are cut as the sampler cuts them, block sums give what probabilities are divided by, then one
program a sequence walks over its drafts. Only the row behind the last that stands is drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.reference import rejection as reference
from kernels.reference.sampling import Columns, Rows
from kernels.triton.cut import LOG2E
from kernels.triton.launch import Launch
from kernels.triton.noise import gumbel, row_key, steps_of, uniform
from kernels.triton.sampling import (
    SIZES,
    Cuts,
    Sizes,
    cut,
    kept,
    meta_rows,
    race,
    sample,
)
from kernels.tuning import pad_power

ACCEPT_ID = tl.constexpr(reference.ACCEPT_ID)


class Drafts(NamedTuple):
    """Proposals to verify, as `kernels.reference.rejection.verify` wants them."""

    starts: torch.Tensor  # [S + 1] int32
    ids: torch.Tensor  # [R] int32
    probs: torch.Tensor | None  # [R, V] float32
    max_drafts: int  # of a sequence


class Verified(NamedTuple):
    token_ids: torch.Tensor  # [S, max_drafts + 1] int32
    num_sampled: torch.Tensor  # [S] int32: how many of them count


@triton.jit
def match_kernel(starts, drafts, chosen, token_ids, num_sampled, WIDTH: tl.constexpr):
    """Program sequence: drafts stand as long as they are what was chosen."""
    seq = tl.program_id(0)
    row0 = tl.load(starts + seq)
    num = tl.load(starts + seq + 1) - row0
    stands = num > 0
    count = 0
    for i in range(WIDTH):
        if stands & (i < num):
            token = tl.load(chosen + row0 + i)
            tl.store(token_ids + seq * WIDTH + i, token)
            count += 1
            stands = token == tl.load(drafts + row0 + i)
    tl.store(num_sampled + seq, count)


@triton.jit(do_not_specialize=["num_blocks"])
def mass_kernel(  # noqa: PLR0913
    logits, slots, temperature, value, last_tie, peaks, sums, stride, vocab_size, num_blocks,
    S: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the largest of what remains, and what it all weighs beside that."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    bound = tl.load(value + n)
    if bound == float("inf"):
        return
    heat = tl.load(temperature + tl.load(slots + n))
    row = logits + n * stride
    x, _ = kept(row, block * S.BLOCK, vocab_size, bound, tl.load(last_tie + n), S)
    peak = tl.max(x)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    scale = (1.0 / heat * LOG2E).to(tl.float32)
    here = n * num_blocks + block
    tl.store(peaks + here, peak)
    tl.store(sums + here, tl.sum(tl.exp2((x - base) * scale).to(tl.float64)))


@triton.jit
def row_mass(peaks, sums, scale, num_blocks, PAD: tl.constexpr):
    """(largest logit, weight of the row beside it)."""
    place = tl.arange(0, PAD)
    peak = tl.load(peaks + place, mask=place < num_blocks, other=float("-inf"))
    part = tl.load(sums + place, mask=place < num_blocks, other=0.0)
    highest = tl.max(peak)
    return highest, tl.sum(part * tl.exp2((peak - highest) * scale).to(tl.float64))


@triton.jit(do_not_specialize=["num_blocks"])
def accept_kernel(  # noqa: PLR0913
    logits, slots, positions, temperature, seeds, value, last_tie, greedy, peaks, sums,
    starts, drafts, probs, num_accepted, base, total, stride, stride_probs, num_blocks,
    PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program sequence -> how many drafts stand; (base, total) of the row behind them."""
    seq = tl.program_id(0)
    row0 = tl.load(starts + seq)
    num = tl.load(starts + seq + 1) - row0
    stands = num > 0
    count = 0
    for i in range(WIDTH):
        if stands & (i < num):
            n = (row0 + i).to(tl.int64)
            draft = tl.load(drafts + n, mask=i < num - 1, other=0)
            bound = tl.load(value + n)
            stands = (tl.load(greedy + n) == draft) & (i < num - 1)
            if bound < float("inf"):
                slot = tl.load(slots + n)
                scale = (1.0 / tl.load(temperature + slot) * LOG2E).to(tl.float32)
                here = n * num_blocks
                peak, mass = row_mass(peaks + here, sums + here, scale, num_blocks, PAD)
                tl.store(base + seq, peak)
                tl.store(total + seq, mass)
                x = tl.load(logits + n * stride + draft).to(tl.float32)
                is_kept = (x > bound) | ((x == bound) & (draft <= tl.load(last_tie + n)))
                weight = tl.exp2((x - peak) * scale).to(tl.float64)
                q = tl.load(probs + n * stride_probs + draft, mask=i < num - 1, other=0.0)
                key = row_key(tl.load(seeds + slot), tl.load(positions + n))
                u = uniform(steps_of(key, tl.full([], ACCEPT_ID, tl.int64)))
                stands = is_kept & (u * q.to(tl.float64) * mass < weight) & (i < num - 1)
            count += stands.to(tl.int32)
    tl.store(num_accepted + seq, count)


@triton.jit(do_not_specialize=["num_blocks"])
def draw_kernel(  # noqa: PLR0913
    logits, slots, positions, temperature, seeds, value, last_tie, starts, probs,
    num_accepted, base, total, scores, winners, stride, stride_probs, vocab_size, num_blocks,
    S: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block): the best of the row behind the drafts that stand."""
    seq = tl.program_id(0)
    block = tl.program_id(1)
    end = tl.load(starts + seq + 1)
    n = (tl.load(starts + seq) + tl.load(num_accepted + seq)).to(tl.int64)
    if n >= end:
        return
    bound = tl.load(value + n)
    if bound == float("inf"):
        return
    slot = tl.load(slots + n)
    heat = tl.load(temperature + slot)
    here = seq * num_blocks + block
    row = logits + n * stride
    x, ids = kept(row, block * S.BLOCK, vocab_size, bound, tl.load(last_tie + n), S)
    key = row_key(tl.load(seeds + slot), tl.load(positions + n))
    tl.store(scores + here, float("-inf"))
    if tl.max(x) > float("-inf"):
        if n == end - 1:
            best, winner = race(row, x, ids, key, heat, S)
            tl.store(scores + here, best)
            tl.store(winners + here, winner)
        else:
            scale = (1.0 / heat * LOG2E).to(tl.float32)
            p = tl.exp2((x - tl.load(base + seq)) * scale).to(tl.float64) / tl.load(total + seq)
            there = probs + n * stride_probs + ids
            q = tl.load(there, mask=ids < vocab_size, other=0.0).to(tl.float64)
            more = tl.where(p > q, p - q, 0.0)
            score = tl.where(p > q, tl.log(more) + gumbel(steps_of(key, ids)), float("-inf"))
            tl.store(scores + here, tl.max(score))
            tl.store(winners + here, tl.min(ids) + tl.argmax(score, 0))


@triton.jit(do_not_specialize=["num_blocks"])
def settle_kernel(  # noqa: PLR0913
    starts, drafts, value, greedy, num_accepted, scores, winners, token_ids, num_sampled,
    num_blocks, PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program sequence: its drafts that stand and the token behind them."""
    seq = tl.program_id(0)
    row0 = tl.load(starts + seq)
    count = tl.load(num_accepted + seq)
    n = row0 + count
    end = tl.load(starts + seq + 1)
    if n >= end:
        tl.store(num_sampled + seq, 0)
        return
    token = tl.load(greedy + n)
    if tl.load(value + n) < float("inf"):
        place = tl.arange(0, PAD)
        is_block = place < num_blocks
        score = tl.load(scores + seq * num_blocks + place, mask=is_block, other=float("-inf"))
        best = tl.max(score)
        is_best = (score == best) & (score > float("-inf"))
        ids = tl.load(winners + seq * num_blocks + place, mask=is_best, other=2**31 - 1)
        # p and q differ by rounding alone if nothing is left to draw from.
        spare = tl.load(drafts + n, mask=n < end - 1, other=-1)
        token = tl.where(best > float("-inf"), tl.min(ids), spare)
    for i in range(count):
        tl.store(token_ids + seq * WIDTH + i, tl.load(drafts + row0 + i))
    tl.store(token_ids + seq * WIDTH + count, token)
    tl.store(num_sampled + seq, count + 1)


def verify(rows: Rows, columns: Columns, drafts: Drafts, sizes: Sizes = SIZES) -> Verified:
    """See kernels.reference.rejection.verify."""
    num_seqs = len(drafts.starts) - 1
    width = drafts.max_drafts + 1
    out = Verified(rows.slots.new_empty((num_seqs, width)), rows.slots.new_zeros((num_seqs,)))
    if not len(rows.slots):
        return out
    if drafts.probs is None:
        match_launch(drafts, sample(rows, columns, sizes), out).run()
    else:
        for launch in launches(rows, columns, (drafts, cut(rows, columns, sizes)), out, sizes):
            launch.run()
    return out


def match_launch(drafts: Drafts, chosen: torch.Tensor, out: Verified) -> Launch:
    args = {
        "starts": drafts.starts,
        "drafts": drafts.ids,
        "chosen": chosen,
        **out._asdict(),
        "WIDTH": out.token_ids.shape[1],
    }
    return Launch(match_kernel, (len(out.num_sampled),), args, 1, 1)


def launches(
    rows: Rows, columns: Columns, cut_drafts: tuple[Drafts, Cuts], out: Verified, sizes: Sizes
) -> list[Launch]:
    drafts, cuts = cut_drafts
    assert drafts.probs is not None
    num_rows, vocab_size = rows.logits.shape
    num_seqs, width = out.token_ids.shape
    num_blocks = triton.cdiv(vocab_size, sizes.BLOCK)
    peaks = rows.logits.new_empty((num_rows, num_blocks), dtype=torch.float32)
    winners = rows.slots.new_empty((num_seqs, num_blocks))
    everything = {
        **rows._asdict(),
        **cuts._asdict(),
        **out._asdict(),
        "temperature": columns.temperature,
        "seeds": columns.seeds,
        "starts": drafts.starts,
        "drafts": drafts.ids,
        "probs": drafts.probs,
        "peaks": peaks,
        "sums": torch.empty_like(peaks, dtype=torch.float64),
        "num_accepted": torch.empty_like(out.num_sampled),
        "base": torch.empty_like(out.num_sampled, dtype=torch.float32),
        "total": torch.empty_like(out.num_sampled, dtype=torch.float64),
        "scores": torch.empty_like(winners, dtype=torch.float64),
        "winners": winners,
        "stride": rows.logits.stride(0),
        "stride_probs": drafts.probs.stride(0),
        "vocab_size": vocab_size,
        "num_blocks": num_blocks,
        "PAD": pad_power(num_blocks),
        "WIDTH": width,
        "S": sizes,
    }
    plan = (
        (mass_kernel, (num_rows, num_blocks), 8),
        (accept_kernel, (num_seqs,), 1),
        (draw_kernel, (num_seqs, num_blocks), 8),
        (settle_kernel, (num_seqs,), 1),
    )
    return [
        Launch(kernel, grid, {name: everything[name] for name in kernel.arg_names}, warps, 1)
        for kernel, grid, warps in plan
    ]


def configurations() -> Iterator[Launch]:
    """Up to 4 drafts a sequence, with their probabilities and without."""
    for dtype in (torch.bfloat16, torch.float32):
        rows, columns = meta_rows(dtype, 151936)
        slots = rows.slots
        cuts = Cuts(slots.float(), *[slots] * 3)
        drafts = Drafts(slots, slots, rows.logits.float(), 4)
        out = Verified(slots.new_empty((63, 5)), slots[1:])
        yield from launches(rows, columns, (drafts, cuts), out, SIZES)
        yield match_launch(drafts, slots, out)
