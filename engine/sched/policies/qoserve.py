"""Deadlines of single tokens and steps sized by slack (QoServe/Niyama: Goel et al., 2025)."""

from __future__ import annotations

from engine.sched import Limits, Policy, Refuse, Request, SchedView, require_positive, wrong_hints


class QoServe(Policy):
    """A step is as large as the most pressing decode allows; prompts go by deadline and size.

    The n-th token of a request is due ``ttft + (n - 1) * tbt`` after it came, so one that is ahead
    lends its slack to prompts. Prompts that cannot make it any more go behind those that can.

    ``ttft``, ``tbt``: seconds to the first token and between tokens, overridden by the hints of the
    same names. ``alpha``: seconds of deadline that a second of work weighs (0: earliest deadline
    first, large: shortest first). ``min_chunk``: prompt tokens of a step at least. ``max_wait``:
    seconds after which a request goes first.
    """

    dynamic = True

    def __init__(
        self,
        ttft: float = 2.0,
        tbt: float = 0.1,
        alpha: float = 1.0,
        min_chunk: int = 64,
        max_wait: float = 60.0,
    ) -> None:
        require_positive(ttft=ttft, tbt=tbt, min_chunk=min_chunk, max_wait=max_wait)
        require_positive("alpha", alpha=alpha)
        self.ttft, self.tbt, self.alpha = ttft, tbt, alpha
        self.min_chunk, self.max_wait = min_chunk, max_wait

    def on_add(self, req: Request, view: SchedView) -> Refuse | None:
        return wrong_hints(req, "ttft", "tbt")

    def due(self, req: Request) -> float:
        """When its next token is."""
        ttft, tbt = req.hints.get("ttft", self.ttft), req.hints.get("tbt", self.tbt)
        return float(req.arrival_time + ttft + req.num_output * tbt)

    def limits(self, view: SchedView) -> Limits:
        decodes = [req for req in view.running if req.num_uncomputed == 1]
        slacks = [slack for req in decodes if (slack := self.due(req) - view.now) > 0]
        if not slacks:
            return Limits()
        context = sum(req.num_computed for req in decodes)
        num_tokens = view.cost.max_tokens(min(slacks), len(decodes), context)
        return Limits(max_tokens=max(num_tokens, len(view.running) + self.min_chunk))

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        if view.now - req.arrival_time >= self.max_wait:
            return (0, req.arrival)
        cached = view.kv.cached_prefix(req) if req.is_waiting else 0
        work = view.cost.prefill_seconds(req.num_uncomputed - cached, req.num_computed + cached)
        due = self.due(req)
        is_late = not req.num_output and view.now + work > due
        return (2 if is_late else 1, due + self.alpha * work, req.arrival)
