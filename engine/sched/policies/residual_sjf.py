"""Shortest prompt first, by what of it is not cached (as vLLM's SJF order, 2026)."""

from __future__ import annotations

from math import inf

from engine.sched import Policy, Request, SchedView, require_positive


class ResidualSJF(Policy):
    """The fewest KV blocks left to compute go first; what was preempted goes before all of them.

    Lowers the mean time to first token where prompts differ in length. Outputs are not considered.

    ``max_wait``: seconds after which a request waits no longer for shorter ones.
    """

    dynamic = True

    def __init__(self, max_wait: float = 30.0) -> None:
        require_positive(max_wait=max_wait)
        self.max_wait = max_wait

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        if not req.is_waiting or req.num_preempted:
            return (0, req.arrival)
        if view.now - req.arrival_time >= self.max_wait:
            return (1, req.arrival)
        kv = view.kv
        return (2, kv.blocks_for(req.num_tokens - kv.cached_prefix(req)), req.arrival)

    def stable_for(self, view: SchedView) -> float:
        return inf  # those that run go by arrival
