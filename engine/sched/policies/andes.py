"""Quality of experience per token of memory (Andes: Liu et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sched import Policy, Ranks, Refuse, Request, SchedView, keep_hints, require_positive


class Andes(Policy):
    """Runs the requests whose readers gain most from a token, per token of KV memory.

    A reader wants the first token after ``ttft`` seconds and then one every ``tbt`` seconds; hints
    of these names, and a request's ``tbt``, override them. A reader with unread tokens gains
    little.

    ``margin``: a waiting request preempts one whose gain is this many times smaller, but none that
    was preempted ``max_preemptions`` times. A request that is ``max_late`` tokens late goes first.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(
        self,
        ttft: float = 1.0,
        tbt: float = 0.2,
        margin: float = 4.0,
        max_preemptions: int = 1,
        max_late: float = 100.0,
    ) -> None:
        require_positive(ttft=ttft, tbt=tbt, margin=margin, max_late=max_late)
        require_positive("max_preemptions", max_preemptions=max_preemptions)
        self.ttft, self.tbt, self.max_late = ttft, tbt, max_late
        self.margin, self.max_preemptions = margin, max_preemptions

    def on_add(self, req: Request, view: SchedView) -> Refuse | None:
        return keep_hints(req, view, ttft=self.ttft, tbt=self.tbt)

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        ttft, tbt = columns.own("ttft"), columns.own("tbt")
        # Tokens that the reader has beyond those wanted by now; negative if tokens are late.
        in_hand = columns.num_output - (view.now - columns.arrival_time - ttft) / tbt
        is_safe = ~columns.is_waiting & (columns.num_preempted >= self.max_preemptions)
        competes = ~(is_safe | (in_hand <= -self.max_late))
        gain = np.where(columns.num_output > 0, 1.0 / (1.0 + np.maximum(0.0, in_hand)), 2.0)
        return competes, np.where(competes, -gain / columns.num_tokens, 0.0)

    def outranks(self, req: Request, other: Request) -> bool:
        if not req.is_waiting:
            return super().outranks(req, other)
        if not req.rank[0] or not other.rank[0]:
            return bool(req.rank[0] < other.rank[0])
        return bool(req.rank[1] < self.margin * other.rank[1])
