"""Shortest predicted output first (learning to rank: Fu et al., NeurIPS 2024)."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView, require_positive


class LTR(Policy):
    """Running and waiting requests compete by predicted length; the shortest hold the seats.

    Assumes a predictor that orders requests well; its values need not be right.

    ``starve_steps``: steps without tokens after which a request goes before all others;
    ``boost_tokens``: output tokens it then gets before it competes again.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, starve_steps: int = 200, boost_tokens: int = 50) -> None:
        require_positive(starve_steps=starve_steps, boost_tokens=boost_tokens)
        self.starve_steps = starve_steps
        self.boost_tokens = boost_tokens
        self.last_step: dict[Request, int] = {}  # with tokens; before the first, when it came
        self.boosts: dict[Request, int] = {}  # tokens left

    def on_add(self, req: Request, view: SchedView) -> None:
        self.last_step[req] = view.step.index

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        self.last_step[req] = view.step.index
        if req in self.boosts and req.num_computed >= req.num_tokens:  # this brings a token
            self.boosts[req] -= 1
            if not self.boosts[req]:
                del self.boosts[req]

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.last_step.pop(req, None)
        self.boosts.pop(req, None)

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        if req.is_waiting and view.step.index - self.last_step[req] >= self.starve_steps:
            self.boosts[req] = self.boost_tokens
        return (req not in self.boosts, view.predict(req), req.arrival)
