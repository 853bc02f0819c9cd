"""Offline work in the slack of online work (ConServe: Qiao et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sched import Limits, Policy, Request, SchedView, require_positive


class ConServe(Policy):
    """Online requests as if they were alone; offline ones fill each step up to its time.

    Requests with ``hints["offline"]`` true are offline: offered tokens last and evicted first, also
    for a waiting online one. Next to online requests they get the tokens with which a step, by the
    cost model, still takes at most ``tbt``; alone they get all. Order of arrival within a class.
    Nothing bounds their wait: that is what offline means.

    ``tbt``: seconds between tokens that online requests want.
    """

    waiting_may_preempt = True

    def __init__(self, tbt: float = 0.1) -> None:
        require_positive(tbt=tbt)
        self.tbt = tbt
        self.offline_upto: int | None = None  # tokens of this step up to which offline ones get any

    def rank(self, req: Request, view: SchedView) -> tuple[int, ...]:
        return (int(bool(req.hints.get("offline"))), req.arrival)

    def limits(self, view: SchedView) -> Limits:
        self.offline_upto = None
        if any(queue and not queue[0].rank[0] for queue in (view.running, view.waiting)):
            context = sum(req.num_computed for req in view.running)
            self.offline_upto = view.cost.max_tokens(self.tbt, len(view.running), context)
        return Limits()

    def order(self, view: SchedView) -> Iterator[Request]:
        running = sorted(view.running, key=lambda req: req.num_uncomputed != 1)
        yield from (req for req in running if not req.rank[0])
        while (urgent := self.next_waiting(view)) is not None and not urgent.rank[0]:
            yield urgent
        yield from (req for req in running if req.rank[0])
        while (req := self.next_waiting(view)) is not None:
            yield req

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        if self.offline_upto is None or not req.rank[0]:
            return num_tokens
        spent = view.config.max_num_batched_tokens - view.step.tokens_left
        return max(0, min(num_tokens, self.offline_upto - spent))

    def outranks(self, req: Request, other: Request) -> bool:
        return req.rank[0] < other.rank[0] if req.is_waiting else super().outranks(req, other)
