"""First come, first served."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView


class FCFS(Policy):
    """Runs requests in order of arrival."""

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)
