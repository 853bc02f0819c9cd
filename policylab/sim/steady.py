"""Which part of a run says how the engine does for good, and whether there is one.

*Warm-up*: by MSER-5. Requests in order of arrival are taken in fives; as many fives are left out in
front as make the standard error of the mean of the others smallest, at most half of them. That is
done for the time to the first token and for the requests in the engine at each arrival, and the
larger number counts. *Drain*: the period ends with the last arrival; requests that came before it
count whenever they end.

*Overloaded*: after the first fifth of the arrivals, the mean number of requests in the engine is
taken in eight parts. If of the 28 pairs of parts at least 24 have more in the later one, and from
the first part to the last it rises by 6 % of the arrivals between, the queue grows without end: a
mean would say how long the run was. (At 1.1 times the capacity it rises by 9 %; of runs of 1,000
requests at 0.9 and at 1.2 of it hardly one is judged wrongly.) Each class of requests is judged
by itself: tiers, users, priorities, the quarter with the longest prompts and the one with
the longest outputs; 15 % of it must stay, and of a class of 20 to 79 requests half. A class that
starves is overload, even if it is so small that the whole queue hardly grows.

*Backlog*: all requests came at once, or at a rate that no scheduler could nearly serve. All of them
count, and the period ends with the last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policylab.sim.estimate import Floats
from policylab.sim.records import Requests

STEADY, OVERLOADED, AT_ONCE, BACKLOG = "steady", "overloaded", "at once", "backlog"
WHOLE = "whole"  # all requests count because that was wanted

Mask = NDArray[np.bool_]

FIVE = 5
NUM_PARTS = 8
MIN_RISING = 24  # of the 28 pairs of parts
MIN_RISING_OF_CLASS = 25  # as there are many classes, each of which may grow by chance
MIN_SLOPE = 0.06  # requests that stay, for each that comes
MIN_ARRIVALS = 80  # fewer show no growth: eight parts of ten
SLOPE_OF_CLASS = 0.15
MIN_OF_CLASS = 20
ALL_PAIRS = 28
SLOPE_OF_FEW = 0.5
LONGEST = 0.25  # of the requests
NEARLY = 0.9  # of the most warm-up there could be


class Window(NamedTuple):
    """The part of a run that counts: requests that came from ``start`` to ``end`` (seconds)."""

    start: float
    end: float
    num_warmup: int
    """Requests that came before it."""
    state: str
    """"steady", "overloaded", "whole", or "at once" and "backlog" of a backlog."""
    is_short: bool = False
    """Nearly half of the run or more was warm-up: it may not have ended then."""
    growing: str = ""
    """What grows where it is overloaded: "its queue", or a class of requests in it."""
    until: float = 0.0
    """When the last token of the run came, seconds."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """Whether all requests count, up to the last token."""
        return self.state in (AT_ONCE, BACKLOG, WHOLE)

    def whole(self, state: str = WHOLE) -> Window:
        """All of the run."""
        if self.is_whole:
            return self
        return Window(0.0, self.until, 0, state, until=self.until)

    def joined(self, other: Window) -> Window:
        """The part of the same requests that both windows have: the later start."""
        return self if self.num_warmup >= other.num_warmup else self._begin(other)

    def _begin(self, other: Window) -> Window:
        return self._replace(
            start=other.start, num_warmup=other.num_warmup, is_short=other.is_short
        )


def window(requests: Requests, *, is_backlog: bool = False) -> Window:
    """What counts of a run. ``is_backlog``: requests came much faster than any could be served."""
    arrival, last = requests.times("arrival"), requests.times("last")
    if not len(arrival):
        return Window(0.0, 0.0, 0, AT_ONCE)
    final = float(np.nanmax(last, initial=float(arrival[-1])))
    if arrival[0] == arrival[-1]:
        return Window(float(arrival[0]), final, 0, AT_ONCE, until=final)
    if is_backlog:
        return Window(0.0, final, 0, BACKLOG, until=final)
    if what := growing(requests):
        cut = len(arrival) // 5
        ends = (float(arrival[cut]), float(arrival[-1]))
        return Window(*ends, cut, OVERLOADED, growing=what, until=final)
    inside = in_engine(requests)
    ttft = requests.times("first") - arrival
    cuts = (warmup(inside), warmup(np.where(np.isnan(ttft), 0.0, ttft)))
    cut, limit = max(cuts), len(arrival) // FIVE // 2 * FIVE
    is_short = cut >= NEARLY * limit > 0
    ends = (float(arrival[cut]), float(arrival[-1]))
    return Window(*ends, cut, STEADY, is_short=is_short, until=final)


def growing(requests: Requests) -> str:
    """What grows without end: "its queue", or a class of requests as in "its requests of tier
    'batch'"; empty if nothing does."""
    if is_growing(in_engine(requests)):
        return "its queue"
    for name, which in _classes(requests):
        if _starves(in_engine(requests, which)):
            return f"the number of its requests {name}"
    return ""


def _starves(inside: Floats) -> bool:
    """Whether a class grows; one of few requests only if half of them stay."""
    if len(inside) >= MIN_ARRIVALS:
        return is_growing(inside, SLOPE_OF_CLASS, MIN_RISING_OF_CLASS)
    return is_growing(inside, SLOPE_OF_FEW, ALL_PAIRS, MIN_OF_CLASS)


def _classes(requests: Requests) -> Iterator[tuple[str, Mask]]:
    """Tiers, users, priorities and sizes whose requests a scheduler may starve."""
    columns = [(f"of {kind}", requests.text(kind)) for kind in ("tier", "user")]
    columns.append(("of priority", requests.counts("priority")))
    for name, column in columns:
        values, numbers = np.unique(column.astype(str), return_counts=True)
        for value in values[numbers >= MIN_OF_CLASS].tolist() if len(values) > 1 else []:
            yield f"{name} {value!r}", column.astype(str) == value
    for kind in ("prompt", "output"):
        sizes = requests.counts(f"num_{kind}")
        yield f"with the longest {kind}s", sizes > np.quantile(sizes, 1.0 - LONGEST)


def in_engine(requests: Requests, which: Mask | slice = slice(None)) -> Floats:
    """How many requests were in the engine as each came, itself included [requests]; of those of
    ``which`` alone, if it is given."""
    arrival, last = requests.times("arrival")[which], requests.times("last")[which]
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


def is_growing(
    inside: Floats,
    slope: float = MIN_SLOPE,
    rising: int = MIN_RISING,
    least: int = MIN_ARRIVALS,
) -> bool:
    """Whether more and more requests are in the engine: of those that come at least ``slope``
    stay, and this many pairs of parts rise. ``least``: fewer requests are not judged."""
    if len(inside) < least:
        return False
    parts = _parts(inside)
    means = [float(part.mean()) for part in parts]
    num_rising = sum(later > earlier for earlier, later in combinations(means, 2))
    between = sum(map(len, parts)) * (NUM_PARTS - 1) / NUM_PARTS
    return num_rising >= rising and means[-1] - means[0] >= slope * between


def _parts(inside: Floats) -> list[Floats]:
    return np.array_split(inside[len(inside) // 5 :], NUM_PARTS)
