"""Counters of the scheduler, and the statistics made of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv.manager import KVManager
from engine.messages.stats import SchedulerStats
from engine.sched.plugins.faults import FaultLog
from engine.sched.plugins.resources import Resources
from engine.sched.request import Request
from engine.sched.state.roster import Roster

logger = logging.getLogger("engine.sched")


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_expired: int = 0
    num_rescued_steps: int = 0
    blocked: str = ""

    def note_rescue(self, culprit: str, *, was_saved: bool) -> None:
        """The default order was tried in place of the policy's. Steps in which that granted tokens
        are counted, and the first is logged."""
        self.num_rescued_steps += was_saved
        if was_saved and self.num_rescued_steps == 1:
            logger.warning(
                "%s scheduled no request although one could run; such steps are served in the "
                "default order and counted in num_rescued_steps",
                culprit,
            )


def make_stats(
    counters: Counters, roster: Roster, kv: KVManager, resources: Resources, faults: FaultLog
) -> SchedulerStats:
    """Current gauges and the counters."""
    of_resources = resources.counters()  # asked first: what goes wrong in it counts as a fault
    return SchedulerStats(
        num_running=len(roster.running),
        num_waiting=len(roster.waiting),
        num_parked=len(roster.parked),
        kv_usage=kv.usage,
        prefix_queries=kv.counts.queries,
        prefix_hits=kv.counts.hits,
        num_preemptions=counters.num_preemptions,
        num_failed=counters.num_failed,
        num_steps=counters.num_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        preempted_queries=kv.counts.preempted_queries,
        preempted_hits=kv.counts.preempted_hits,
        num_refused=counters.num_refused,
        num_expired=counters.num_expired,
        num_rescued_steps=counters.num_rescued_steps,
        num_policy_faults=faults.num_faults,
        wait_seconds=dict(roster.waits.sums),
        hook_seconds=dict(faults.seconds),
        blocked=counters.blocked,
        num_cache_resets=kv.counts.num_resets,
        counters=of_resources,
    )


class StallDetector:
    """Counts steps in which nothing could be computed."""

    def __init__(self, limit: int, counters: Counters) -> None:
        self._limit = limit
        self._counters = counters
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

        Parked requests wait for something slow by nature: they are reported, but not logged.
        """
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
                "no progress in %d steps: request %s and %d behind it wait for: %s",
                self._num_idle,
                head.request_id,
                len(waiting) - 1,
                why,
            )
