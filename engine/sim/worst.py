"""Where one policy is worst beside another: a search over workloads and engines, made small again.

First each option of engine, workload or load is scaled by itself, to a quarter and to four times as
much. From the worst of these on it is hill climbing: one or two options are scaled at a time, and
kept if the ratio of the two policies' figures has not become smaller. Then what does not
matter is put back: each option to where it was, and requests halved, as long as nine tenths of the
ratio are left. The same seed makes the same tries; time bounds how many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import inf, isfinite
from random import Random
from typing import Any

from engine.errors import ConfigError
from engine.sim.experiment import with_option
from engine.sim.figures import figures, is_better_small
from engine.sim.run import Engine, Run, check, rate_at, run
from engine.sim.steady import STEADY, Window
from engine.sim.workloads import Workload

ENGINE_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "num_blocks")
FACTORS = (0.25, 0.5, 0.7, 1.5, 2.0, 4.0)
FIRST_FACTORS = (0.25, 4.0)
KEEPS = 0.9  # of the ratio, when the case is made smaller
MIN_REQUESTS = 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where two policies are compared."""

    workload: Workload
    engine: Engine
    load: float

    def options(self) -> dict[str, Any]:
        """What may be changed, by name."""
        found: dict[str, Any] = {"load": self.load}
        found |= {name: getattr(self.engine, name) for name in ENGINE_OPTIONS}
        for option in fields(self.workload):
            value = getattr(self.workload, option.name)
            if option.name != "num_requests" and _scales(value):
                found[option.name] = value
        return found

    def at(self, name: str, value: Any) -> Place:
        """With this option at this value. Raises ``ConfigError``."""
        if name == "load":
            return replace(self, load=value)
        workload, engine = with_option(name, value, self.workload, self.engine)
        return replace(self, workload=workload, engine=engine)


@dataclass(frozen=True, kw_only=True)
class Worst:
    """What was found."""

    place: Place
    ratio: float
    """By how much the first policy's figure is worse than the second's, as a factor."""
    start_ratio: float
    """The same where the search began."""
    changed: dict[str, Any]
    """Options that differ from there."""
    num_tries: int


class Hunt:
    """A search for the worst of ``ours`` beside ``theirs``."""

    def __init__(
        self,
        ours: Any,
        theirs: Any,
        figure: str = "e2e.mean",
        *,
        seed: int = 0,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair = (ours, theirs)
        self._figure = figure
        self._seed = seed
        self._dice = Random(seed)
        self._clock = clock
        self._seconds = seconds
        self._ends = clock() + seconds
        self.num_tries = 0

    def search(self, start: Place, max_tries: float = inf) -> Worst:
        """From there to the worst place found. Raises ``ConfigError``."""
        if not 0 < self._seconds < inf:
            raise ConfigError(f"--seconds is {self._seconds:g}, must be above 0")
        check(self._pair, start.workload, start.engine)
        self._ends = self._clock() + self._seconds
        here, first = start, self._ratio(start)
        best = first
        around = _around(start)
        while self._clock() < self._ends and self.num_tries < max_tries:
            there = next(around, None) or self._moved(here)
            ratio = self._ratio(there)
            if ratio > best or (ratio == best and here is not start):
                here, best = there, ratio
        here, best = self._small(here, start, best)
        before = start.options()
        return Worst(
            place=here,
            ratio=best,
            start_ratio=first,
            changed={n: v for n, v in here.options().items() if before.get(n) != v},
            num_tries=self.num_tries,
        )

    def _moved(self, place: Place) -> Place:
        """A place nearby."""
        options = place.options()
        for name in self._dice.sample(sorted(options), self._dice.choice([1, 1, 2])):
            try:
                place = place.at(name, self._scaled(options[name]))
            except ConfigError:
                continue  # there is nothing on that side
        return place

    def _scaled(self, value: Any) -> Any:
        factor = self._dice.choice(FACTORS)
        if isinstance(value, tuple):
            ends = [_times(end, factor) if self._dice.random() < 0.7 else end for end in value]
            return tuple(sorted(ends))
        return _times(value, factor)

    def _ratio(self, place: Place) -> float:
        """How much worse ours is; -1 where it cannot be said."""
        self.num_tries += 1
        try:
            check(self._pair, place.workload, place.engine)
            rate = None
            if place.workload.natural_rate is not None:
                rate = rate_at(place.load, place.workload, place.engine, self._seed)
            ours, theirs = (
                self._value(run(each, place.workload, place.engine, seed=self._seed, rate=rate))
                for each in self._pair
            )
        except ConfigError:
            return -1.0
        if is_better_small(self._figure):
            ratio = ours / theirs if theirs > 0 else -1.0
        else:
            ratio = theirs / ours if ours > 0 else -1.0
        return ratio if isfinite(ratio) else -1.0

    def _value(self, found: Run) -> float:
        """Of all requests: a place at which the queue grows is as good as another."""
        last = found.requests.times("last")
        end = max((t for t in last.tolist() if t == t), default=0.0)
        return figures(found, period=Window(0.0, end, 0, STEADY)).value(self._figure)

    def _small(self, place: Place, start: Place, ratio: float) -> tuple[Place, float]:
        """The same finding with less in it."""
        least = KEEPS * ratio
        before = start.options()
        for name, value in place.options().items():
            if name not in before or before[name] == value:
                continue
            there = place.at(name, before[name])
            if (now := self._ratio(there)) >= least:
                place, ratio = there, now
        while (half := place.workload.num_requests // 2) >= MIN_REQUESTS:
            there = replace(place, workload=replace(place.workload, num_requests=half))
            if (now := self._ratio(there)) < least:
                break
            place, ratio = there, now
        return place, ratio


def _around(place: Place) -> Iterator[Place]:
    """Each option by itself, smaller and larger."""
    for name, value in place.options().items():
        for factor in FIRST_FACTORS:
            is_many = isinstance(value, tuple)
            scaled = tuple(_times(v, factor) for v in value) if is_many else _times(value, factor)
            with suppress(ConfigError):
                yield place.at(name, scaled)


def _scales(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_scales(each) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _times(value: Any, factor: float) -> Any:
    if not value:  # what was off is on
        return int(32 * factor) if isinstance(value, int) else factor
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor
