"""Offline requests in the spare time of online requests (ConServe: Qiao et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sched import Limits, Policy, Request, SchedView, require_positive


class ConServe(Policy):
    """Serves online requests first; offline requests use the rest of each step's time.

    A request with a true ``hints["offline"]`` is offline. While online requests exist, offline ones
    get only as many tokens as fit into a step of ``tbt`` seconds, by the cost model, and are
    preempted for online ones. They may wait without limit. Order of arrival within each class.

    ``tbt``: wanted seconds between tokens of online requests.
    """

    waiting_may_preempt = True

    def __init__(self, tbt: float = 0.1) -> None:
        require_positive(tbt=tbt)
        self.tbt = tbt
        self.offline_upto: int | None = None  # tokens of this step that offline requests may fill

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
