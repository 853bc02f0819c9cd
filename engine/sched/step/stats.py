"""Builds the current statistics of a scheduler."""

from __future__ import annotations

from engine.messages.stats import GroupUse, SchedulerStats
from engine.sched.plugins.hooks import FaultLog
from engine.sched.plugins.resources import Resources
from engine.sched.predict.lengths import GuardedPredictor
from engine.sched.roster import Roster
from engine.sched.step.settle import Counters
from engine.sched.view import View


def make_stats(
    counters: Counters, view: View, roster: Roster, resources: Resources, faults: FaultLog
) -> SchedulerStats:
    """Make the statistics of the scheduler: current gauges, and counters since the start."""
    kv, of_policy = view.kv, {f"policy.{name}": count for name, count in view.counters.items()}
    of_resources = resources.counters()  # first, since it may add a fault
    first, num_faults = [*faults.messages[:1], counters.rescued_from], faults.num_faults
    if isinstance(view.predictor, GuardedPredictor):
        first.append(view.predictor.first_failure)
        num_faults += view.predictor.num_failures
    snapshots = None if kv.states is None else kv.states.snapshots
    num_snapshots = 0 if snapshots is None else snapshots.count_cached()
    blocks_of_each = 0 if snapshots is None else snapshots.num_blocks
    return SchedulerStats(
        num_running=len(roster.running),
        num_waiting=len(roster.waiting),
        num_parked=len(roster.parked),
        kv_usage=kv.usage,
        prefix_queries=kv.counts.queries,
        prefix_hits=kv.counts.hits,
        num_preemptions=counters.num_preemptions,
        num_failed=counters.num_failed,
        num_steps=counters.num_computed_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        preempted_queries=kv.counts.preempted_queries,
        preempted_hits=kv.counts.preempted_hits,
        num_refused=counters.num_refused,
        num_expired=counters.num_expired,
        num_rescued_steps=counters.num_rescued_steps,
        num_policy_faults=num_faults,
        wait_seconds=dict(roster.waits.sums),
        hook_seconds=dict(faults.seconds),
        blocked=counters.blocked,
        num_cache_resets=kv.counts.num_resets,
        counters=of_resources | of_policy,
        step_seconds=counters.step_seconds,
        floor_seconds=counters.floor_seconds,
        by_default=next(filter(None, first), ""),
        prefix_missed=dict(kv.counts.missed),
        kv_groups=[
            GroupUse(group.window, num, group.is_chunked)
            for group, num in zip(kv.groups, kv.num_used, strict=True)
        ],
        num_snapshots=num_snapshots,
        snapshot_usage=num_snapshots * blocks_of_each / kv.num_usable,
        waiting_by_cause=roster.num_waiting_by_cause(),
    )
