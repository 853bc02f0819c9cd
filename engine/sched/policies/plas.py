"""Least attained service of the program first (Autellix, PLAS: Luo et al., 2025)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.sched import Policy, Ranks, Request, SchedView, newcomers_by, require_positive


class PLAS(Policy):
    """Starts requests of the program (group of requests) that has received the least service.

    ``hints["program"]`` names the program; a request without it is a program of its own. Service
    counts the program's ended requests: uncached prompt tokens, plus ``output_price`` per output
    token.

    ``max_wait``: seconds after which a request goes before others; ``max_programs``: number of
    programs to remember; those idle for longest are dropped first.
    """

    dynamic = True

    def __init__(
        self, output_price: float = 8.0, max_wait: float = 30.0, max_programs: int = 100_000
    ) -> None:
        require_positive(output_price=output_price, max_wait=max_wait, max_programs=max_programs)
        self.output_price, self.max_wait = output_price, max_wait
        self.max_programs = max_programs
        self.service: dict[str, float] = {}
        self.members: defaultdict[str, set[Request]] = defaultdict(set)

    def on_add(self, req: Request, view: SchedView) -> None:
        program = str(req.hints.get("program"))
        self.members[program].add(req)
        view.own("service")[req] = self.service.get(program, 0.0)

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        return newcomers_by(lambda new: new.own("service"), columns, view.now, self.max_wait)

    def on_finish(self, req: Request, view: SchedView) -> None:
        program = str(req.hints.get("program"))
        members = self.members[program]
        members.discard(req)
        if not members:
            del self.members[program]
        if "program" not in req.hints:
            return
        served = req.num_prompt - req.num_cached + self.output_price * req.num_output
        self.service[program] = self.service.pop(program, 0.0) + served
        self._store(program, view)
        if len(self.service) > self.max_programs:
            oldest = next(iter(self.service))
            del self.service[oldest]
            self._store(oldest, view)

    def _store(self, program: str, view: SchedView) -> None:
        for req in self.members.get(program, ()):
            view.own("service")[req] = self.service.get(program, 0.0)
