"""When requests come, where they come whatever the engine does (an open loop).

Gaps are drawn in seconds of a clock of which as many pass as real ones, but that goes faster where
more requests come: gaps have the distribution requested, times a curve of the rate. Another rate
stretches the gaps and keeps their sequence; periods of a curve that were given in seconds stay so.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from math import ceil, inf
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from policylab.sim.named import call
from policylab.sim.workloads.draws import CHUNK, RandomDraws

Floats = NDArray[np.float64]

SHORTEST_PERIOD = 1e-3  # seconds
MAX_PERIODS = 10_000_000
MAX_CV = 100.0
RAMP_STEPS = 1000


class Curve(NamedTuple):
    """How the rate changes over a run: at ``seconds`` [knots] this many seconds of the even clock
    have passed, ``even`` [knots]. After its end both go on alike."""

    seconds: Floats
    even: Floats

    def at(self, even: Floats) -> Floats:
        """When the even clock shows this, in seconds [any shape]."""
        rest = np.maximum(even - self.even[-1], 0.0)
        return np.asarray(np.interp(even, self.even, self.seconds) + rest)

    @classmethod
    def of(cls, lengths: Floats, rates: Floats, seconds: float) -> Curve:
        """Periods of these lengths (seconds) and rates, one after the other, cut after this many
        ``seconds``; rates are scaled so that their mean until then is 1."""
        ends = np.concatenate([[0.0], np.cumsum(lengths)])
        done = np.concatenate([[0.0], np.cumsum(lengths * rates)])
        total = float(np.interp(seconds, ends, done))
        inside = ends < seconds
        knots = np.append(ends[inside], seconds)
        return cls(knots, np.append(done[inside], total) * (seconds / total))


@dataclass(frozen=True, kw_only=True)
class Arrivals(ABC):
    """A process of arrivals. ``cv`` is the coefficient of variation of its gaps, apart from what
    the curve of its rate adds: 1 is Poisson, 0 an even flow."""

    kind: ClassVar[str]

    cv: float = 1.0

    def __post_init__(self) -> None:
        self.check("cv", self.cv, 0.0, MAX_CV)

    def times(self, dice: RandomDraws, rate: float, number: int) -> Iterator[float]:
        """Seconds at which requests come, ascending and without an end, at this mean rate (requests
        a second) in a run of this many; at an infinite one all come at 0."""
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
        """[CHUNK] of mean 1."""
        if self.cv == 1.0:
            return rng.standard_exponential(CHUNK)
        if self.cv == 0.0:
            return np.ones(CHUNK)
        return rng.standard_gamma(self.cv**-2, CHUNK) * self.cv**2

    @abstractmethod
    def curve(self, rng: np.random.Generator, seconds: float) -> Curve | None:
        """How the rate changes in a run of this many seconds; ``None``: not at all."""

    def check(self, name: str, value: float, least: float, most: float = inf) -> None:
        """Raise ``ConfigError`` for an option out of its bounds."""
        if not (isinstance(value, int | float) and least <= value <= most):
            upto = "" if most == inf else f", and at most {most:g}"
            raise ConfigError(
                f"arrivals {self.kind}: {name} is {value!r}, must be {least:g} or more{upto}"
            )

    def periods(self, seconds: float, length: float) -> int:
        """How many of this length a run needs. Raises ``ConfigError`` for too many."""
        number = ceil(seconds / length) + 1
        if number > MAX_PERIODS:
            raise ConfigError(
                f"arrivals {self.kind}: a run of {seconds:g} s has {number} periods of "
                f"{length:g} s, at most {MAX_PERIODS} can be drawn; ask for longer ones"
            )
        return number


@dataclass(frozen=True, kw_only=True)
class Poisson(Arrivals):
    """Each moment alike."""

    kind: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        if self.cv != 1.0:
            raise ConfigError("arrivals poisson have cv 1; say gamma(cv=...) for another")

    def curve(self, rng: np.random.Generator, seconds: float) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Gamma(Arrivals):
    """Gaps of a Gamma distribution of shape ``1 / cv**2``."""

    kind: ClassVar[str] = "gamma"

    def curve(self, rng: np.random.Generator, seconds: float) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class OnOff(Arrivals):
    """Requests come for a while, then none for a while; both exponential, of these mean
    ``on`` and ``off`` seconds. A run begins with requests."""

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
    """The rate goes evenly from ``first`` to ``last`` in the course of the run. Both are relative:
    their mean is the rate of the run."""

    kind: ClassVar[str] = "ramp"

    first: float = 0.2
    last: float = 1.8

    def __post_init__(self) -> None:
        Arrivals.__post_init__(self)
        self.check("first", self.first, 0.0)
        self.check("last", self.last, 0.0)
        if self.first + self.last == 0:
            raise ConfigError("arrivals ramp: first and last are both 0, one must be above")

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        rates = np.linspace(self.first, self.last, RAMP_STEPS + 1)
        steps = (rates[1:] + rates[:-1]) / 2
        return Curve.of(np.full(RAMP_STEPS, seconds / RAMP_STEPS), steps, seconds)


@dataclass(frozen=True, kw_only=True)
class Burst(Arrivals):
    """``times`` as many requests as else, for ``seconds`` in each ``every`` seconds."""

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
    """Arrivals like those of a trace that came at ``natural`` requests a second. Another rate
    plays all of it faster or slower, as if the trace itself were."""

    natural: float

    def _times(self, dice: RandomDraws, rate: float, number: int) -> Iterator[float]:
        scale = self.natural / rate
        return (time * scale for time in Arrivals._times(self, dice, self.natural, number))


@dataclass(frozen=True, kw_only=True)
class Minutes(Trace):
    """The rate is another one each minute, drawn from a Gamma distribution."""

    kind: ClassVar[str] = "minutes"

    rate_cv: float

    def curve(self, rng: np.random.Generator, seconds: float) -> Curve:
        number = self.periods(seconds, 60.0)
        rates = rng.standard_gamma(self.rate_cv**-2, number)
        return Curve.of(np.full(number, 60.0), rates, seconds)


@dataclass(frozen=True, kw_only=True)
class Spells(Trace):
    """Spells of requests, each with a rate of its own, and silence between them. Lengths of both
    are uniform from half to one and a half times the mean (seconds)."""

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
    """``poisson``, ``gamma(cv=2)``, ... Raises ``ConfigError``."""
    name, given = call(text, "arrivals", "gamma(cv=2)")
    kind = ARRIVALS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, ARRIVALS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"arrivals {name!r} are not known; {hint}there are: {', '.join(ARRIVALS)}"
        )
    known = [option.name for option in fields(kind)]
    if unknown := given.keys() - set(known):
        raise ConfigError(
            f"arrivals {name!r} have no option {min(unknown)!r}; their options are: "
            f"{', '.join(known)}"
        )
    return kind(**given)
