"""Static priorities."""

from __future__ import annotations

from typing import ClassVar

from engine.sched import Policy, Request, SchedView


class Priority(Policy):
    """Runs requests with a smaller ``priority`` number first, then in order of arrival.

    With ``preempt_for_waiting`` a waiting request preempts running ones with a larger number.
    """

    by_design: ClassVar = {"starvation": "a lower class waits for as long as a higher one comes"}

    def __init__(self, preempt_for_waiting: bool = False) -> None:
        self.waiting_may_preempt = preempt_for_waiting

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        return (req.priority, req.arrival_time)

    def outranks(self, req: Request, other: Request) -> bool:
        """A waiting request preempts only requests with a larger ``priority`` number."""
        if req.is_waiting:
            return req.priority < other.priority
        return super().outranks(req, other)
