"""Watch: counts steps without progress; names the head of a queue that does not move, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from engine.sched.request import Request
from engine.sched.roster import Roster
from engine.sched.tally import Tally

logger = logging.getLogger("engine.sched")


class Watch:
    """Counts steps in which nothing could be computed."""

    def __init__(self, limit: int, tally: Tally) -> None:
        self._limit = limit
        self._tally = tally
        self._num_idle = 0

    @property
    def is_stuck(self) -> bool:
        """Were there ``limit`` idle steps in a row?"""
        return self._num_idle >= self._limit

    def look(
        self,
        is_idle: bool,
        roster: Roster,
        cause: str,
        refused: Iterable[tuple[Request, str]],
    ) -> None:
        """After each plan. After ``limit`` idle ones in a row the log names head and cause.

        Who is parked waits for something that takes its time: it is named, but not in the log.
        """
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self._tally.blocked = ""
        waiting = roster.waiting
        if not (is_idle and len(waiting)):
            if is_idle and (parked := next(iter(roster.parked.values()), None)):
                self._tally.blocked = f"{parked.request_id}: {parked.story.own_cause}"
            return
        head = waiting[0]
        why = next((own for req, own in refused if req is head), cause)
        self._tally.blocked = f"{head.request_id}: {why}"
        if self._num_idle == self._limit:
            logger.warning(
                "no progress in %d steps: request %s and %d behind it wait for: %s",
                self._num_idle,
                head.request_id,
                len(waiting) - 1,
                why,
            )
