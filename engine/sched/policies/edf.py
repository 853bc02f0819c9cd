"""Earliest deadline first (Liu and Layland, 1973)."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView, require_positive


class EDF(Policy):
    """Earliest ``deadline`` first; waiting requests may preempt running ones that are less urgent.

    ``default_deadline``: seconds after arrival, for requests without a deadline. It is finite, so
    no request starves. ``preempt_for_waiting``: if False, running requests are preempted only when
    memory runs out.
    """

    def __init__(self, default_deadline: float = 60.0, preempt_for_waiting: bool = True) -> None:
        require_positive(default_deadline=default_deadline)
        self.default_deadline = default_deadline
        self.waiting_may_preempt = preempt_for_waiting

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        if req.deadline is None:
            return (req.arrival_time + self.default_deadline, req.arrival)
        return (req.deadline, req.arrival)

    def outranks(self, req: Request, other: Request) -> bool:
        """A waiting request preempts only requests with a later deadline."""
        return req.rank[0] < other.rank[0] if req.is_waiting else super().outranks(req, other)
