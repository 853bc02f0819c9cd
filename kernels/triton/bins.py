"""Bins of logits: counting what falls into each tells between which of them a row is cut.

A window is (the largest logit, bins a unit), and the last bin takes all that lies below the others.
Where a token falls is a matter of a subtraction, a product and rounding down, none of which turns
an order around: bins part a row cleanly wherever their borders come to lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**42)  # what the peak weighs: 2**20 tokens stay within 62 bits
SLACK = tl.constexpr(1e-4)  # by how much weights at borders may be wrong; they are within 2e-5


@triton.jit
def window_of(peak, bottom, BINS: tl.constexpr):
    span = tl.minimum(tl.maximum(peak - bottom, 1e-30), 1e38)
    return peak, (BINS - 1) / span


@triton.jit
def bin_of(x, window, BINS: tl.constexpr):
    return tl.minimum(tl.floor((window[0] - x) * window[1]), BINS - 1).to(tl.int32)


@triton.jit
def mass_bounds(counts, window, scale, BINS: tl.constexpr):
    """The least and the most that the tokens of each bin weigh together."""
    bin = tl.arange(0, BINS)
    depth = bin.to(tl.float32) / window[1]
    heaviest = tl.exp2(-depth * scale).to(tl.float64) * (UNIT * (1 + SLACK))
    lightest = tl.exp2(-(depth + 1.0 / window[1]) * scale).to(tl.float64) * (UNIT * (1 - SLACK))
    # Weights are rounded down to whole units.
    lightest = tl.where(bin == BINS - 1, 0.0, tl.maximum(lightest - 1, 0.0))
    return counts * lightest, counts * heaviest


@triton.jit
def bins_of_cut(counts, total, window, scale, limits, BINS: tl.constexpr):
    """(first, last): the cut lies in one of the bins between.

    total: what all tokens weigh that min-p leaves; limits: top_k, top_p, whether top_k is on.
    """
    top_k, top_p, has_top_k = limits
    bin = tl.arange(0, BINS)
    first = tl.zeros([], tl.int32)
    last = first + (BINS - 1)
    if has_top_k:
        last = tl.minimum(tl.sum((tl.cumsum(counts) < top_k).to(tl.int32)), last)
        first = last
    if top_p < 1:
        least, most = mass_bounds(counts, window, scale, BINS)
        # Of each bin and all above it.
        least_from = tl.cumsum(least)
        most_from = tl.cumsum(most)
        if has_top_k:
            least_total = tl.sum(tl.where(bin < last, least, 0.0))
            begin = tl.sum((most_from < tl.maximum(top_p * least_total, 1.0)).to(tl.int32))
            first = tl.minimum(begin, last)
        else:
            # What lies below says more where that is little, as the total is known. Tokens in no
            # bin weigh less than 1 - top_p of the peak.
            whole = total.to(tl.float64)
            target = tl.maximum(top_p * whole, 1.0)
            least_below = tl.sum(least) - least_from
            most_below = tl.sum(most) - most_from + (1 - top_p) * UNIT
            begin = tl.sum((tl.minimum(most_from, whole - least_below) < target).to(tl.int32))
            end = tl.sum((tl.maximum(least_from, whole - most_below) < target).to(tl.int32))
            first = tl.minimum(begin, last)
            last = tl.maximum(tl.minimum(end, last), first)
    return first, last
