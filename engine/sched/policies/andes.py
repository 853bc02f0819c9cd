"""Quality of experience per token of memory (Andes: Liu et al., 2024)."""

from __future__ import annotations

from engine.sched import Policy, Refuse, Request, SchedView, require_positive, wrong_hints


class Andes(Policy):
    """Seats and memory go to the requests whose readers gain most per token held (greedy knapsack).

    A reader wants the first token soon and then one every ``tbt`` seconds; one with unread
    tokens gains little from more, so its request is evicted for one that is behind.

    ``ttft``, ``tbt``: seconds, overridden by the hints of the same names. ``margin``: how many
    times more a waiting request must gain than one it evicts. A request preempted
    ``max_preemptions`` times is not evicted again; one ``max_late`` tokens behind goes first.
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
        return wrong_hints(req, "ttft", "tbt")

    def in_hand(self, req: Request, now: float) -> float:
        """Tokens the reader has beyond those wanted by now; below 0 as many are late."""
        ttft, tbt = req.hints.get("ttft", self.ttft), req.hints.get("tbt", self.tbt)
        return float(req.num_output - (now - req.arrival_time - ttft) / tbt)

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        in_hand = self.in_hand(req, view.now)
        is_safe = not req.is_waiting and req.num_preempted >= self.max_preemptions
        if is_safe or in_hand <= -self.max_late:
            return (0, req.arrival)
        gain = 1.0 / (1.0 + max(0.0, in_hand)) if req.num_output else 2.0
        return (1, -gain / req.num_tokens, req.arrival)

    def outranks(self, req: Request, other: Request) -> bool:
        if not req.is_waiting:
            return super().outranks(req, other)
        if not req.rank[0] or not other.rank[0]:
            return bool(req.rank[0] < other.rank[0])
        return bool(req.rank[1] < self.margin * other.rank[1])
