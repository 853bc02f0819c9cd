"""Truncates rows by min-p, top-k and top-p, in four launches; greedy rows need only the first two.

`survey_kernel` finds the largest logit of every stretch of 128 logits. From these, `aim_kernel`
chooses the tokens of greedy rows, and for other rows a lower bound of the cut. `count_kernel`
counts the tokens above the bound in bins, which shows the bins that may contain the cut.
`gather_kernel` collects the tokens of these bins, and the row's last program computes the cut.
Stretches whose largest logit is too low are not read again.

Programs of a row only add integers, so their order does not matter."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.bins import bin_of, bins_of_cut, window_of
from kernels.triton.cut import (
    LOWEST,
    at_least,
    cut_candidates,
    kth_of_tile,
    load_part,
    softmax_of,
    weigh,
)

# Data of a row. `state` int32: whether it is truncated, number of programs that have counted and
# that have gathered; first and last bin of the cut, number of tokens in them, number gathered.
IS_CUT, COUNTED, GATHERED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIRST, LAST, SIZE, TAKEN = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
STATE = tl.constexpr(8)
# `marks` float32: largest logit, bins per unit, lowest logit that passes min-p, lowest possible
# cut.
PEAK, PER_UNIT, FLOOR, BOUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MARKS = tl.constexpr(4)
# `masses` int64: sum of weights of all tokens that pass min-p, and of those above the cut's bins.
TOTAL, ABOVE = tl.constexpr(0), tl.constexpr(1)
MASSES = tl.constexpr(2)


@triton.jit(do_not_specialize=["num_maxima"])
def survey_kernel(logits, slots, maxima, stride, vocab_size, num_maxima, S: tl.constexpr):
    """One program per (row, block) writes the largest of every 128 logits, +inf if one is NaN."""
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
    """Returns the lowest token id whose logit is `peak`. maxima: largest logit of each stretch."""
    stretch = tl.min(tl.where(maxima == peak, tl.arange(0, PAD), PAD))
    ids = stretch * S.STRETCH + tl.arange(0, S.STRETCH)
    x = load_part(row, stretch * S.STRETCH, vocab_size, S.STRETCH)
    return tl.min(tl.where(x == peak, ids, vocab_size))


@triton.jit
def load_limits(top_k, top_p, slot, vocab_size):
    """Load a slot's (top_k, top_p, whether top_k excludes any token)."""
    k = tl.load(top_k + slot)
    return k, tl.load(top_p + slot), (k > 0) & (k < vocab_size)


@triton.jit(do_not_specialize=["num_maxima"])
def aim_kernel(  # noqa: PLR0913
    logits, slots, maxima, temperature, top_k, top_p, min_p, value, last_tie, greedy, arrived,
    state, marks, bins, masses, stride, vocab_size, num_maxima, PAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One program per row. It chooses the token of a greedy row. For another row it finds a lower
    bound of the logits to keep, and clears the row's bins for `count_kernel`."""
    n = tl.program_id(0).to(tl.int64)
    tl.store(value + n, float("inf"))
    tl.store(greedy + n, -1)
    tl.store(arrived + n, 0)
    tl.store(state + n * STATE + tl.arange(0, STATE), 0)
    slot = tl.load(slots + n)
    if slot < 0:
        return
    place = tl.arange(0, PAD)
    peaks = tl.load(maxima + n * num_maxima + place, mask=place < num_maxima, other=float("-inf"))
    peak = tl.max(peaks)
    if (peak == float("inf")) | (peak == float("-inf")):
        return
    heat = tl.load(temperature + slot)
    if heat == 0:
        tl.store(greedy + n, first_of(logits + n * stride, vocab_size, peaks, peak, PAD, S))
        return
    k, p, has_top_k = load_limits(top_k, top_p, slot, vocab_size)
    least = tl.load(min_p + slot)
    floor = tl.full([], LOWEST, tl.float32)
    if least > 0:
        floor = at_least(peak.to(tl.float64) + heat * tl.log(least))
    if (p >= 1) & (not has_top_k):
        tl.store(value + n, tl.where(least > 0, floor, float("-inf")))
        tl.store(last_tie + n, tl.where(least > 0, vocab_size, -1))
        return
    bound = floor
    if has_top_k:
        bound = tl.maximum(floor, kth_of_tile(peaks, k, peak))
    else:
        # All tokens below this together have a probability of less than 1 - top_p.
        depth = heat * tl.log(tl.cast(vocab_size, tl.float64) / (1 - p))
        bound = tl.maximum(floor, at_least(peak.to(tl.float64) - depth))
    # Hardly any token is lower than this, so bins do not extend further.
    usual = peak - 3 * (peak - tl.min(tl.where(peaks > float("-inf"), peaks, peak)))
    window = window_of(peak, tl.maximum(bound, usual), S.BINS)
    marks += n * MARKS
    tl.store(marks + PEAK, peak)
    tl.store(marks + PER_UNIT, window[1])
    tl.store(marks + FLOOR, floor)
    tl.store(marks + BOUND, bound)
    tl.store(masses + n * MASSES + tl.arange(0, MASSES), 0)
    tl.store(bins + n * S.BINS + tl.arange(0, S.BINS), 0)
    tl.debug_barrier()
    tl.store(state + n * STATE + IS_CUT, 1)


@triton.jit
def load_maxima(maxima, num_maxima, S: tl.constexpr):
    """Load the largest logit of each stretch (128 logits) in this program's block."""
    NUM: tl.constexpr = S.BLOCK // S.STRETCH
    row = tl.program_id(0).to(tl.int64)
    return tl.load(maxima + row * num_maxima + tl.program_id(1) * NUM + tl.arange(0, NUM))


@triton.jit
def load_stretches(row, is_wanted, vocab_size, S: tl.constexpr):
    """Load the logits of this program's block, with -inf in stretches (128 logits) not wanted."""
    NUM: tl.constexpr = S.BLOCK // S.STRETCH
    stretch = tl.program_id(1) * NUM + tl.arange(0, NUM)
    ids = stretch[:, None] * S.STRETCH + tl.arange(0, S.STRETCH)[None, :]
    mask = is_wanted[:, None] & (ids < vocab_size)
    x = tl.load(row + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.ravel(x)


@triton.jit
def is_last(done, num):
    """Count this program as finished in `done`; True for the last of a row's `num` programs, which
    then sees what the others wrote."""
    tl.debug_barrier()
    return tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == num - 1


@triton.jit
def sum_between(counts, first, last, S: tl.constexpr):
    bin = tl.arange(0, S.BINS)
    return tl.sum(tl.where((bin >= first) & (bin <= last), counts, 0))


@triton.jit(do_not_specialize=["num_maxima"])
def count_kernel(  # noqa: PLR0913
    logits, slots, maxima, temperature, top_k, top_p, state, marks, bins, masses,
    stride, vocab_size, num_maxima, S: tl.constexpr,
):  # fmt: skip
    """One program per (row, block) counts the block's logits by bins of equal width; the row's last
    program finds the bins that may contain the cut, the lowest logit to keep."""
    n = tl.program_id(0).to(tl.int64)
    state += n * STATE
    if tl.load(state + IS_CUT) == 0:
        return
    slot = tl.load(slots + n)
    marks += n * MARKS
    masses += n * MASSES
    bound = tl.load(marks + BOUND)
    window = (tl.load(marks + PEAK), tl.load(marks + PER_UNIT))
    softmax = softmax_of(window[0], tl.load(temperature + slot))
    limits = load_limits(top_k, top_p, slot, vocab_size)
    floor = tl.where(limits[1] < 1, tl.load(marks + FLOOR), bound)
    is_wanted = load_maxima(maxima, num_maxima, S) >= floor
    x = load_stretches(logits + n * stride, is_wanted, vocab_size, S)
    here = bins + n * S.BINS + tl.arange(0, S.BINS)
    counts = tl.histogram(bin_of(x, window, S.BINS), S.BINS, mask=x >= bound)
    tl.atomic_add(here, counts, mask=counts > 0, sem="relaxed")
    if limits[1] < 1:
        mass = tl.sum(weigh(tl.where(x >= floor, x, float("-inf")), softmax))
        tl.atomic_add(masses + TOTAL, mass, sem="relaxed")
    if is_last(state + COUNTED, tl.num_programs(1)):
        counts = tl.load(here)
        total = tl.load(masses + TOTAL)
        first, last = bins_of_cut(counts, total, window, softmax[1], limits, S.BINS)
        tl.store(state + FIRST, first)
        tl.store(state + LAST, last)
        tl.store(state + SIZE, sum_between(counts, first, last, S))


@triton.jit
def write_candidates(part, room, room_ids, place, number, S: tl.constexpr):
    """Write this program's `number` candidates and their ids to `room` and `room_ids`, from index
    `place` on, in several steps to save registers."""
    STEP: tl.constexpr = S.BLOCK // 8
    source, size, bound, window, between = part
    start = tl.program_id(1) * S.BLOCK
    end = place + number
    while place < end:
        x = load_part(source, start, size, STEP)
        bin = bin_of(x, window, S.BINS)
        is_candidate = (x >= bound) & (bin >= between[0]) & (bin <= between[1])
        here = place + tl.cumsum(is_candidate.to(tl.int32)) - 1
        tl.store(room + here, x.to(room.dtype.element_ty), mask=is_candidate)
        tl.store(room_ids + here, start + tl.arange(0, STEP), mask=is_candidate)
        place += tl.sum(is_candidate.to(tl.int32))
        start += STEP


@triton.jit(do_not_specialize=["num_maxima"])
def gather_kernel(  # noqa: PLR0913
    logits, slots, maxima, temperature, top_k, top_p, value, last_tie, state, marks, bins, masses,
    room, room_ids, stride, vocab_size, num_maxima, S: tl.constexpr,
):  # fmt: skip
    """One program per (row, block) collects the block's logits near the cut; the row's last program
    computes the cut."""
    n = tl.program_id(0).to(tl.int64)
    state += n * STATE
    if tl.load(state + IS_CUT) == 0:
        return
    slot = tl.load(slots + n)
    row = logits + n * stride
    room += n * S.CAPACITY
    room_ids += n * S.CAPACITY
    marks += n * MARKS
    masses += n * MASSES
    bound = tl.load(marks + BOUND)
    window = (tl.load(marks + PEAK), tl.load(marks + PER_UNIT))
    softmax = softmax_of(window[0], tl.load(temperature + slot))
    k, p, has_top_k = load_limits(top_k, top_p, slot, vocab_size)
    between = (tl.load(state + FIRST), tl.load(state + LAST))
    source = row
    length = tl.full([], vocab_size, tl.int32)
    part = (source, length, bound, window, between)
    size = tl.load(state + SIZE)
    fits = size <= S.CAPACITY
    peaks = load_maxima(maxima, num_maxima, S)
    is_near = (peaks >= bound) & (bin_of(peaks, window, S.BINS) <= between[1])
    if tl.sum(is_near.to(tl.int32)) > 0:
        x = load_stretches(row, is_near, vocab_size, S)
        bin = tl.where(x >= bound, bin_of(x, window, S.BINS), S.BINS)
        number = tl.sum(((bin >= between[0]) & (bin <= between[1])).to(tl.int32))
        if fits & (number > 0):
            place = tl.atomic_add(state + TAKEN, number, sem="relaxed")
            write_candidates(part, room, room_ids, place, number, S)
        if p < 1:
            mass = tl.sum(weigh(tl.where(bin < between[0], x, float("-inf")), softmax))
            tl.atomic_add(masses + ABOVE, mass, sem="relaxed")
    if is_last(state + GATHERED, tl.num_programs(1)):
        if fits:
            source = room
            length = size
        part = (source, length, bound, window, between)
        counts = tl.load(bins + n * S.BINS + tl.arange(0, S.BINS))
        num_above = sum_between(counts, 0, between[0] - 1, S)
        known = (num_above, tl.load(masses + ABOVE), tl.load(masses + TOTAL))
        limits = (k, p, has_top_k, has_top_k & (tl.sum(counts) > k))
        ids = (room_ids, fits, vocab_size)
        cut, last = cut_candidates(part, ids, known, limits, softmax, S)
        tl.store(value + n, cut)
        tl.store(last_tie + n, last)
