"""Deadlines by tier, and from the first token on by the pace its reader was promised."""

import numpy as np

from engine.sched import Limits, Policy, Refuse, require_positive


class TieredDeadlines(Policy):
    """The next token that is due first goes first; steps are as long as the most pressing reader
    allows; who cannot be served in time is told so at once.

    ``hints["tier"]`` names one of ``tiers``, whose values are seconds to the first token. After it
    a token is due every ``tbt`` seconds (of the request, or this default). ``min_tokens``: of a
    step at least. ``refuse``: False takes everybody.
    """

    dynamic = True

    def __init__(self, tbt: float = 0.1, min_tokens: int = 64, refuse: bool = True) -> None:
        require_positive(tbt=tbt, min_tokens=min_tokens)
        self.tbt, self.min_tokens, self.refuse = tbt, min_tokens, refuse
        self.tiers = {"interactive": 1.0, "standard": 5.0, "batch": 60.0}

    def on_add(self, req, view):
        tier = self.tiers.get(str(req.hints.get("tier")), self.tiers["standard"])
        view.own("due")[req] = view.now + tier
        view.own("tbt")[req] = req.tbt or self.tbt
        queue = view.columns(view.waiting)
        ahead = int(queue.num_uncomputed[queue.own("due") <= view.now + tier].sum())
        seconds = view.cost.prefill_seconds(ahead + req.num_prompt)
        if self.refuse and seconds > tier:
            view.count("refused")
            return Refuse(f"the first token would come in {seconds:.2f} s, {tier} are promised")
        return None

    def on_tokens(self, reqs, view):
        """What comes early lends its slack to the next one; what comes late does not borrow."""
        columns = view.columns(reqs)
        due = columns.own("due")
        view.count("late tokens", int((due < view.now).sum()))
        view.own("due").put(columns, np.maximum(due, view.now) + columns.own("tbt"))

    def ranks(self, reqs, view):
        return view.columns(reqs).own("due")

    def limits(self, view):
        running = view.columns(view.running)
        slack = running.own("due")[running.num_output > 0] - view.now
        if not (slack > 0).any():
            return Limits()
        seconds = float(slack[slack > 0].min())
        num_tokens = view.cost.max_tokens(seconds, len(running), int(running.num_computed.sum()))
        return Limits(max_tokens=max(self.min_tokens + len(running), num_tokens))
