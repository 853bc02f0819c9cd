"""Estimates with 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import atan, exp, inf, lgamma, log, nan, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95
NUM_BATCHES = 20  # values of a run are correlated; the means of this many parts hardly are


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval; an end is infinite if the data give no bound."""

    value: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


NOTHING = Estimate(nan, nan, nan)


def mean_of(values: Floats) -> Estimate:
    """Returns the mean of values from one run, in order of time, which may be correlated. The
    interval comes from the means of 20 consecutive parts (batch means)."""
    if not len(values):
        return NOTHING
    parts = np.array_split(values, min(NUM_BATCHES, len(values)))
    half = half_width([float(part.mean()) for part in parts])
    value = float(values.mean())
    return Estimate(value, value - half, value + half)


def mean_over(values: Sequence[float]) -> Estimate:
    """Returns the mean of independent values (one per seed), with Student's interval."""
    if not values:
        return NOTHING
    value, half = sum(values) / len(values), half_width(values)
    return Estimate(value, value - half, value + half)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Returns the difference of the means of two sets of values, with Welch's interval."""
    if len(ours) < 2 or len(theirs) < 2:
        return Estimate(_mean(ours) - _mean(theirs), -inf, inf)
    errors = [float(np.var(v, ddof=1)) / len(v) for v in (ours, theirs)]
    value, total = _mean(ours) - _mean(theirs), sum(errors)
    if not total:
        return Estimate(value, value, value)
    shares = sum(e * e / (len(v) - 1) for e, v in zip(errors, (ours, theirs), strict=True))
    half = student(max(1, int(total * total / shares))) * sqrt(total)
    return Estimate(value, value - half, value + half)


def half_width(values: Sequence[float]) -> float:
    """Returns half the width of the 95 % interval of a mean of independent values; infinity for
    fewer than two values."""
    if len(values) < 2:
        return inf
    return student(len(values) - 1) * float(np.std(values, ddof=1)) / sqrt(len(values))


def quantile_of(values: Floats, share: float) -> Estimate:
    """Returns the ``share`` quantile: the smallest value such that at least this share of the
    values are no larger. The interval treats the values as independent."""
    return weighted_quantile(values, np.ones(len(values)), share)


def weighted_quantile(values: Floats, weights: Floats, share: float) -> Estimate:
    """Returns the ``share`` quantile of weighted values. For the interval, each value counts as one
    observation."""
    count = len(values)
    if not count:
        return NOTHING
    order = np.argsort(values, kind="stable")
    ascending, upto = values[order], np.cumsum(weights[order])
    low, high = ranks_around(count, share)

    def at(part: float) -> float:
        place = int(np.searchsorted(upto, part * upto[-1] * (1.0 - 1e-12)))
        return float(ascending[min(place, count - 1)])

    return Estimate(
        at(share),
        at(low / count) if low >= 1 else -inf,
        at(high / count) if high <= count else inf,
    )


@cache
def ranks_around(count: int, share: float) -> tuple[int, int]:
    """Returns the 95 % interval of the ``share`` quantile of ``count`` values, as the ranks of its
    two ends (1: the smallest value). Rank 0 or ``count + 1``: no bound."""
    centre, spread = count * share, 8.0 * sqrt(count * share * (1.0 - share)) + 8.0
    first, last = max(0, int(centre - spread)), min(count, int(centre + spread) + 1)
    below = np.array([_binomial(count, share, k) for k in range(first, last + 1)]).cumsum()
    tail = (1.0 - LEVEL) / 2.0
    low = first + int(np.searchsorted(below, tail, side="right"))
    high = first + int(np.searchsorted(below, 1.0 - tail)) + 1
    return low, min(high, count + 1)


def _binomial(count: int, share: float, k: int) -> float:
    if share >= 1.0:
        return float(k == count)
    ways = lgamma(count + 1) - lgamma(k + 1) - lgamma(count - k + 1)
    return exp(ways + k * log(share) + (count - k) * log(1.0 - share))


@cache
def student(degrees: int) -> float:
    """Returns half the width of Student's 95 % interval of a mean, in standard errors."""
    scale = exp(lgamma((degrees + 1) / 2) - lgamma(degrees / 2)) / sqrt(degrees * pi)

    def inside(width: float) -> float:
        points = np.linspace(0.0, width, 2001)
        density = scale * (1.0 + points**2 / degrees) ** (-(degrees + 1) / 2)
        return 2.0 * float(np.trapezoid(density, points))

    low, high = 1.0, 16.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < LEVEL else (low, middle)
    return (low + high) / 2


def chance(values: Sequence[float]) -> float:
    """Returns the two-sided p-value of the hypothesis that the mean is 0 (Student's t-test); 1 for
    fewer than two values or if all are 0."""
    if len(values) < 2 or not any(values):
        return 1.0
    degrees, error = len(values) - 1, float(np.std(values, ddof=1)) / sqrt(len(values))
    if not error:
        return 0.0
    # With t = sqrt(degrees) tan(angle) the density becomes a power of the cosine.
    angle = atan(abs(_mean(values)) / error / sqrt(degrees))
    outside, inside = (
        float(np.trapezoid(np.cos(points) ** (degrees - 1), points))
        for points in (np.linspace(angle, pi / 2, 4001), np.linspace(0.0, pi / 2, 4001))
    )
    return outside / inside


def corrected(chances: Sequence[float]) -> list[float]:
    """Returns the p-values of several tests, corrected by Holm's method for the number of tests."""
    found, worst = [1.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        worst = max(worst, min(1.0, (len(chances) - rank) * chances[place]))
        found[place] = worst
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan
