"""Skip-join multi-level feedback queue (FastServe: Wu et al., 2023; NSDI 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import ClassVar

from engine.sched import OwnNumbers, Policy, Ranks, Request, SchedView, require_positive


class FastServe(Policy):
    """Requests that have used little time preempt those that have used much (multi-level queue).

    Lower levels run first; level n allows ``quantum * 2**n`` seconds. A request starts at the first
    level that allows the time of its prompt, and moves up when it has used the level's time. Times
    are predictions of the cost model. A running request is preempted only after it got a token.

    ``quantum``: seconds of level 0. ``max_wait``: seconds without a token after which a waiting
    request returns to level 0.
    """

    by_design: ClassVar = {
        "throughput": "a lower level preempts, and without KV tiers its KV is dropped"
    }
    dynamic = True
    waiting_may_preempt = True
    seated: OwnNumbers

    def __init__(self, quantum: float = 0.02, max_wait: float = 3.0) -> None:
        require_positive(quantum=quantum, max_wait=max_wait)
        self.quantum, self.max_wait = quantum, max_wait

    def on_add(self, req: Request, view: SchedView) -> None:
        self.seated = view.own("seated")  # output tokens when it last started to run
        cached = view.kv.cached_prefix(req)
        prefill = view.cost.prefill_seconds(req.num_prompt - cached, cached)
        view.own("level")[req] = max(0, ceil(log2(prefill / self.quantum)))
        view.own("served")[req] = view.now  # time of its last token

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        level, used = view.own("level"), view.own("used")  # used: seconds at this level
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
