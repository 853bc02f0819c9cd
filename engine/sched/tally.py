"""Counters of the scheduler, and the statistics made of them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.manager import KVManager
from engine.messages.stats import SchedulerStats
from engine.sched.faults import FaultLog
from engine.sched.resources import Resources
from engine.sched.roster import Roster


@dataclass(slots=True)
class Tally:
    """Counts since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_expired: int = 0
    num_rescued_steps: int = 0
    blocked: str = ""


def make_stats(
    tally: Tally, roster: Roster, kv: KVManager, resources: Resources, faults: FaultLog
) -> SchedulerStats:
    """Gauges of now and the counters."""
    counters = resources.counters()  # asked first: what goes wrong in it counts as a fault
    return SchedulerStats(
        num_running=len(roster.running),
        num_waiting=len(roster.waiting),
        num_parked=len(roster.parked),
        kv_usage=kv.usage,
        prefix_queries=kv.counts.queries,
        prefix_hits=kv.counts.hits,
        num_preemptions=tally.num_preemptions,
        num_failed=tally.num_failed,
        num_steps=tally.num_steps,
        num_scheduled_tokens=tally.num_scheduled_tokens,
        preempted_queries=kv.counts.preempted_queries,
        preempted_hits=kv.counts.preempted_hits,
        num_refused=tally.num_refused,
        num_expired=tally.num_expired,
        num_rescued_steps=tally.num_rescued_steps,
        num_policy_faults=faults.num_faults,
        wait_seconds=dict(roster.waits.sums),
        hook_seconds=dict(faults.seconds),
        blocked=tally.blocked,
        num_cache_resets=kv.counts.num_resets,
        counters=counters,
    )
