"""Arrival processes that do not depend on the engine (open loop).

Gaps between arrivals are drawn for a constant rate and then mapped to real time by a curve of the
arrival rate. A different mean rate scales all gaps but keeps the lengths of periods that are given
in seconds, such as those of bursts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from math import ceil, inf
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from policylab.sim.named import call, check_number, check_options, entry_of
from policylab.sim.workloads.draws import CHUNK, RandomDraws

Floats = NDArray[np.float64]

SHORTEST_PERIOD = 1e-3  # seconds
MAX_PERIODS = 10_000_000
MAX_CV = 100.0
RAMP_STEPS = 1000


class Curve(NamedTuple):
    """Maps the time ``even``, in which the arrival rate is constant, to the real time ``seconds``
    [knots]. Linear between knots, with slope 1 after the last one."""

    seconds: Floats
    even: Floats

    def at(self, even: Floats) -> Floats:
        """The real times, in seconds, of these constant-rate times [any shape]."""
        rest = np.maximum(even - self.even[-1], 0.0)
        return np.asarray(np.interp(even, self.even, self.seconds) + rest)

    @classmethod
    def of(cls, lengths: Floats, rates: Floats, seconds: float) -> Curve:
        """The curve for consecutive periods with these ``lengths`` (seconds) and relative
        ``rates``, cut at ``seconds``. Rates are scaled to a mean of 1 up to the cut."""
        ends = np.concatenate([[0.0], np.cumsum(lengths)])
        done = np.concatenate([[0.0], np.cumsum(lengths * rates)])
        total = float(np.interp(seconds, ends, done))
        inside = ends < seconds
        knots = np.append(ends[inside], seconds)
        return cls(knots, np.append(done[inside], total) * (seconds / total))


@dataclass(frozen=True, kw_only=True)
class Arrivals(ABC):
    """An arrival process. ``cv``: coefficient of variation of the gaps at a constant rate; 1 is
    Poisson, 0 is evenly spaced."""

    kind: ClassVar[str]

    cv: float = 1.0

    def __post_init__(self) -> None:
        self.check("cv", self.cv, 0.0, MAX_CV)

    def times(self, dice: RandomDraws, rate: float, number: int) -> Iterator[float]:
        """An endless iterator of ascending arrival times in seconds. ``rate``: mean arrivals per
        second in a run of ``number`` requests; at an infinite rate all times are 0."""
        if rate == inf:
            return repeat(0.0)
        return self._times(dice, rate, number)

    def _times(self, dice: RandomDraws, rate: float, number: int) -> Iterator[float]:
        curve = self.curve(dice.stream("rate"), number / rate)
        rng, last = dice.stream("gaps"), 0.0
        while True:
            even = last + np.cumsum(self._gaps(rng)) / rate
            last = float(even[-1])
            times = even if curve is None else curve.at(even)
            yield from times.tolist()

    def _gaps(self, rng: np.random.Generator) -> Floats:
        """Random gaps between arrivals with mean 1 [CHUNK]."""
        if self.cv == 1.0:
            return rng.standard_exponential(CHUNK)
        if self.cv == 0.0:
            return np.ones(CHUNK)
        return rng.standard_gamma(self.cv**-2, CHUNK) * self.cv**2

    @abstractmethod
    def curve(self, rng: np.random.Generator, seconds: float) -> Curve | None:
        """Draw how the arrival rate changes in a run of this many seconds; ``None`` if it is
        constant."""

    def check(self, name: str, value: float, least: float, most: float = inf) -> None:
        """Raise ``ConfigError`` unless the option ``name`` has a value from ``least`` to
        ``most``."""
        check_number(f"arrivals {self.kind}: {name}", value, least, most)

    def periods(self, seconds: float, length: float) -> int:
        """The number of periods of ``length`` seconds that cover a run of ``seconds``. Raises
        ``ConfigError`` if there are too many."""
        number = ceil(seconds / length) + 1
        if number > MAX_PERIODS:
            raise ConfigError(
                f"arrivals {self.kind}: a run of {seconds:g} s has {number} periods of "
                f"{length:g} s, but at most {MAX_PERIODS} can be drawn; use longer periods"
            )
        return number


@dataclass(frozen=True, kw_only=True)
class Poisson(Arrivals):
    """A Poisson process with a constant rate."""

    kind: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        if self.cv != 1.0:
            raise ConfigError(f"arrivals poisson: cv is {self.cv!r}, must be 1; use gamma(cv=...)")

    def curve(self, rng: np.random.Generator, seconds: float) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Gamma(Arrivals):
    """Gaps with a Gamma distribution of shape ``1 / cv**2``."""

    kind: ClassVar[str] = "gamma"

    def curve(self, rng: np.random.Generator, seconds: float) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class OnOff(Arrivals):
    """Periods with arrivals alternate with pauses, starting with arrivals. Their lengths are
    exponential with means ``on`` and ``off`` seconds."""

    kind: ClassVar[str] = "onoff"

    on: float = 10.0
    off: float = 10.0

    def __post_init__(self) -> None:
        Arrivals.__post_init__(self)
        self.check("on", self.on, SHORTEST_PERIOD)
        self.check("off", self.off, SHORTEST_PERIOD)

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        number = self.periods(seconds, self.on + self.off)
        lengths: list[Floats] = []
        covered = 0.0
        while covered < seconds:
            pairs = rng.standard_exponential((number, 2)) * (self.on, self.off)
            lengths.append(pairs.ravel())
            covered += float(pairs.sum())
        periods = np.concatenate(lengths)
        return Curve.of(periods, np.resize([1.0, 0.0], len(periods)), seconds)


@dataclass(frozen=True, kw_only=True)
class Ramp(Arrivals):
    """The arrival rate changes linearly during the run. ``first`` and ``last`` give the ratio of
    the rates at its start and end."""

    kind: ClassVar[str] = "ramp"

    first: float = 0.2
    last: float = 1.8

    def __post_init__(self) -> None:
        Arrivals.__post_init__(self)
        self.check("first", self.first, 0.0)
        self.check("last", self.last, 0.0)
        if self.first + self.last == 0:
            raise ConfigError("arrivals ramp: first and last are 0, one must be above 0")

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        rates = np.linspace(self.first, self.last, RAMP_STEPS + 1)
        steps = (rates[1:] + rates[:-1]) / 2
        return Curve.of(np.full(RAMP_STEPS, seconds / RAMP_STEPS), steps, seconds)


@dataclass(frozen=True, kw_only=True)
class Burst(Arrivals):
    """A burst every ``every`` seconds: in the last ``seconds`` of each period the rate is
    ``times_as_many`` times the rate in the rest."""

    kind: ClassVar[str] = "burst"

    every: float = 60.0
    seconds: float = 5.0
    times_as_many: float = 10.0

    def __post_init__(self) -> None:
        Arrivals.__post_init__(self)
        self.check("every", self.every, SHORTEST_PERIOD)
        self.check("seconds", self.seconds, SHORTEST_PERIOD, self.every)
        self.check("times_as_many", self.times_as_many, 0.0)

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        number = self.periods(seconds, self.every)
        quiet = self.every - self.seconds
        return Curve.of(
            np.tile([quiet, self.seconds], number),
            np.tile([1.0, self.times_as_many], number),
            seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Trace(Arrivals):
    """The arrival pattern of a recorded trace, which has ``natural`` requests per second. For
    another rate the pattern is played faster or slower."""

    natural: float

    def _times(self, dice: RandomDraws, rate: float, number: int) -> Iterator[float]:
        scale = self.natural / rate
        return (time * scale for time in Arrivals._times(self, dice, self.natural, number))


@dataclass(frozen=True, kw_only=True)
class Minutes(Trace):
    """The arrival rate changes every minute; each rate is drawn from a Gamma distribution."""

    kind: ClassVar[str] = "minutes"

    rate_cv: float

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        number = self.periods(seconds, 60.0)
        rates = rng.standard_gamma(self.rate_cv**-2, number)
        return Curve.of(np.full(number, 60.0), rates, seconds)


@dataclass(frozen=True, kw_only=True)
class Spells(Trace):
    """Periods with arrivals, each with its own random rate, alternate with pauses. Their lengths
    are uniform from 0.5 to 1.5 times the means ``on`` and ``off`` (seconds)."""

    kind: ClassVar[str] = "spells"

    on: float
    off: float
    rate_cv: float

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        number = 2 * self.periods(seconds, self.on + self.off)
        lengths = rng.uniform(0.5, 1.5, (number, 2)) * (self.on, self.off)
        rates = np.zeros((number, 2))
        rates[:, 0] = rng.standard_gamma(self.rate_cv**-2, number)
        return Curve.of(lengths.ravel(), rates.ravel(), seconds)


ARRIVALS: dict[str, type[Arrivals]] = {
    process.kind: process for process in (Poisson, Gamma, OnOff, Ramp, Burst)
}


def find_arrivals(text: str) -> Arrivals:
    """Make the arrival process that a text such as ``gamma(cv=2)`` names. Raises
    ``ConfigError``."""
    name, given = call(text, "arrivals", "gamma(cv=2)")
    kind = entry_of("arrival process", name, ARRIVALS)
    check_options(f"arrival process {name!r}", given, [option.name for option in fields(kind)])
    return kind(**given)
