"""Longest prefix match, but every k-th start is the oldest (k-LPM: Dexter et al., 2025)."""

from __future__ import annotations

from engine.sched import Admission, Policy, Request, SchedView, require_positive


class KLPM(Policy):
    """Starts the longest cached prefix next, but every ``k``-th time the oldest request.

    This keeps most of the cache reuse and limits overtaking: a request with n older ones starts
    after at most ``k * (n + 1)`` others.
    """

    def __init__(self, k: int = 4) -> None:
        require_positive(k=k)
        self.k = k
        self.num_started = 0

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def next_waiting(self, view: SchedView) -> Request | None:
        waiting = view.unoffered_columns
        if not len(waiting):
            return None
        if self.num_started % self.k == 0:
            return waiting.request(0)
        return waiting.request(int(waiting.cached_prefix.argmax()))

    def admit(self, req: Request, view: SchedView) -> Admission:
        answer = super().admit(req, view)
        self.num_started += answer is Admission.YES
        return answer
