"""What only watches may fail; requests may not.

Everything that records, measures or publishes is called by way of a ``Guard``: its first failure is
one line of log with the cause, every one is counted, and the step goes on.
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
"""How the names of these counters begin, in the statistics."""

P = ParamSpec("P")
T = TypeVar("T")


class Failures:
    """How often each observer has failed. Any thread may count and read."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, observer: str) -> None:
        """Count a failure of the observer with this name."""
        with self._lock:
            self._counts[observer] += 1

    def counters(self) -> dict[str, int]:
        """By observer, as the statistics name them."""
        with self._lock:
            return {PREFIX + name: num for name, num in self._counts.items()}


def with_failures(stats: SchedulerStats | None, failures: Failures) -> SchedulerStats | None:
    """The statistics with these counters as well."""
    if stats is None or not (counters := failures.counters()):
        return stats
    return msgspec.structs.replace(stats, counters={**stats.counters, **counters})


class Guard:
    """Stands between one observer and what it watches.

    name: that of the observer in the counters. effect: what its failure leads to, for the log, as
    ``"it is dropped"``. stops: after a failure it is not called again.
    """

    def __init__(self, failures: Failures, name: str, effect: str, *, stops: bool = False) -> None:
        self.name = name
        self.is_stopped = False
        self._failures = failures
        self._effect = effect
        self._stops = stops
        self._is_reported = False

    def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """What the observer returns; ``None`` if it fails, or has been stopped by a failure."""
        if self.is_stopped:
            return None
        try:
            return call(*args, **options)
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """The observer has failed in this way."""
        self.is_stopped = self._stops
        self._failures.add(self.name)
        if self._is_reported:
            logger.debug("%s has failed again", self.name, exc_info=error)
            return
        self._is_reported = True
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")
        logger.error("%s has failed: %s; %s, requests go on", self.name, cause, self._effect)
        logger.debug("where it failed", exc_info=error)
