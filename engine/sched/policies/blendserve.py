"""Batches that need compute and memory alike (BlendServe: Zhao et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched import Policy, Request, SchedView, require_positive, require_share


class BlendServe(Policy):
    """Takes requests from both ends of a line that is sorted by compute per token of memory.

    Long prompts with short outputs keep the arithmetic units busy, short prompts with long outputs
    the memory: what runs is kept near ``blend``. For throughput offline. Assumes a predictor.

    ``blend``: wanted mean share of prompt tokens to compute in all tokens (0 to 1). ``max_wait``:
    seconds after which the oldest goes next whatever its share.
    """

    def __init__(self, blend: float = 0.5, max_wait: float = 60.0) -> None:
        require_positive(max_wait=max_wait)
        require_share(blend=blend)
        self.blend = blend
        self.max_wait = max_wait
        self.shares: dict[Request, float] = {}

    def on_add(self, req: Request, view: SchedView) -> None:
        computed = req.num_prompt - view.kv.cached_prefix(req)
        self.shares[req] = computed / (req.num_prompt + view.predict(req))

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.shares.pop(req, None)

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def mean_share(self, running: Sequence[Request]) -> float:
        shares = [self.shares[req] for req in running]
        return sum(shares) / len(shares) if shares else self.blend

    def next_waiting(self, view: SchedView) -> Request | None:
        waiting = view.unoffered
        if waiting and view.now - waiting[0].arrival_time >= self.max_wait:
            return waiting[0]
        pick = min if self.mean_share(view.running) > self.blend else max
        return pick(waiting, key=self.shares.__getitem__, default=None)
