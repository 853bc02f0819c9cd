"""Shortest predicted output first (learning to rank: Fu et al., NeurIPS 2024)."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView, require_positive


class LTR(Policy):
    """Running and waiting requests compete by predicted length; the shortest hold the seats.

    Assumes a predictor that orders requests well; its values need not be right. Evicted requests
    are computed again, so the bounds below should leave time for more than a prompt.

    ``starve_steps``: steps without a token after which a request goes before all others;
    ``boost_steps``: steps with a token for which it then does.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, starve_steps: int = 200, boost_steps: int = 50) -> None:
        require_positive(starve_steps=starve_steps, boost_steps=boost_steps)
        self.starve_steps = starve_steps
        self.boost_steps = boost_steps
        self.last_step: dict[Request, int] = {}  # with a token; before the first, when it came
        self.boosts: dict[Request, int] = {}  # steps left

    def on_add(self, req: Request, view: SchedView) -> None:
        self.last_step[req] = view.step.index

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        self.last_step[req] = view.step.index
        left = self.boosts.pop(req, 0) - 1
        if left > 0:
            self.boosts[req] = left

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.last_step.pop(req, None)
        self.boosts.pop(req, None)

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        if req.is_waiting and view.step.index - self.last_step[req] >= self.starve_steps:
            self.boosts[req] = self.boost_steps
        return (req not in self.boosts, view.predict(req), req.arrival)
