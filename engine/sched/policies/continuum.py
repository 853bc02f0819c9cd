"""Programs in order, whose KV is kept over tool calls (Continuum: Li et al., 2025)."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np

from engine.sched import (
    Admission,
    CachePolicy,
    Keep,
    Policy,
    Request,
    SchedView,
    require_positive,
    require_share,
)


class Programs(CachePolicy):
    """Keeps the KV of a program (``hints["program"]``) over its tool calls, while that pays.

    ``price``: what a second of the whole pool is worth, in seconds of computing; ``first``: seconds
    to keep while no pause is known; ``max_pinned``: share of the pool."""

    def __init__(self, price: float = 1.0, first: float = 2.0, max_pinned: float = 0.9) -> None:
        require_positive("price", "first", price=price, first=first)
        require_share(max_pinned=max_pinned)
        self.price, self.first, self.max_pinned = price, first, max_pinned
        self.pauses: deque[float] = deque(maxlen=1000)
        self.num_ends = self.num_returns = 0
        self.times: dict[str, tuple[float, float]] = {}  # first arrival and last end, by program

    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Keep | None:
        if not has_ended or "program" not in req.hints:
            return None
        name, self.num_ends = str(req.hints["program"]), self.num_ends + 1
        if name in self.times:
            self.num_returns += 1
            self.pauses.append(max(0.0, req.arrival_time - self.times[name][1]))
        self.times[name] = (self.times.pop(name, (req.arrival_time,))[0], view.now)
        if len(self.times) > 100_000:
            del self.times[next(iter(self.times))]
        return Keep(until=view.now + self.seconds(req, view), owner=name)

    def seconds(self, req: Request, view: SchedView) -> float:
        if not self.pauses:
            return self.first
        saved = view.cost.prefill_seconds(req.num_tokens, 0) - view.cost.step_seconds(0, 0)
        held = self.price * view.kv.blocks_for(req.num_tokens) / view.kv.num_usable
        pauses, back = np.sort(np.array(self.pauses)), np.arange(1, len(self.pauses) + 1)
        waited = np.cumsum(pauses) + pauses * (len(pauses) - back)  # if kept for each of them
        gain = saved * back * self.num_returns / self.num_ends - held * waited
        return 1.25 * float(pauses[gain.argmax()]) if gain.max() > 0 else 0.0


class Continuum(Programs, Policy):
    """Runs programs in order of arrival, and keeps their KV during tool calls where that pays.

    New programs displace nothing kept. ``price``, ``first``, ``max_pinned``: see ``Programs``."""

    by_design: ClassVar = {"starvation": "a program without end goes before all later ones"}

    def rank(self, req: Request, view: SchedView) -> tuple[float]:
        return (self.times.get(str(req.hints.get("program")), (req.arrival_time,))[0],)

    def admit(self, req: Request, view: SchedView) -> Admission:
        is_new = str(req.hints.get("program")) not in self.times
        spare = view.kv.num_free - view.kv.num_pinned
        if is_new and view.running and view.kv.missing(req, req.num_tokens) > spare:
            return Admission.CLOSE
        return super().admit(req, view)
