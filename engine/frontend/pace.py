"""Estimates how long a new request would wait for its first token, from recent starts."""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import RefusedError
from engine.observe.stats_log import TokenCounts

SHARE = 0.05  # weight of the latest gap in the moving average, which covers about 20 gaps


class TokenGap:
    """Moving average of the seconds between the first tokens of successive requests, measured only
    while requests wait; 0.0 if unknown."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def note(self, time: float, *, is_waited_for: bool) -> None:
        """Record that a request got its first token at ``time``. ``is_waited_for``: True if
        requests wait now, so that the time until the next first token is measured."""
        if self._last is not None:
            share = SHARE if self.seconds else 1.0
            self.seconds += share * (max(0.0, time - self._last) - self.seconds)
        self._last = time if is_waited_for else None

    def forget(self) -> None:
        """Discard the time of the last first token, because no request waits any more."""
        self._last = None


class QueuePace:
    """Counts waiting and running requests, and estimates how long a new request waits.

    A new request waits for the requests queued before it. If all ``num_seats`` seats are taken, it
    also waits for a running request to end."""

    def __init__(self, num_seats: int = 0) -> None:
        """Start without requests. num_seats: maximum number of running requests; 0: unknown."""
        self.num_waiting = 0
        self.num_running = 0
        self.num_seats = num_seats
        self._starts = TokenGap()
        self._seats = TokenGap()

    def arrive(self) -> None:
        self.num_waiting += 1

    def start(self, time: float) -> None:
        """Record that a request got its first token at ``time``."""
        self.num_waiting -= 1
        self.num_running += 1
        is_waited_for = self.num_waiting > 0
        self._starts.note(time, is_waited_for=is_waited_for)
        is_full = self.num_running >= self.num_seats > 0
        self._seats.note(time, is_waited_for=is_waited_for and is_full)

    def leave(self, *, has_started: bool) -> None:
        """Count a request that ended."""
        if has_started:
            self.num_running -= 1
            return
        self.num_waiting -= 1
        if not self.num_waiting:
            self._starts.forget()
            self._seats.forget()

    def num_queued(self, num_arriving: int = 0) -> int:
        """Number of requests that would wait for a seat if ``num_arriving`` more arrived now."""
        return max(0, self.num_waiting + num_arriving - self._num_free)

    def estimated_wait(self, num_arriving: int = 0) -> float:
        """Seconds until the first token of a new request after ``num_arriving`` others
        (estimate)."""
        num_queued = self.num_queued(num_arriving)
        if not num_queued and self.num_seats:  # a seat is free for each
            return 0.0
        ahead = self.num_waiting + num_arriving
        return max(ahead * self._starts.seconds, num_queued * self._seats.seconds)

    @property
    def _num_free(self) -> int:
        return max(0, self.num_seats - self.num_running)


class QueueLimits(NamedTuple):
    """Limits on the number of waiting requests and on the estimated wait of a new one."""

    pace: QueuePace
    counts: TokenCounts
    max_requests: int
    max_seconds: float | None

    def check(self, num_arriving: int) -> None:
        """Raise ``RefusedError`` if one more request would exceed a limit of the queue.
        num_arriving: new requests before it that are not counted yet."""
        num_waiting = self.pace.num_queued(num_arriving)
        seconds = self.pace.estimated_wait(num_arriving)
        if num_waiting >= self.max_requests:
            why = f"{num_waiting} requests are waiting, the limit is {self.max_requests}"
        elif self.max_seconds is not None and seconds > self.max_seconds:
            why = f"a request would wait {seconds:.1f} s, the limit is {self.max_seconds:g}"
        else:
            return
        self.counts.refused += 1
        raise RefusedError(f"the queue is full: {why}; try again later", seconds or None)
