"""Skip-join multi-level feedback queue (FastServe: Wu et al., 2023; NSDI 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import ClassVar

from engine.sched import OwnNumbers, Policy, Ranks, Request, SchedView, require_positive


class FastServe(Policy):
    """Lower levels go first and evict higher ones; each has twice the quantum of the one before.

    A request enters at the first level whose quantum holds its prompt and sinks one level whenever
    it has used a quantum up: short jobs finish early though no length is known. Service is the time
    the cost model predicts for its tokens alone. No request is evicted before its next token.

    ``quantum``: seconds at level 0. ``max_wait``: seconds without a token that lift it to level 0.
    """

    by_design: ClassVar = {
        "throughput": "a lower level takes the seat, and KV is dropped instead of swapped"
    }
    dynamic = True
    waiting_may_preempt = True
    seated: OwnNumbers

    def __init__(self, quantum: float = 0.02, max_wait: float = 3.0) -> None:
        require_positive(quantum=quantum, max_wait=max_wait)
        self.quantum, self.max_wait = quantum, max_wait

    def on_add(self, req: Request, view: SchedView) -> None:
        self.seated = view.own("seated")  # output tokens when last seated
        cached = view.kv.cached_prefix(req)
        prefill = view.cost.prefill_seconds(req.num_prompt - cached, cached)
        view.own("level")[req] = max(0, ceil(log2(prefill / self.quantum)))
        view.own("served")[req] = view.now  # when it last got tokens

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        level, used = view.own("level"), view.own("used")  # seconds at this level
        view.own("served")[req] = view.now
        used[req] += view.cost.prefill_seconds(num_tokens, req.num_computed - num_tokens)
        if used[req] >= self.quantum * 2 ** level[req]:
            level[req], used[req] = level[req] + 1, 0.0

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        waits = columns.is_waiting
        lifted = columns[waits & (view.now - columns.own("served") >= self.max_wait)]
        for name, value in (("level", 0.0), ("used", 0.0), ("served", view.now)):
            view.own(name).put(lifted, value)
        view.own("seated").put(columns[waits], columns.num_output[waits])
        return columns.own("level")

    def outranks(self, req: Request, other: Request) -> bool:
        if not req.is_waiting:
            return super().outranks(req, other)
        return req.rank[0] < other.rank[0] and other.num_output > self.seated[other]
