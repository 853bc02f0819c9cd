"""Where min-p, top-k and top-p cut a row of logits: by bisection on the bits of a float, no sort.

A cut is a value and an id: tokens above the value remain, and those on it up to the id. Largest
logits of short stretches tell beforehand how low a cut can lie, so that the search looks at few
candidates, collected in one sweep; where they are too many it looks at the row itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def to_key(value):
    """An integer that grows with a float32; equal for both zeros."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def at_least(limit):
    """The lowest finite float32 that is not below a float64."""
    bounded = tl.maximum(limit, LOWEST)
    rounded = bounded.to(tl.float32)
    above = from_key(to_key(rounded) + 1)
    return tl.where(rounded.to(tl.float64) >= bounded, rounded, above)


@triton.jit
def load_part(source, start, end, TILE: tl.constexpr):
    """Logits from `start` on as float32, -inf from `end` on."""
    place = start + tl.arange(0, TILE)
    return tl.load(source + place, mask=place < end, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh(x, peak, scale):
    """Probabilities relative to the peak's; float32, to be added up in float64."""
    return tl.exp2((x - peak) * scale)


@triton.jit
def kth_of_tile(values, k, peak):
    """The k-th largest of a tile, or the lowest finite number if fewer are finite."""
    low = to_key(tl.full([], LOWEST, tl.float32))
    high = to_key(peak)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((values >= from_key(middle)).to(tl.int32)) >= k:
            low = middle
        else:
            high = middle - 1
    return from_key(low)


@triton.jit
def count_from(part, floor, TILE: tl.constexpr):
    """How many of a part, (where it starts, its size), are not below floor."""
    source, size = part
    count = 0
    for start in range(0, size, TILE):
        count += tl.sum((load_part(source, start, size, TILE) >= floor).to(tl.int32))
    return count


@triton.jit
def mass_from(part, floor, softmax, TILE: tl.constexpr):
    """What those of a part that are not below floor weigh together."""
    source, size = part
    mass = tl.zeros([], tl.float64)
    for start in range(0, size, TILE):
        x = load_part(source, start, size, TILE)
        mass += tl.sum(tl.where(x >= floor, weigh(x, softmax[0], softmax[1]), 0.0).to(tl.float64))
    return mass


@triton.jit
def collect(row, num, floors, softmax, room, TILE: tl.constexpr, CAPACITY: tl.constexpr):
    """Copy what is not below floors[1] to `room`; its number, and the mass not below floors[0]."""
    count = 0
    mass = tl.zeros([], tl.float64)
    for start in range(0, num, TILE):
        x = load_part(row, start, num, TILE)
        is_candidate = x >= floors[1]
        place = count + tl.cumsum(is_candidate.to(tl.int32)) - 1
        where = room + place
        tl.store(where, x.to(room.dtype.element_ty), mask=is_candidate & (place < CAPACITY))
        count += tl.sum(is_candidate.to(tl.int32))
        weights = weigh(x, softmax[0], softmax[1])
        mass += tl.sum(tl.where(x >= floors[0], weights, 0.0).to(tl.float64))
    return count, mass


@triton.jit
def cut_top_k(part, k, floor, peak, TILE: tl.constexpr):
    """(cut, how many of those on it remain) so that k remain; there are more than k candidates."""
    low = to_key(floor)
    high = to_key(peak)
    while low < high:
        middle = (low + high + 1) >> 1
        if count_from(part, from_key(middle), TILE) >= k:
            low = middle
        else:
            high = middle - 1
    return from_key(low), k - count_from(part, from_key(low + 1), TILE)


@triton.jit
def cut_top_p(part, target, floor, num_ties, softmax, TILE: tl.constexpr):
    """(cut, how many of those on it remain): the fewest largest that weigh `target` together.

    At the floor itself no more than num_ties are there to remain.
    """
    start = to_key(floor)
    low = start
    high = to_key(softmax[0])
    while low < high:
        middle = (low + high + 1) >> 1
        if mass_from(part, from_key(middle), softmax, TILE) >= target:
            low = middle
        else:
            high = middle - 1
    cut = from_key(low)
    lacking = target - mass_from(part, from_key(low + 1), softmax, TILE)
    weight = tl.maximum(weigh(cut, softmax[0], softmax[1]), 1e-38)
    ratio = tl.ceil(lacking / weight.to(tl.float64))
    needed = tl.minimum(tl.maximum(ratio, 1.0), 2.0e9).to(tl.int32)
    return cut, tl.where(low == start, tl.minimum(needed, num_ties), needed)


@triton.jit
def cut_row(row, num, room, maxima, temperature, asked, S: tl.constexpr):
    """(cut, id of the last tie) of a row; asked: top_k, top_p, min_p, at least one of them on."""
    top_k, top_p, min_p = asked
    peak = tl.max(maxima)
    softmax = (peak, (1.0 / temperature * LOG2E).to(tl.float32))
    floor = tl.full([], LOWEST, tl.float32)
    if min_p > 0:
        floor = at_least(peak.to(tl.float64) + temperature * tl.log(min_p))
    cut = floor
    if top_k < num:
        cut = tl.maximum(floor, kth_of_tile(maxima, top_k, peak))
    elif top_p < 1:
        # Tokens further down weigh less than 1 - top_p altogether: outside any nucleus.
        depth = temperature * tl.log(num.to(tl.float64) / (1 - top_p))
        cut = tl.maximum(floor, at_least(peak.to(tl.float64) - depth))
    num_ties = num
    if (top_k < num) | (top_p < 1):
        count, total = collect(row, num, (floor, cut), softmax, room, S.TILE * 4, S.CAPACITY)
        tl.debug_barrier()
        source = row
        size = num
        if count <= S.CAPACITY:
            source = room
            size = count
        part = (source, size)
        if (top_k < num) & (count > top_k):
            cut, num_ties = cut_top_k(part, top_k, cut, peak, S.TILE)
        if top_p < 1:
            if top_k < num:
                total = mass_of_cut(part, cut, num_ties, softmax, S.TILE)
            cut, num_ties = cut_top_p(part, top_p * total, cut, num_ties, softmax, S.TILE)
    return cut, id_of_tie(row, num, cut, num_ties, S.TILE * 4)


@triton.jit
def mass_of_cut(part, cut, num_ties, softmax, TILE: tl.constexpr):
    """What lies above a cut and the first num_ties on it weigh together."""
    above = from_key(to_key(cut) + 1)
    num_equal = count_from(part, cut, TILE) - count_from(part, above, TILE)
    weight = weigh(cut, softmax[0], softmax[1]).to(tl.float64)
    mass = mass_from(part, above, softmax, TILE)
    return mass + tl.minimum(num_ties, num_equal).to(tl.float64) * weight


@triton.jit
def id_of_tie(row, num, cut, num_ties, TILE: tl.constexpr):
    """The id of the last of so many tokens on the cut, or the largest id if there are no more."""
    last = num - 1
    before = 0
    for start in range(0, num, TILE):
        is_tie = (load_part(row, start, num, TILE) == cut).to(tl.int32)
        rank = before + tl.cumsum(is_tie)
        ids = start + tl.arange(0, TILE)
        last = tl.minimum(last, tl.min(tl.where((is_tie > 0) & (rank == num_ties), ids, num)))
        before += tl.sum(is_tie)
    return last
