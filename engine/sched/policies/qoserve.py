"""Deadlines per token, and step sizes by slack (QoServe/Niyama: Goel et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sched import (
    Array,
    Columns,
    Limits,
    Policy,
    Ranks,
    Request,
    SchedView,
    Verdict,
    keep_hints,
    require_positive,
)


class QoServe(Policy):
    """Runs prompts by deadline and size, in steps as large as the most urgent decode allows.

    The n-th token of a request is due ``ttft + (n - 1) * tbt`` seconds after its arrival. Prompts
    that will miss their deadline go last.

    ``ttft``, ``tbt``: overridden by the hints of these names and by a request's ``tbt``. ``alpha``:
    weight of a prompt's work against its deadline (0: earliest deadline first, large: shortest
    prompt first). ``min_chunk``: least prompt tokens of a step. ``max_wait``: seconds after which a
    request goes first.
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

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        return keep_hints(req, view, ttft=self.ttft, tbt=self.tbt)

    def due(self, reqs: Columns) -> Array:
        """When the next token of each request is due, in seconds on the engine's clock."""
        return reqs.arrival_time + reqs.own("ttft") + reqs.num_output * reqs.own("tbt")

    def limits(self, view: SchedView) -> Limits:
        running = view.columns(view.running)
        decodes = running[running.num_uncomputed == 1]
        slack = self.due(decodes) - view.now
        if not (slack > 0).any():
            return Limits()
        context = int(decodes.num_computed.sum())
        num_tokens = view.cost.max_tokens(float(slack[slack > 0].min()), len(decodes), context)
        return Limits(max_tokens=max(num_tokens, len(running) + self.min_chunk))

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        is_old = view.now - columns.arrival_time >= self.max_wait
        cached, due = columns.cached_prefix, self.due(columns)
        left, done = columns.num_uncomputed - cached, columns.num_computed + cached
        work = view.prefill_seconds(left, done)
        is_late = (columns.num_output == 0) & (view.now + work > due)
        return np.where(is_old, 0, 1 + is_late), np.where(is_old, 0.0, due + self.alpha * work)
