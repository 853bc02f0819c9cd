"""Quality of experience per token of memory (Andes: Liu et al., 2024)."""

from __future__ import annotations

from engine.sched import Policy, Refuse, Request, SchedView, require_positive, wrong_hints


class Andes(Policy):
    """Seats and memory go to whose reader gains most per token they hold: a greedy knapsack.

    A reader wants the first token soon and then one every ``tbt`` seconds; who has tokens in hand
    gains little from more and is evicted for who is behind.

    ``ttft``, ``tbt``: seconds, overridden by the hints of the same names. ``margin``: how many
    times more a waiting request must gain than one it evicts. A request that was preempted
    ``max_preemptions`` times, or waited ``max_wait`` seconds for a token, goes first.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(
        self,
        ttft: float = 1.0,
        tbt: float = 0.2,
        margin: float = 4.0,
        max_preemptions: int = 2,
        max_wait: float = 30.0,
    ) -> None:
        require_positive(ttft=ttft, tbt=tbt, margin=margin, max_wait=max_wait)
        self.ttft, self.tbt, self.max_wait = ttft, tbt, max_wait
        self.margin, self.max_preemptions = margin, max_preemptions

    def on_add(self, req: Request, view: SchedView) -> Refuse | None:
        return wrong_hints(req, "ttft", "tbt")

    def gain(self, req: Request, now: float) -> float:
        """What a token is worth to the reader: 1 in time, less if tokens are in hand."""
        ttft, tbt = req.hints.get("ttft", self.ttft), req.hints.get("tbt", self.tbt)
        wanted = (now - req.arrival_time - ttft) / tbt
        if not req.num_output:
            return 2.0
        return float(1.0 / (1.0 + max(0.0, req.num_output - max(0.0, wanted))))

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        is_overdue = not req.num_output and view.now - req.arrival_time >= self.max_wait
        if is_overdue or req.num_preempted >= self.max_preemptions:
            return (0, req.arrival)
        return (1, -self.gain(req, view.now) / req.num_tokens, req.arrival)

    def outranks(self, req: Request, other: Request) -> bool:
        if not req.is_waiting:
            return super().outranks(req, other)
        if not req.rank[0] or not other.rank[0]:
            return req.rank[0] < other.rank[0]
        return req.rank[1] < self.margin * other.rank[1]
