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
    num_steps: int  # that computed something: rounds of an idle engine are none
    num_scheduled_tokens: int
    preempted_queries: int = 0  # tokens looked up when a preempted request came back
    preempted_hits: int = 0
    num_refused: int = 0  # requests that were not taken: queue full, or the policy's answer
    num_expired: int = 0  # requests that met a deadline
    num_rescued_steps: int = 0  # in which the default order had to replace the policy's
    num_policy_faults: int = 0
    wait_seconds: dict[str, float] = {}  # by cause, of requests that have left the queue
    hook_seconds: dict[str, float] = {}  # spent in the hooks of policy and resources
    blocked: str = ""  # the head of a queue that does not move, and why
    num_cache_resets: int = 0  # times the prefix cache was emptied on request
    counters: dict[str, int] = {}  # what features have counted: "drafts.num_accepted_tokens"
    step_seconds: float = 0.0  # computing, of steps of which the floor is known
    floor_seconds: float = 0.0  # that these steps take at least: their share is the roofline's
    by_default: str = ""  # the first thing that was answered by default for a plug-in, and why
