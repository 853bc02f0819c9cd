"""Keeps pooled requests of different priorities in different steps."""

from __future__ import annotations

from engine.sched.request import Request
from engine.sched.resource import Fit, OnRefuse, Resource
from engine.sched.step_state import Step


class PrioritySteps(Resource):
    """Starts no pooled request next to one with a smaller ``priority`` number.

    The result of a pooled request arrives when its step ends. So a step that computes a short query
    is not filled with texts that are less urgent: the query would wait for them. What this costs is
    one short step for each urgent request."""

    name = "better priority"
    serves = "pooling"
    on_refuse = OnRefuse.CLOSE

    def __init__(self) -> None:
        self._best: int | None = None  # smallest number in the step that is planned

    def begin_step(self, step: Step) -> None:
        self._best = None

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if self._best is not None and req.priority > self._best:
            return Fit(0)
        return Fit(num_tokens)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        if self._best is None or req.priority < self._best:
            self._best = req.priority
