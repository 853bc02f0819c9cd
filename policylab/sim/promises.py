"""Promises: the latency limits of requests, and whether they were met.

An SLO such as ``ttft<1,tpot<0.1`` applies to every request. Without an SLO, each request has its
own limits, in seconds: to the first token, between two tokens, and to the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from policylab.sim.estimate import Floats
from policylab.sim.records import Requests

Mask = NDArray[np.bool_]


def ttft(requests: Requests) -> Floats:
    """Seconds from arrival to first token, the queue included [requests]."""
    return requests.times("first") - requests.times("arrival")


def e2e(requests: Requests) -> Floats:
    """Seconds from arrival to last token [requests]."""
    return requests.times("last") - requests.times("arrival")


def tpot(requests: Requests) -> Floats:
    """Mean seconds between two tokens of a request; 0 if it has only one [requests]."""
    outputs = requests.counts("num_output")
    between = (requests.times("last") - requests.times("first")) / np.maximum(1, outputs - 1)
    return np.where(outputs > 1, between, 0.0)


def normalised(requests: Requests) -> Floats:
    """Seconds from arrival to last token, divided by the number of output tokens [requests]."""
    return e2e(requests) / np.maximum(1, requests.counts("num_output"))


def delay(requests: Requests) -> Floats:
    """Seconds from arrival to the first step that computed a token of the request [requests]."""
    return requests.times("scheduled") - requests.times("arrival")


def longest_gap(requests: Requests) -> Floats:
    """Seconds of the longest gap between two tokens; 0 without gaps [requests]."""
    gaps = requests.times("longest_gap")
    is_one = requests.counts("num_output") <= 1
    return np.where(np.isnan(gaps) & is_one, 0.0, gaps)


OF_REQUEST: dict[str, Callable[[Requests], Floats]] = {
    "ttft": ttft,
    "tpot": tpot,
    "e2e": e2e,
    "normalised": normalised,
    "delay": delay,
    "itl": longest_gap,
}
"""The latencies that can be promised to a request; ``itl`` limits each gap between its tokens."""


class Limit(NamedTuple):
    """A limit on a figure: ``figure < value``, or ``figure > value`` if ``is_least``. Times are in
    seconds."""

    figure: str
    value: float
    is_least: bool = False

    def __str__(self) -> str:
        return f"{self.figure}{'>' if self.is_least else '<'}{self.value:g}"


def limits(text: str, flag: str, example: str) -> list[Limit]:
    """Parse limits ``figure<value`` and ``figure>value``, separated by commas.

    Raises ``ConfigError``, which names the ``flag`` and an ``example``.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z0-9_.]+)\s*([<>])\s*([0-9.eE+-]+)", part)
        try:
            value = float(match[3]) if match else np.nan
        except ValueError:
            value = np.nan
        if match is None or not 0.0 <= value < np.inf:
            raise ConfigError(f"{flag} has {part!r}, must be as in {example}")
        found.append(Limit(match[1], value, match[2] == ">"))
    if not found:
        raise ConfigError(f"{flag} is empty, must be as in {example}")
    return found


def slo(text: str) -> list[Limit]:
    """Parse ``--slo``: upper limits on the latencies of every request. Raises ``ConfigError``."""
    found = limits(text, "--slo", "ttft<1,tpot<0.1")
    for limit in found:
        if limit.figure not in OF_REQUEST or limit.is_least:
            raise ConfigError(
                f"--slo has {str(limit)!r}, must be a limit of one of: {', '.join(OF_REQUEST)}, "
                "as in ttft<1,tpot<0.1"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class KeptPromises:
    """The number of requests with latency limits, and the number that met all their limits."""

    num_promised: int
    num_kept: int
    seconds: float
    """Length of the period in which these requests arrived."""
    by_tier: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each tier, the number of requests with promises and the number whose promises were
    kept."""

    @property
    def attainment(self) -> float:
        """The share of requests with latency limits that met them all; NaN if there are none."""
        return self.num_kept / self.num_promised if self.num_promised else np.nan

    @property
    def goodput(self) -> float:
        """Requests per second that met all their latency limits; NaN if no request has limits."""
        return self.num_kept / self.seconds if self.seconds and self.num_promised else np.nan


def kept(requests: Requests, counted: Mask, seconds: float, slo: list[Limit]) -> KeptPromises:
    """Count the requests with latency limits, and those that finished and met them all. Only
    requests in the mask ``counted`` [requests] count. ``seconds``: length of the measured period.
    ``slo``: limits for every request; if empty, each request's own limits apply."""
    promised, good = _of_slo(requests, slo) if slo else _own(requests)
    promised = promised & counted
    good = good & promised & requests.done
    tiers = requests.text("tier")
    return KeptPromises(
        num_promised=int(promised.sum()),
        num_kept=int(good.sum()),
        seconds=seconds,
        by_tier={
            tier: (int((promised & (tiers == tier)).sum()), int((good & (tiers == tier)).sum()))
            for tier in sorted(set(tiers[promised].tolist()) - {""})
        },
    )


def _of_slo(requests: Requests, slo: list[Limit]) -> tuple[Mask, Mask]:
    """Masks [requests] for an SLO of every request: all True, and True for those that met it."""
    good = np.ones(len(requests), dtype=np.bool_)
    for limit in slo:
        good &= OF_REQUEST[limit.figure](requests) < limit.value
    return np.ones(len(requests), dtype=np.bool_), good


def _own(requests: Requests) -> tuple[Mask, Mask]:
    promised = np.zeros(len(requests), dtype=np.bool_)
    good = np.ones(len(requests), dtype=np.bool_)
    arrival = requests.times("arrival")
    for most, had in (
        (requests.times("ttft"), ttft(requests)),
        (requests.times("tbt"), longest_gap(requests)),
        (requests.times("deadline") - arrival, e2e(requests)),
    ):
        is_promised = ~np.isnan(most)
        promised |= is_promised
        good &= ~is_promised | (had <= most * (1.0 + 1e-12))
    return promised, good
