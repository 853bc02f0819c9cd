"""Where top-k and top-p cut the candidates of a row: by bisection on the bits of a float, no sort.

A cut is a value and an id: tokens above the value remain, and those on it up to the id. Weights are
whole numbers, so that sums come out the same in whatever order and by whatever programs they are
added: what lies above the candidates is known exactly without being looked at again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.bins import UNIT, bin_of

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
def softmax_of(peak, heat):
    """(peak, what logits are multiplied by): all that `weigh` wants to know of a row."""
    return peak, tl.minimum(1.0 / heat * LOG2E, 1e30).to(tl.float32)


@triton.jit
def weigh(x, softmax):
    """Probabilities in whole units, of which the peak has UNIT."""
    return (tl.exp2((x - softmax[0]) * softmax[1]) * UNIT).to(tl.int64)


@triton.jit
def target_of(top_p, total):
    """What a nucleus has to weigh; the rounding of top_p * total asks for no token more."""
    return tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)


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


# Candidates: (where they lie, how many lie there, the lowest that counts, window, (first, last)).
# They are what was gathered, or where that was too much, those of a whole row in the bins between.


@triton.jit
def load_candidates(part, start, S: tl.constexpr):
    """Logits of a part, -inf where they are no candidates."""
    source, size, lowest, window, between = part
    x = load_part(source, start, size, S.TILE)
    bin = bin_of(x, window, S.BINS)
    is_one = (x >= lowest) & (bin >= between[0]) & (bin <= between[1])
    return tl.where(is_one, x, float("-inf"))


@triton.jit
def key_range(part, S: tl.constexpr):
    """The keys of the smallest and of the largest candidate."""
    smallest = tl.full([], float("inf"), tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, part[1], S.TILE):
        x = load_candidates(part, start, S)
        smallest = tl.minimum(smallest, tl.min(tl.where(x == float("-inf"), float("inf"), x)))
        largest = tl.maximum(largest, tl.max(x))
    return to_key(smallest), to_key(largest)


@triton.jit
def count_from(part, floor, S: tl.constexpr):
    """How many candidates are not below floor."""
    count = tl.zeros([], tl.int32)
    for start in range(0, part[1], S.TILE):
        count += tl.sum((load_candidates(part, start, S) >= floor).to(tl.int32))
    return count


@triton.jit
def mass_from(part, floor, softmax, S: tl.constexpr):
    """What candidates not below floor weigh together."""
    mass = tl.zeros([], tl.int64)
    for start in range(0, part[1], S.TILE):
        x = load_candidates(part, start, S)
        mass += tl.sum(weigh(tl.where(x >= floor, x, float("-inf")), softmax))
    return mass


@triton.jit
def cut_top_k(part, k, S: tl.constexpr):
    """(cut, how many of those on it remain) so that k candidates remain, of k or more."""
    low, high = key_range(part, S)
    while low < high:
        middle = (low + high + 1) >> 1
        if count_from(part, from_key(middle), S) >= k:
            low = middle
        else:
            high = middle - 1
    return from_key(low), k - count_from(part, from_key(low + 1), S)


@triton.jit
def cut_top_p(part, target, floor, num_ties, softmax, S: tl.constexpr):
    """(cut, how many of those on it remain): the fewest largest that weigh `target` together.

    None below the floor; at the floor itself no more than num_ties are there to remain.
    """
    low, high = key_range(part, S)
    low = tl.maximum(low, to_key(floor))
    while low < high:
        middle = (low + high + 1) >> 1
        if mass_from(part, from_key(middle), softmax, S) >= target:
            low = middle
        else:
            high = middle - 1
    cut = from_key(low)
    lacking = target - mass_from(part, from_key(low + 1), softmax, S)
    weight = tl.maximum(weigh(cut, softmax), 1)
    needed = tl.minimum(tl.maximum((lacking + weight - 1) // weight, 1), 2**30).to(tl.int32)
    return cut, tl.where(cut == floor, tl.minimum(needed, num_ties), needed)


@triton.jit
def mass_of_cut(part, cut, num_ties, softmax, S: tl.constexpr):
    """What candidates above a cut and the first num_ties on it weigh together."""
    above = from_key(to_key(cut) + 1)
    num_equal = count_from(part, cut, S) - count_from(part, above, S)
    ties = tl.minimum(num_ties, num_equal).to(tl.int64) * weigh(cut, softmax)
    return mass_from(part, above, softmax, S) + ties


@triton.jit
def count_ties(part, ids, cut, last, S: tl.constexpr):
    """How many candidates on the cut have an id up to `last`.

    ids: (where they are, whether they are to be read or are places, how many the vocabulary has).
    """
    count = tl.zeros([], tl.int32)
    for start in range(0, part[1], S.TILE):
        place = start + tl.arange(0, S.TILE)
        read = tl.load(ids[0] + place, mask=(place < part[1]) & ids[1], other=0)
        is_tie = load_candidates(part, start, S) == cut
        count += tl.sum((is_tie & (tl.where(ids[1], read, place) <= last)).to(tl.int32))
    return count


@triton.jit
def id_of_tie(part, ids, cut, num_ties, S: tl.constexpr):
    """The id of the last of this many tokens on the cut, or one beyond all if there are no more."""
    high = tl.full([], ids[2], tl.int32)
    low = tl.where(count_ties(part, ids, cut, high, S) <= num_ties, high, 0)
    while low < high:
        middle = (low + high) >> 1
        if count_ties(part, ids, cut, middle, S) >= num_ties:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def cut_candidates(part, ids, known, limits, softmax, S: tl.constexpr):
    """(cut, id of the last tie) of a row.

    known: how many lie above the candidates, what these weigh, what all weigh that min-p leaves;
    limits: top_k, top_p, is top_k on, does it leave out any that may be a cut.
    """
    num_above, mass_above, total = known
    top_k, top_p, has_top_k, cuts_top_k = limits
    cut = part[2]
    num_ties = tl.full([], ids[2], tl.int32)
    if cuts_top_k:
        cut, num_ties = cut_top_k(part, top_k - num_above, S)
    if top_p < 1:
        if has_top_k:
            total = mass_above + mass_of_cut(part, cut, num_ties, softmax, S)
        target = target_of(top_p, total) - mass_above
        cut, num_ties = cut_top_p(part, target, cut, num_ties, softmax, S)
    return cut, id_of_tie(part, ids, cut, num_ties, S)
