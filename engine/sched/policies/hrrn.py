"""Highest response ratio next (Hansen, 1971; as in SGLang, in tokens)."""

from __future__ import annotations

from math import inf

from engine.sched import Policy, Request, SchedView, StepShape


class HRRN(Policy):
    """The most prompt tokens computed since it came, per token it has to compute itself.

    Short prompts go first, but a waiting request's ratio grows, so no request starves. Counting
    tokens instead of seconds makes the ratio independent of the machine.
    """

    dynamic = True

    def __init__(self) -> None:
        self.computed = 0  # prompt tokens of all requests so far
        self.computed_before: dict[Request, int] = {}  # when the request came

    def on_add(self, req: Request, view: SchedView) -> None:
        self.computed_before[req] = self.computed

    def on_step(self, shape: StepShape, view: SchedView) -> None:
        self.computed += shape.num_tokens - shape.num_decodes

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.computed_before.pop(req, None)

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        if not req.is_waiting or req.num_preempted:
            return (0, req.arrival)
        waited = self.computed - self.computed_before[req]
        return (1, -waited / (req.num_tokens - view.kv.cached_prefix(req)), req.arrival)

    def stable_for(self, view: SchedView) -> float:
        return inf  # those that run go by arrival
