"""Earliest deadline first; an urgent request may take the seat of a relaxed one."""

import math

from engine.sched import Policy


class EarliestDeadline(Policy):
    """Requests without a deadline come last. Prompts go in chunks, so that nobody blocks a step."""

    waiting_may_preempt = True

    def __init__(self, chunk_tokens: int = 256) -> None:
        self.chunk_tokens = chunk_tokens

    def rank(self, req, view):
        return (math.inf if req.deadline is None else req.deadline, req.arrival)

    def chunk(self, req, num_tokens, view):
        return min(num_tokens, self.chunk_tokens)

    def outranks(self, req, other):
        """Only an earlier deadline is a reason to evict, not an earlier arrival."""
        return req.rank[0] < other.rank[0] if req.is_waiting else super().outranks(req, other)
