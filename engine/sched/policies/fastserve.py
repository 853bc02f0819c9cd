"""Skip-join multi-level feedback queue (FastServe: Wu et al., 2023; NSDI 2026)."""

from __future__ import annotations

from math import ceil, log2

from engine.sched import Policy, Request, SchedView, require_positive


class Turn:
    def __init__(self, level: int, now: float) -> None:
        self.level, self.served = level, now  # when it last got tokens
        self.used, self.num_output = 0.0, 0  # seconds at this level; tokens when last seated


class FastServe(Policy):
    """Lower levels go first and evict higher ones; each has twice the quantum of the one before.

    A request enters at the first level whose quantum holds its prompt and sinks one level whenever
    it has used a quantum up: short jobs finish early though no length is known. Service is the time
    the cost model predicts for its tokens alone. No request is evicted before its next token.

    ``quantum``: seconds at level 0. ``max_wait``: seconds without a token that lift it to level 0.
    """

    dynamic = True
    waiting_may_preempt = True

    def __init__(self, quantum: float = 0.02, max_wait: float = 3.0) -> None:
        require_positive(quantum=quantum, max_wait=max_wait)
        self.quantum, self.max_wait = quantum, max_wait
        self.turns: dict[Request, Turn] = {}

    def on_add(self, req: Request, view: SchedView) -> None:
        cached = view.kv.cached_prefix(req)
        prefill = view.cost.prefill_seconds(req.num_prompt - cached, cached)
        self.turns[req] = Turn(max(0, ceil(log2(prefill / self.quantum))), view.now)

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        turn = self.turns[req]
        turn.served = view.now
        turn.used += view.cost.prefill_seconds(num_tokens, req.num_computed - num_tokens)
        if turn.used >= self.quantum * 2**turn.level:
            turn.level, turn.used = turn.level + 1, 0.0

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.turns.pop(req, None)

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        turn = self.turns[req]
        if req.is_waiting:
            if view.now - turn.served >= self.max_wait:
                turn = self.turns[req] = Turn(0, view.now)
            turn.num_output = req.num_output
        return (turn.level, req.arrival)

    def outranks(self, req: Request, other: Request) -> bool:
        if not req.is_waiting:
            return super().outranks(req, other)
        return req.rank[0] < other.rank[0] and other.num_output > self.turns[other].num_output
