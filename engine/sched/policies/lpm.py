"""Longest cached prefix first (SGLang: Zheng et al., NeurIPS 2024)."""

from __future__ import annotations

from math import inf

from engine.sched import Policy, Request, SchedView, require_positive


class LPM(Policy):
    """The most prompt tokens in the cache go first, so that they are used before they are evicted.

    ``max_wait``: seconds after which a request waits no longer for better matches.
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
        return (2, -view.kv.cached_prefix(req), req.arrival)

    def stable_for(self, view: SchedView) -> float:
        return inf  # those that run go by arrival
