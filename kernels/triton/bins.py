"""Sorts logits into bins. The number of tokens in each bin shows which bins may contain the
smallest logit that top-k or top-p keeps (the cut).

Bin 0 begins at the largest logit; the last bin contains all lower logits. window: (largest logit,
bins per unit). Rounding never changes the order of two bins."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**42)  # integer weight of the peak: sums of 2**20 tokens fit into 62 bits
SLACK = tl.constexpr(1e-4)  # relative error allowed for weights at borders; it is below 2e-5


@triton.jit
def window_of(peak, bottom, BINS: tl.constexpr):
    span = tl.minimum(tl.maximum(peak - bottom, 1e-30), 1e38)
    return peak, (BINS - 1) / span


@triton.jit
def bin_of(x, window, BINS: tl.constexpr):
    return tl.minimum(tl.floor((window[0] - x) * window[1]), BINS - 1).to(tl.int32)


@triton.jit
def mass_bounds(counts, window, scale, BINS: tl.constexpr):
    """Return a lower and an upper bound of the sum of token weights in each bin. counts: tokens per
    bin; scale: a token's weight is proportional to 2 ** (scale * logit)."""
    bin = tl.arange(0, BINS)
    depth = bin.to(tl.float32) / window[1]
    heaviest = tl.exp2(-depth * scale).to(tl.float64) * (UNIT * (1 + SLACK))
    lightest = tl.exp2(-(depth + 1.0 / window[1]) * scale).to(tl.float64) * (UNIT * (1 - SLACK))
    # Weights are rounded down to integers.
    lightest = tl.where(bin == BINS - 1, 0.0, tl.maximum(lightest - 1, 0.0))
    return counts * lightest, counts * heaviest


@triton.jit
def bins_of_cut(counts, total, window, scale, limits, BINS: tl.constexpr):
    """Return the first and the last bin that may contain the smallest logit kept by top-k or top-p.
    total: sum of the weights of all tokens that pass min-p; limits: (top_k, top_p, has top_k)."""
    top_k, top_p, has_top_k = limits
    bin = tl.arange(0, BINS)
    first = tl.zeros([], tl.int32)
    last = first + (BINS - 1)
    if has_top_k:
        last = tl.minimum(tl.sum((tl.cumsum(counts) < top_k).to(tl.int32)), last)
        first = last
    if top_p < 1:
        least, most = mass_bounds(counts, window, scale, BINS)
        # Sums of each bin and all bins above it.
        least_from = tl.cumsum(least)
        most_from = tl.cumsum(most)
        if has_top_k:
            least_total = tl.sum(tl.where(bin < last, least, 0.0))
            begin = tl.sum((most_from < tl.maximum(top_p * least_total, 1.0)).to(tl.int32))
            first = tl.minimum(begin, last)
        else:
            # The total is known, so bounds from below are better if little lies below. Tokens in no
            # bin weigh less than 1 - top_p of the peak together.
            whole = total.to(tl.float64)
            target = tl.maximum(top_p * whole, 1.0)
            least_below = tl.sum(least) - least_from
            most_below = tl.sum(most) - most_from + (1 - top_p) * UNIT
            begin = tl.sum((tl.minimum(most_from, whole - least_below) < target).to(tl.int32))
            end = tl.sum((tl.maximum(least_from, whole - most_below) < target).to(tl.int32))
            first = tl.minimum(begin, last)
            last = tl.maximum(tl.minimum(end, last), first)
    return first, last
