"""Keeps failures of observers (logs, traces, metrics, events) away from requests.

Each observer is called through an ``ObserverGuard``: its first failure is logged with the cause,
all are counted, and the step continues.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from engine.messages.stats import SchedulerStats

logger = logging.getLogger("engine.observe")

PREFIX = "observer_failures."
"""Prefix of the names of failure counters in the statistics."""

P = ParamSpec("P")
T = TypeVar("T")


class Failures:
    """Number of failures of each observer. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, observer: str) -> None:
        """Count a failure of the observer with this name."""
        with self._lock:
            self._counts[observer] += 1

    def counters(self) -> dict[str, int]:
        """Number of failures by the name of the counter."""
        with self._lock:
            return {PREFIX + name: num for name, num in self._counts.items()}


def with_failures(stats: SchedulerStats | None, failures: Failures) -> SchedulerStats | None:
    """The statistics with these failures added to their counters; ``None`` stays ``None``."""
    if stats is None or not (counters := failures.counters()):
        return stats
    return msgspec.structs.replace(stats, counters={**stats.counters, **counters})


class ObserverGuard:
    """Calls an observer and catches its errors.

    name: the observer's name in the failure counters. effect: what a failure means, for the log.
    stops: do not call the observer again after a failure.
    """

    def __init__(self, failures: Failures, name: str, effect: str, *, stops: bool = False) -> None:
        self.name = name
        self.is_stopped = False
        self._failures = failures
        self._effect = effect
        self._stops = stops
        self._is_reported = False

    def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Call the observer and return its result; ``None`` if it fails, or failed before and was
        stopped."""
        if self.is_stopped:
            return None
        try:
            return call(*args, **options)
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Log and count a failure of the observer."""
        self.is_stopped = self._stops
        self._failures.add(self.name)
        if self._is_reported:
            logger.debug("%s has failed again", self.name, exc_info=error)
            return
        self._is_reported = True
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")
        logger.error("%s has failed: %s; %s, requests go on", self.name, cause, self._effect)
        logger.debug("traceback of the failure", exc_info=error)
