"""Preempts the request that loses least (least computed first, proposed for vLLM, 2026)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched import Policy, Request, SchedView


class LeastComputed(Policy):
    """Preempts the running request with the fewest computed tokens, which are then computed again.

    Requests start in order of arrival."""

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def victim(self, candidates: Sequence[Request], req: Request, view: SchedView) -> Request:
        return min(candidates, key=lambda other: (other.num_computed, -other.arrival))
