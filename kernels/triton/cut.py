"""Finds where top-k and top-p cut a row of logits, by bisection on the bits of a float, without
sorting.

A cut is a logit and a token id. Tokens with a larger logit remain, and those with an equal logit up
to this id. Weights are integers, so sums are exact in any order of addition."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.bins import UNIT, bin_of

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def to_key(value):
    """Returns an integer ordered like the float32 value; 0.0 and -0.0 give the same integer."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def at_least(limit):
    """Returns the smallest finite float32 that is at least the float64 `limit`."""
    bounded = tl.maximum(limit, LOWEST)
    rounded = bounded.to(tl.float32)
    above = from_key(to_key(rounded) + 1)
    return tl.where(rounded.to(tl.float64) >= bounded, rounded, above)


@triton.jit
def load_part(source, start, end, TILE: tl.constexpr):
    """Load TILE logits from index `start` on as float32; -inf for indices from `end` on."""
    place = start + tl.arange(0, TILE)
    return tl.load(source + place, mask=place < end, other=float("-inf")).to(tl.float32)


@triton.jit
def softmax_of(peak, heat):
    """Returns the parameters with which `weigh` computes a row's weights: (largest logit, factor on
    logits). peak: the largest logit; heat: the temperature."""
    return peak, tl.minimum(1.0 / heat * LOG2E, 1e30).to(tl.float32)


@triton.jit
def weigh(x, softmax):
    """Returns integer weights of logits, proportional to probabilities; the largest logit has
    weight UNIT. softmax: from `softmax_of`."""
    return (tl.exp2((x - softmax[0]) * softmax[1]) * UNIT).to(tl.int64)


@triton.jit
def target_of(top_p, total):
    """Returns the sum of weights that the tokens kept by top-p must reach. total: the sum of the
    weights of all tokens."""
    return tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def kth_of_tile(values, k, peak):
    """Returns the k-th largest of `values`, or the lowest finite float32 if fewer than k are
    finite. peak: the largest of them."""
    low = to_key(tl.full([], LOWEST, tl.float32))
    high = to_key(peak)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((values >= from_key(middle)).to(tl.int32)) >= k:
            low = middle
        else:
            high = middle - 1
    return from_key(low)


# A part is (address of candidates, their number, lowest candidate, window, (first, last) bin). The
# candidates were gathered, or, if they are too many, are read from the row by their bins.


@triton.jit
def load_candidates(part, start, S: tl.constexpr):
    """Load a tile of logits of `part` from index `start` on, -inf unless they are candidates."""
    source, size, lowest, window, between = part
    x = load_part(source, start, size, S.TILE)
    bin = bin_of(x, window, S.BINS)
    is_one = (x >= lowest) & (bin >= between[0]) & (bin <= between[1])
    return tl.where(is_one, x, float("-inf"))


@triton.jit
def key_range(part, S: tl.constexpr):
    """Returns the smallest and the largest candidate as integer keys, see `to_key`."""
    smallest = tl.full([], float("inf"), tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, part[1], S.TILE):
        x = load_candidates(part, start, S)
        smallest = tl.minimum(smallest, tl.min(tl.where(x == float("-inf"), float("inf"), x)))
        largest = tl.maximum(largest, tl.max(x))
    return to_key(smallest), to_key(largest)


@triton.jit
def count_from(part, floor, S: tl.constexpr):
    """Returns how many of the candidate logits in `part` are at least `floor`."""
    count = tl.zeros([], tl.int32)
    for start in range(0, part[1], S.TILE):
        count += tl.sum((load_candidates(part, start, S) >= floor).to(tl.int32))
    return count


@triton.jit
def mass_from(part, floor, softmax, S: tl.constexpr):
    """Returns the sum of the weights of the candidates whose logit is at least `floor`."""
    mass = tl.zeros([], tl.int64)
    for start in range(0, part[1], S.TILE):
        x = load_candidates(part, start, S)
        mass += tl.sum(weigh(tl.where(x >= floor, x, float("-inf")), softmax))
    return mass


@triton.jit
def cut_top_k(part, k, S: tl.constexpr):
    """Returns the top-k cut: (value, count). Candidates above remain, and `count` equal to it."""
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
    """Returns the top-p cut: (value, count). The largest candidates whose weights reach `target`
    remain: all above the value, and `count` equal to it. Ignored are candidates below `floor`, and
    all but num_ties of those equal to `floor`."""
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
    """Returns the sum of weights of the candidates above `cut` and of `num_ties` equal to it."""
    above = from_key(to_key(cut) + 1)
    num_equal = count_from(part, cut, S) - count_from(part, above, S)
    ties = tl.minimum(num_ties, num_equal).to(tl.int64) * weigh(cut, softmax)
    return mass_from(part, above, softmax, S) + ties


@triton.jit
def count_ties(part, ids, cut, last, S: tl.constexpr):
    """Returns the number of candidates that equal `cut` and have a token id of at most `last`. ids:
    (address of the candidates' ids; True to read them, False if a candidate's index is its id;
    vocabulary size)."""
    count = tl.zeros([], tl.int32)
    for start in range(0, part[1], S.TILE):
        place = start + tl.arange(0, S.TILE)
        read = tl.load(ids[0] + place, mask=(place < part[1]) & ids[1], other=0)
        is_tie = load_candidates(part, start, S) == cut
        count += tl.sum((is_tie & (tl.where(ids[1], read, place) <= last)).to(tl.int32))
    return count


@triton.jit
def id_of_tie(part, ids, cut, num_ties, S: tl.constexpr):
    """Returns the token id of the num_ties-th candidate that equals `cut`, by ascending id; the
    vocabulary size if no more than num_ties equal it. ids: see `count_ties`."""
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
    """Returns the cut of a row: (value, id). Tokens with a larger logit remain, and those with a
    logit equal to the value up to this id.

    known: (number of tokens above the candidates, sum of their weights, sum of the weights of all
    tokens that pass min-p); limits: (top_k, top_p, whether top_k is on, whether top_k excludes
    candidates)."""
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
