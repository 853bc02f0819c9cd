"""Counts of the scheduler at one moment."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges of now and counters since the start."""

    num_running: int
    num_waiting: int
    num_parked: int
    kv_usage: float  # 0 to 1
    prefix_queries: int  # tokens looked up at first admission
    prefix_hits: int  # and found
    num_preemptions: int
    num_failed: int  # requests that ended with an error of their own
    num_steps: int
    num_scheduled_tokens: int
