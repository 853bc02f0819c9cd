"""Shortest predicted remainder first, with limited preemption (TRAIL: Shahout et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sched import Policy, Ranks, Request, SchedView, require_positive, require_share


class TRAIL(Policy):
    """Runs the requests with the fewest predicted remaining tokens; preempts only young requests.

    A request near its end is not preempted: it holds much KV that it will free soon. Needs a length
    predictor, preferably one that uses the output so far.

    ``young``: share of the predicted output (0 to 1) up to which a request may be preempted.
    ``max_wait``: seconds after which a request goes before all others.
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
