"""The part of a run from which its figures are computed.

*Steady*: requests after the warm-up count, up to the last arrival. The warm-up is found by MSER-5:
requests form groups of five in order of arrival, and the first groups (at most half) are left out
such that the rest has the smallest standard error of its mean. This is done for the time to first
token and for the number of requests in the engine at each arrival; the longer warm-up is used.

*Overloaded*: the queue grows without end, so means would depend on the length of the run. The
arrivals after the first fifth are divided into eight parts. The mean number of requests in the
engine must be larger in the later part in at least 24 of the 28 pairs of parts, and must grow from
the first part to the last by at least 6 % of the arrivals in between. (At 1.1 times the capacity it
grows by 9 %.) The same test, with thresholds of 15 %, or 50 % for 20 to 79 requests, is made for
each tier, user and priority, and for the quarters of requests with the longest prompts and outputs:
a scheduler may starve a class while the whole queue hardly grows.

*Backlog*: all requests arrived at once, or much faster than any scheduler could serve them. All
requests count, up to the last token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policylab.sim.estimate import Floats
from policylab.sim.records import Requests

STEADY, OVERLOADED, AT_ONCE, BACKLOG = "steady", "overloaded", "at once", "backlog"
WHOLE = "whole"  # all requests count because the user chose so

Mask = NDArray[np.bool_]

FIVE = 5
NUM_PARTS = 8
MIN_RISING = 24  # rising pairs of parts, of 28
MIN_RISING_OF_CLASS = 25  # stricter: there are many classes, each of which may grow by chance
MIN_SLOPE = 0.06  # share of arrivals by which the number in the engine must rise
MIN_ARRIVALS = 80  # fewer are too few to judge: eight parts of ten
SLOPE_OF_CLASS = 0.15
MIN_OF_CLASS = 20
ALL_PAIRS = 28
SLOPE_OF_FEW = 0.5
LONGEST = 0.25  # share of requests in the classes with the longest prompts and outputs
NEARLY = 0.9  # share of the largest possible warm-up


class Window(NamedTuple):
    """The part of a run that counts: requests that arrived from ``start`` to ``end`` (seconds)."""

    start: float
    end: float
    num_warmup: int
    """The number of requests that arrived before the window."""
    state: str
    """One of: steady, overloaded, whole; or for a backlog: at once, backlog."""
    is_short: bool = False
    """The warm-up takes nearly half of the run or more, so it may not be over."""
    growing: str = ""
    """What grows in an overloaded run: its queue, or the number of requests of a class."""
    until: float = 0.0
    """The time of the run's last token, in seconds."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """True if all requests count, up to the last token."""
        return self.state in (AT_ONCE, BACKLOG, WHOLE)

    def whole(self, state: str = WHOLE) -> Window:
        """A window with all requests of the run. ``state``: why all of them count."""
        if self.is_whole:
            return self
        return Window(0.0, self.until, 0, state, until=self.until)

    def joined(self, other: Window) -> Window:
        """Return this window, or a copy that begins when ``other`` begins if that has the longer
        warm-up."""
        return self if self.num_warmup >= other.num_warmup else self._begin(other)

    def _begin(self, other: Window) -> Window:
        return self._replace(
            start=other.start, num_warmup=other.num_warmup, is_short=other.is_short
        )


def window(requests: Requests, *, is_backlog: bool = False) -> Window:
    """Find the part of the run that counts; with ``is_backlog`` that is the whole run."""
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
    """Describe what grows without end in a run, such as "its queue" or "the number of its requests
    of tier 'batch'"; "" if nothing does."""
    if is_growing(in_engine(requests)):
        return "its queue"
    for name, which in _classes(requests):
        if _starves(in_engine(requests, which)):
            return f"the number of its requests {name}"
    return ""


def _starves(inside: Floats) -> bool:
    """True if ``inside``, the number of a class's requests in the engine [arrivals], keeps
    growing."""
    if len(inside) >= MIN_ARRIVALS:
        return is_growing(inside, SLOPE_OF_CLASS, MIN_RISING_OF_CLASS)
    return is_growing(inside, SLOPE_OF_FEW, ALL_PAIRS, MIN_OF_CLASS)


def _classes(requests: Requests) -> Iterator[tuple[str, Mask]]:
    """Yield a description and a mask [requests] for each class of requests that may starve."""
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
    """The number of requests in the engine at each arrival, the new request included [requests].
    ``which``: mask or slice of the requests that count."""
    arrival, last = requests.times("arrival")[which], requests.times("last")[which]
    ends = np.sort(np.where(np.isnan(last), arrival, last))  # refused ones were never in
    number = np.arange(1, len(arrival) + 1) - np.searchsorted(ends, arrival, side="right")
    return number.astype(np.float64)


def warmup(series: Floats) -> int:
    """The number of values at the start of ``series`` that MSER-5 assigns to the warm-up."""
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
    """True if ``inside``, the number of requests in the engine [arrivals], keeps growing. It is
    divided into eight parts: at least ``rising`` of 28 pairs have the larger mean in the later
    part, and the mean grows by ``slope`` per arrival. False for fewer than ``least`` arrivals."""
    if len(inside) < least:
        return False
    parts = _parts(inside)
    means = [float(part.mean()) for part in parts]
    num_rising = sum(later > earlier for earlier, later in combinations(means, 2))
    between = sum(map(len, parts)) * (NUM_PARTS - 1) / NUM_PARTS
    return num_rising >= rising and means[-1] - means[0] >= slope * between


def _parts(inside: Floats) -> list[Floats]:
    return np.array_split(inside[len(inside) // 5 :], NUM_PARTS)
