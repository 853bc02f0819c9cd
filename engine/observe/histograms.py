"""Latency histograms. Adding a value appends to a list; values are counted in batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_COLUMN = 4096  # values in a batch

# Bounds of vLLM's histograms, which dashboards use, and additional small ones.
SECONDS_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
SECONDS_BETWEEN_TOKENS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
REQUEST_TOKENS = tuple(float(m * 10**power) for power in range(6) for m in (1, 2, 5))
NUM_SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Counted(NamedTuple):
    """A snapshot of a histogram."""

    bounds: Sequence[float]
    counts: list[int]
    """Number of values above the previous bound and up to each bound; last, those above all
    bounds."""
    total: float
    """Sum of all values."""


class Histogram:
    """Counts values in the ranges between ascending ``bounds``; a range includes its upper bound.

    One thread may add values, by ``add``, or by ``column.append`` and then ``fold``. Any thread may
    call ``counted``.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.column: list[float] = []
        """Values that are not counted yet; always the same list object."""
        self._edges = np.asarray(bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        self.column.append(value)
        self.fold()

    def fold(self) -> None:
        """Once ``column`` has ``MAX_COLUMN`` values, count them and empty it."""
        if len(self.column) >= MAX_COLUMN:
            with self._lock:
                counts, total = self._count(self.column)
                self._counts += counts
                self._total += total
                self.column.clear()

    def counted(self) -> Counted:
        """Return a snapshot of the histogram with all values added so far."""
        with self._lock:
            counts, total = self._count(list(self.column))
            counts += self._counts
            total += self._total
        return Counted(self.bounds, counts.tolist(), total)

    def _count(
        self, column: list[float]
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], float]:
        values = np.asarray(column, dtype=np.float64)
        places = np.searchsorted(self._edges, values)
        return np.bincount(places, minlength=len(self._counts)), float(values.sum())


class Latencies:
    """Histograms over all requests, in seconds or tokens, updated in each step."""

    def __init__(self) -> None:
        self.first_token = Histogram(SECONDS_TO_FIRST_TOKEN)
        """Seconds from the arrival of a request to its first token."""
        self.between_tokens = Histogram(SECONDS_BETWEEN_TOKENS)
        """Seconds between two steps that produced tokens for a request."""
        self.step_tokens = Histogram(STEP_TOKENS)
        """Tokens per step: prompt tokens of requests that started, and new tokens."""
