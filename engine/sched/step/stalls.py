"""Notices that no request makes progress."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from engine.sched.request import Request
from engine.sched.roster import Roster
from engine.sched.step.settle import Counters

logger = logging.getLogger("engine.sched")


class StallDetector:
    """Counts consecutive steps in which nothing could be computed."""

    def __init__(self, limit: int, counters: Counters) -> None:
        self._limit = limit
        self._counters = counters
        self._num_idle = 0

    @property
    def is_stuck(self) -> bool:
        """True if nothing could be computed in the last ``limit`` steps or more."""
        return self._num_idle >= self._limit

    def look(
        self,
        is_idle: bool,
        roster: Roster,
        cause: str,
        refused: Iterable[tuple[Request, str]],
    ) -> None:
        """Count consecutive steps in which nothing could be computed. After ``limit`` of them log a
        warning, unless only parked requests wait.

        ``cause``: why the queue waits; ``refused``: requests that wait for another cause, with that
        cause."""
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self._counters.blocked = ""
        waiting = roster.waiting
        if not (is_idle and len(waiting)):
            if is_idle and (parked := next(iter(roster.parked.values()), None)):
                self._counters.blocked = f"{parked.request_id}: {parked.history.own_cause}"
            return
        head = waiting[0]
        why = next((own for req, own in refused if req is head), cause)
        self._counters.blocked = f"{head.request_id}: {why}"
        if self._num_idle == self._limit:
            logger.warning(
                "no progress in %d steps: request %s and %d others after it wait for: %s",
                self._num_idle,
                head.request_id,
                len(waiting) - 1,
                why,
            )
