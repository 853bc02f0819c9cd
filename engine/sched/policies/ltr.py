"""Shortest predicted output first (learning to rank: Fu et al., NeurIPS 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from engine.sched import Policy, Ranks, Request, SchedView, require_positive


class LTR(Policy):
    """Runs the requests with the shortest predicted outputs, preempting longer ones.

    A request keeps the prediction that it arrives with, since one that grows with the output would
    let requests evict each other for ever. Predictions need not be exact, but must order requests
    well.

    ``starve_steps``: a request without tokens for this many steps goes before all others, until it
    has got ``boost_tokens`` output tokens.
    """

    dynamic = True
    waiting_may_preempt = True
    by_design: ClassVar = dict.fromkeys(
        ("recomputing", "throughput"),
        "a shorter request preempts; without KV tiers the other loses its KV",
    )

    def __init__(self, starve_steps: int = 200, boost_tokens: int = 50) -> None:
        require_positive(starve_steps=starve_steps, boost_tokens=boost_tokens)
        self.starve_steps = starve_steps
        self.boost_tokens = boost_tokens

    def on_add(self, req: Request, view: SchedView) -> None:
        view.own("last step")[req] = view.step.index  # last step with tokens, at first its arrival
        view.own("length")[req] = view.predict(req)

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        view.own("last step")[req] = view.step.index
        boosts = view.own("boost")  # boosted tokens left
        if boosts[req] and req.num_computed >= req.num_tokens:  # this step samples a token
            boosts[req] -= 1

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        idle = view.step.index - columns.own("last step")
        starved = columns.is_waiting & (idle >= self.starve_steps)
        view.own("boost").put(columns[starved], self.boost_tokens)
        return columns.own("boost") == 0, columns.own("length")
