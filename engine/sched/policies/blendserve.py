"""Batches that use compute and memory evenly (BlendServe: Zhao et al., 2024)."""

from __future__ import annotations

from engine.sched import Policy, Request, SchedView, require_positive, require_share


class BlendServe(Policy):
    """Runs compute-heavy and memory-heavy requests together, for offline throughput.

    A request's share is its uncached prompt tokens divided by all its tokens, with the predicted
    output. If the mean share of running requests is above ``blend``, the waiting request with the
    lowest share starts next, else the one with the highest.

    ``blend``: wanted mean share (0 to 1). ``max_wait``: seconds after which the oldest goes next.
    """

    def __init__(self, blend: float = 0.5, max_wait: float = 60.0) -> None:
        require_positive(max_wait=max_wait)
        require_share(blend=blend)
        self.blend = blend
        self.max_wait = max_wait

    def on_add(self, req: Request, view: SchedView) -> None:
        computed = req.num_prompt - view.kv.cached_prefix(req)
        view.own("share")[req] = computed / (req.num_prompt + view.predict(req))

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def mean_share(self, view: SchedView) -> float:
        shares = view.columns(view.running).own("share").tolist()
        return sum(shares) / len(shares) if shares else self.blend

    def next_waiting(self, view: SchedView) -> Request | None:
        waiting = view.unoffered_columns
        if not len(waiting):
            return None
        if view.now - waiting.arrival_time[0] >= self.max_wait:
            return waiting.request(0)
        shares = waiting.own("share")
        is_high = self.mean_share(view) > self.blend
        return waiting.request(int(shares.argmin() if is_high else shares.argmax()))
