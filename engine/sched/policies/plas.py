"""Least attained service of the program first (Autellix, PLAS: Luo et al., 2025)."""

from __future__ import annotations

from math import inf

from engine.sched import Policy, Request, SchedView, require_positive


class PLAS(Policy):
    """Requests of the program whose ended requests were served least go first.

    A program of many calls then waits less behind those of long ones. ``hints["program"]`` names
    the program; a request without it is one of its own. Service is in tokens: prompt tokens that
    were not cached, and ``output_price`` for each output token.

    ``max_wait``: seconds after which a request goes before others; ``max_programs``: how many are
    remembered, those longest idle being forgotten first.
    """

    dynamic = True

    def __init__(
        self, output_price: float = 8.0, max_wait: float = 30.0, max_programs: int = 100_000
    ) -> None:
        require_positive(output_price=output_price, max_wait=max_wait, max_programs=max_programs)
        self.output_price = output_price
        self.max_wait = max_wait
        self.max_programs = max_programs
        self.service: dict[str, float] = {}

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        if not req.is_waiting or req.num_preempted:
            return (0, req.arrival)
        if view.now - req.arrival_time >= self.max_wait:
            return (1, req.arrival)
        return (2, self.service.get(str(req.hints.get("program")), 0.0), req.arrival)

    def on_finish(self, req: Request, view: SchedView) -> None:
        if "program" not in req.hints:
            return
        program = str(req.hints["program"])
        computed = req.num_prompt - req.num_cached
        served = computed + self.output_price * req.num_output
        self.service[program] = self.service.pop(program, 0.0) + served
        if len(self.service) > self.max_programs:
            del self.service[next(iter(self.service))]

    def stable_for(self, view: SchedView) -> float:
        return inf  # those that run go by arrival
