"""Which part of a run says how the engine does for good, and whether there is one.

*Warm-up*: by MSER-5. Requests in order of arrival are taken in fives; as many fives are left out in
front as make the standard error of the mean of the others smallest, at most half of them. That is
done for the time to the first token and for the requests in the engine at each arrival, and the
larger number counts. *Drain*: the period ends with the last arrival; requests that came before it
count whenever they end.

*Overloaded*: behind the first fifth of the arrivals, the mean number of requests in the engine is
taken in eight parts. If of the 28 pairs of parts at least 24 have more in the later one, and from
the first part to the last it rises by 6 % of the arrivals between, the queue grows without end: a
mean would say how long the run was. (At 1.1 times the capacity it rises by 9 %; of runs of 1,000
requests at 0.9 and at 1.2 of it hardly one is judged wrongly.)
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from engine.sim.estimate import Floats
from engine.sim.records import Requests

STEADY, OVERLOADED, AT_ONCE = "steady", "overloaded", "at once"

FIVE = 5
NUM_PARTS = 8
MIN_RISING = 24  # of the 28 pairs of parts
MIN_SLOPE = 0.06  # requests that stay, for each that comes
MIN_ARRIVALS = 80  # fewer show no growth: eight parts of ten


class Window(NamedTuple):
    """The part of a run that counts: requests that came from ``start`` to ``end`` (seconds)."""

    start: float
    end: float
    num_warmup: int
    """Requests that came before it."""
    state: str
    """"steady", "overloaded", or "at once" where all came at the same time."""
    is_short: bool = False
    """Half of the run was warm-up: it may not have ended then."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def whole(self) -> Window:
        """All of the run."""
        return Window(0.0, self.end, 0, AT_ONCE if self.state == AT_ONCE else STEADY)

    def joined(self, other: Window) -> Window:
        """What both have of the same requests: the later start."""
        return self if self.num_warmup >= other.num_warmup else self._begin(other)

    def _begin(self, other: Window) -> Window:
        return self._replace(
            start=other.start, num_warmup=other.num_warmup, is_short=other.is_short
        )


def window(requests: Requests) -> Window:
    """What counts of a run."""
    arrival, last = requests.times("arrival"), requests.times("last")
    if not len(arrival):
        return Window(0.0, 0.0, 0, AT_ONCE)
    final = float(np.nanmax(last, initial=float(arrival[-1])))
    if arrival[0] == arrival[-1]:
        return Window(float(arrival[0]), final, 0, AT_ONCE)
    inside = in_engine(requests)
    if is_growing(inside):
        cut = len(arrival) // 5
        return Window(float(arrival[cut]), float(arrival[-1]), cut, OVERLOADED)
    ttft = requests.times("first") - arrival
    cuts = (warmup(inside), warmup(np.where(np.isnan(ttft), 0.0, ttft)))
    cut, limit = max(cuts), len(arrival) // FIVE // 2 * FIVE
    return Window(float(arrival[cut]), float(arrival[-1]), cut, STEADY, is_short=cut >= limit > 0)


def in_engine(requests: Requests) -> Floats:
    """How many requests were in the engine as each came, itself included [requests]."""
    arrival, last = requests.times("arrival"), requests.times("last")
    ends = np.sort(np.where(np.isnan(last), arrival, last))  # the refused were never in
    number = np.arange(1, len(arrival) + 1) - np.searchsorted(ends, arrival, side="right")
    return number.astype(np.float64)


def warmup(series: Floats) -> int:
    """How many values in front are better left out (MSER-5)."""
    fives = len(series) // FIVE
    if fives < 4:
        return 0
    means = series[: fives * FIVE].reshape(fives, FIVE).mean(axis=1)
    kept = np.arange(fives, 0, -1)
    total = means[::-1].cumsum()[::-1]
    squares = (means * means)[::-1].cumsum()[::-1]
    errors = np.maximum(0.0, squares - total * total / kept) / (kept * kept)
    return int(np.argmin(errors[: fives // 2 + 1])) * FIVE


def is_growing(inside: Floats, slope: float = MIN_SLOPE) -> bool:
    """Whether more and more requests are in the engine: of those that come at least ``slope``
    stay."""
    if len(inside) < MIN_ARRIVALS:
        return False
    parts = _parts(inside)
    means = [float(part.mean()) for part in parts]
    rising = sum(later > earlier for earlier, later in combinations(means, 2))
    between = sum(map(len, parts)) * (NUM_PARTS - 1) / NUM_PARTS
    return rising >= MIN_RISING and means[-1] - means[0] >= slope * between


def _parts(inside: Floats) -> list[Floats]:
    return np.array_split(inside[len(inside) // 5 :], NUM_PARTS)
