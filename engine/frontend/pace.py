"""How long a new request would wait for its first token, by the pace of late ones."""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import RefusedError

SHARE = 0.05  # of the latest gap in the smoothed one: about the last 20 count


class TokenGap:
    """Seconds between two starts that others wait for, smoothed; 0.0: not known."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def note(self, time: float, *, is_waited_for: bool) -> None:
        """A start. A gap counts if others waited all the while: else it shows how few came."""
        if self._last is not None:
            share = SHARE if self.seconds else 1.0
            self.seconds += share * (max(0.0, time - self._last) - self.seconds)
        self._last = time if is_waited_for else None

    def forget(self) -> None:
        """Others wait no longer: the time until the next start shows nothing."""
        self._last = None


class QueuePace:
    """Counts requests that wait for their first token, and those that have it.

    A request waits for those ahead of it in the queue, and, if all ``num_seats`` are taken, for
    running ones to end. Both have a pace of their own: empty seats are taken at once.
    """

    def __init__(self, num_seats: int = 0) -> None:
        """num_seats: requests that may run at once; 0: not known."""
        self.num_waiting = 0
        self.num_running = 0
        self.num_seats = num_seats
        self._starts = TokenGap()
        self._seats = TokenGap()

    def arrive(self) -> None:
        self.num_waiting += 1

    def start(self, time: float) -> None:
        """A request has its first token."""
        self.num_waiting -= 1
        self.num_running += 1
        is_waited_for = self.num_waiting > 0
        self._starts.note(time, is_waited_for=is_waited_for)
        is_full = self.num_running >= self.num_seats > 0
        self._seats.note(time, is_waited_for=is_waited_for and is_full)

    def leave(self, *, has_started: bool) -> None:
        """A request has ended."""
        if has_started:
            self.num_running -= 1
            return
        self.num_waiting -= 1
        if not self.num_waiting:
            self._starts.forget()
            self._seats.forget()

    def num_queued(self, num_arriving: int = 0) -> int:
        """Requests that wait for a seat, with those that arrive."""
        return max(0, self.num_waiting + num_arriving - self._num_free)

    def estimated_wait(self, num_arriving: int = 0) -> float:
        """Seconds until the first token of a request that came now, after those that arrive."""
        num_queued = self.num_queued(num_arriving)
        if not num_queued and self.num_seats:  # there is a seat for each
            return 0.0
        ahead = self.num_waiting + num_arriving
        return max(ahead * self._starts.seconds, num_queued * self._seats.seconds)

    @property
    def _num_free(self) -> int:
        return max(0, self.num_seats - self.num_running)


class QueueLimits(NamedTuple):
    """How many requests may wait for their first token, and how long a new one may have to."""

    pace: QueuePace
    max_requests: int
    max_seconds: float | None

    def check(self, num_arriving: int) -> None:
        """Raise ``RefusedError`` for one more."""
        num_waiting = self.pace.num_queued(num_arriving)
        seconds = self.pace.estimated_wait(num_arriving)
        if num_waiting >= self.max_requests:
            why = f"{num_waiting} requests wait already, the limit is {self.max_requests}"
        elif self.max_seconds is not None and seconds > self.max_seconds:
            why = f"a request would wait {seconds:.1f} s, the limit is {self.max_seconds:g}"
        else:
            return
        raise RefusedError(f"the queue is full: {why}; try again later", seconds or None)
