"""Shortest predicted remainder first, with limited preemption (TRAIL: Shahout et al., 2025)."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView, require_positive, require_share


class TRAIL(Policy):
    """The fewest output tokens left go first; only the young are evicted for them.

    Late in its life a request holds much KV and will soon give it back, so evicting it costs more
    than it gains. Assumes a predictor, better one that learns from what was generated.

    ``young``: share of its predicted output up to which a request may be evicted for a waiting one
    (0 to 1; 0 never evicts). ``max_wait``: seconds after which a request goes before all others.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, young: float = 0.8, max_wait: float = 60.0) -> None:
        require_positive(max_wait=max_wait)
        require_share(young=young)
        self.young = young
        self.max_wait = max_wait

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        predicted = view.predict(req)
        is_old = not req.is_waiting and req.num_output >= self.young * predicted
        if is_old or view.now - req.arrival_time >= self.max_wait:
            return (0, req.arrival)
        return (1, predicted - req.num_output, req.arrival)

    def outranks(self, req: Request, other: Request) -> bool:
        if req.is_waiting and other.rank[0] == 0:
            return False
        return super().outranks(req, other)
