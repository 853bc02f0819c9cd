"""Shortest predicted remainder first, with limited preemption (TRAIL: Shahout et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sched import Policy, Ranks, Request, SchedView, require_positive, require_share


class TRAIL(Policy):
    """The fewest remaining output tokens go first; only young requests are preempted for them.

    A request near its end holds much KV and will free it soon, so preempting it costs more than it
    gains. Needs a length predictor, best one that uses the output so far.

    ``young``: share of its predicted output up to which a request may be preempted for a waiting
    one (0 to 1; 0 never). ``max_wait``: seconds after which a request goes before all others.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, young: float = 0.8, max_wait: float = 60.0) -> None:
        require_positive(max_wait=max_wait)
        require_share(young=young)
        self.young = young
        self.max_wait = max_wait

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        predicted = columns.predicted
        is_old = ~columns.is_waiting & (columns.num_output >= self.young * predicted)
        is_young = ~is_old & (view.now - columns.arrival_time < self.max_wait)
        return is_young, np.where(is_young, predicted - columns.num_output, 0)

    def outranks(self, req: Request, other: Request) -> bool:
        if req.is_waiting and other.rank[0] == 0:
            return False
        return super().outranks(req, other)
