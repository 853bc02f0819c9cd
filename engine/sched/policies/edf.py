"""Earliest deadline first (Liu and Layland, 1973)."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView, require_positive


class EDF(Policy):
    """In order of ``deadline``; a waiting request may take the place of a less urgent running one.

    ``default_deadline``: seconds after its arrival at which a request without one is due. It is
    finite, so no request starves. ``preempt_for_waiting``: if False, a running request is preempted
    only when memory runs out.
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
        """Only an earlier deadline is a reason to evict, not an earlier arrival."""
        return req.rank[0] < other.rank[0] if req.is_waiting else super().outranks(req, other)
