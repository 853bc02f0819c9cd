"""Random lengths of prompts and outputs, in tokens.

The length distribution of a trace is given by quantiles, with the logarithm of the length linear in
between. The shortest length (P0) continues the line from P25 to P5. P99.9, and if needed P97, are
chosen so that the distribution has the mean of the trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import exp, log
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from policylab.sim.named import call, check_options, entry_of

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)  # shares of the listed quantiles
BEND, TAIL = 0.97, 0.999  # shares of the knots that adjust the mean
EXACT = 1e-6
MAX_TOKENS = 10_000_000


class LengthRange(Protocol):
    """A distribution of lengths in tokens."""

    @property
    def longest(self) -> int:
        """The longest possible length."""

    def draw(self, rng: np.random.Generator, number: int) -> Counts:
        """Draw ``number`` random lengths [number]."""


class LogUniformRange(NamedTuple):
    """Log-uniform lengths from ``shortest`` to ``longest`` tokens."""

    shortest: int
    longest: int

    def draw(self, rng: np.random.Generator, number: int) -> Counts:
        low, high = log(self.shortest), log(self.longest + 1)
        drawn = np.exp(rng.uniform(low, high, number)).astype(np.int64)
        return np.clip(drawn, self.shortest, self.longest)


class Quantiles:
    """The length distribution of a trace in tokens: its mean, and its quantiles ``values`` at
    ``SHARES``."""

    def __init__(self, mean: float, *values: float) -> None:
        self.mean = mean
        self.values = values

    def scaled(self, scale: float) -> Quantiles:
        """The distribution with all lengths multiplied by ``scale``."""
        return Quantiles(self.mean * scale, *(value * scale for value in self.values))

    @property
    def longest(self) -> int:
        return max(1, round(self.values[-1]))

    def draw(self, rng: np.random.Generator, number: int) -> Counts:
        shares, logs = self._knots
        lengths = np.exp(np.interp(rng.random(number), shares, logs))
        return np.maximum(np.rint(lengths), 1.0).astype(np.int64)

    @cached_property
    def _knots(self) -> tuple[Floats, Floats]:
        """The points of the piecewise distribution function: shares (0 to 1), and logarithms of
        lengths."""
        p5, p25, p95, p99, longest = (self.values[i] for i in (0, 1, -3, -2, -1))
        slope = log(p25 / p5) / (SHARES[1] - SHARES[0])
        shortest = exp(log(p5) - slope * SHARES[0])
        shares = np.array([0.0, *SHARES[:-2], BEND, SHARES[-2], TAIL, 1.0])

        def lengths(bend: float, tail: float) -> Floats:
            return np.array([shortest, *self.values[:-2], bend, p99, tail, longest])

        bend = (p95 * p99) ** 0.5  # on the line
        tail = self._solved(lambda tail: _mean(shares, lengths(bend, tail)), p99, longest)
        bend = self._solved(lambda bend: _mean(shares, lengths(bend, tail)), p95, p99, bend)
        return shares, np.log(lengths(bend, tail))

    def _solved(
        self, mean_at: Callable[[float], float], low: float, high: float, else_: float | None = None
    ) -> float:
        """Find the x in [low, high] at which the increasing function ``mean_at`` equals the trace's
        mean; if there is none, the nearer end. Returns ``else_`` instead if it gives this mean,
        too."""
        if else_ is not None and abs(mean_at(else_) / self.mean - 1.0) < EXACT:
            return else_
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if mean_at(middle) > self.mean else (middle, high)
        return (low + high) / 2


def _mean(shares: Floats, lengths: Floats) -> float:
    """The mean length, with the logarithm of the length linear between these points."""
    widths, low, high = np.diff(shares), lengths[:-1], lengths[1:]
    ratio = np.log(high / low)
    means = np.where(ratio > 1e-9, (high - low) / np.where(ratio > 1e-9, ratio, 1.0), low)
    return float((means * widths).sum())


class Lengths(NamedTuple):
    """Independent distributions of prompt and output lengths."""

    prompt: LengthRange
    output: LengthRange


# Computed from the traces' files; docs/internals/workloads.md has their sources and licences. The
# mean, then P5, P25, P50, P75, P90, P95, P99 and the longest.
AZURE_CONV = Lengths(
    Quantiles(1155, 181, 396, 1020, 1189, 2735, 4083, 4142, 14050),
    Quantiles(211, 41, 85, 129, 395, 424, 451, 601, 1000),
)
AZURE_CODE = Lengths(
    Quantiles(2048, 75, 578, 1469, 2745, 5194, 7315, 7436, 7437),
    Quantiles(27.9, 6, 9, 13, 24, 55, 90, 252, 1899),
)
MOONCAKE_CONV = Lengths(
    Quantiles(12035, 901, 2306, 6909, 15368, 27367, 39552, 85401, 126195),
    Quantiles(343, 10, 156, 350, 472, 597, 698, 1120, 2000),
)
MOONCAKE_SYNTHETIC = Lengths(
    Quantiles(15325, 22, 277, 11587, 23175, 38615, 49009, 66458, 191378),
    Quantiles(149, 2, 11, 69, 250, 389, 519, 769, 893),
)
ARXIV = Lengths(
    Quantiles(2588, 747, 1986, 2730, 3370, 3702, 3813, 3934, 4054),
    Quantiles(291, 60, 115, 167, 242, 372, 737, 3273, 4056),
)


def log_uniform(
    prompt: tuple[int, int] = (16, 1024), output: tuple[int, int] = (8, 512)
) -> Lengths:
    """Log-uniform lengths, each given as (shortest, longest) in tokens. Raises ``ConfigError``."""
    return Lengths(bounds("prompt", prompt), bounds("output", output))


def fixed(prompt: int = 256, output: int = 64) -> Lengths:
    """One prompt and output length, in tokens, for all requests. Raises ``ConfigError``."""
    return log_uniform((prompt, prompt), (output, output))


def bounds(name: str, given: tuple[int, int]) -> LogUniformRange:
    """A range of lengths from the pair in option ``name``. Raises ``ConfigError``."""
    try:
        shortest, longest = given
        is_right = 1 <= shortest <= longest <= MAX_TOKENS
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is {given!r}, must be two numbers as in (16, 1024)") from error
    if not is_right:
        raise ConfigError(f"{name} is {given!r}, must be two rising numbers from 1 to {MAX_TOKENS}")
    return LogUniformRange(int(shortest), int(longest))


TRACES = {
    "azure-conv": AZURE_CONV,
    "azure-code": AZURE_CODE,
    "mooncake-conv": MOONCAKE_CONV,
    "mooncake-synthetic": MOONCAKE_SYNTHETIC,
    "arxiv": ARXIV,
}
MADE: dict[str, Callable[..., Lengths]] = {"log-uniform": log_uniform, "fixed": fixed}


def find_lengths(text: str) -> Lengths:
    """Make the length distributions described by a text such as ``azure-conv`` or
    ``fixed(prompt=256, output=64)``. Raises ``ConfigError``."""
    name, given = call(text, "lengths", "fixed(prompt=256, output=64)")
    known: dict[str, Lengths | Callable[..., Lengths]] = {**MADE, **TRACES}
    found = entry_of("length distribution", name, known)
    if isinstance(found, Lengths):
        if given:
            raise ConfigError(f"length distribution {name!r} has no options; leave them out")
        return found
    check_options(f"length distribution {name!r}", given, ("prompt", "output"))
    return found(**given)
