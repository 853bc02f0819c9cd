"""Preempts the request that loses least (least computed first, proposed for vLLM, 2026)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched import Policy, Request, SchedView


class LeastComputed(Policy):
    """Preempts the running request with the fewest computed tokens.

    A preempted request is computed again, so this keeps the wasted work small. Order of arrival.
    """

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def victim(self, candidates: Sequence[Request], req: Request, view: SchedView) -> Request:
        return min(candidates, key=lambda other: (other.num_computed, -other.arrival))
