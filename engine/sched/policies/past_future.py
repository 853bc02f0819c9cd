"""Admission by the future peak of memory (Past-Future: Gong et al., ASPLOS 2025)."""

from __future__ import annotations

from engine.sched import Admission, Policy, Request, SchedView


class PastFuture(Policy):
    """Admits while the blocks in use at the worst coming moment are expected to fit.

    How long each request will become is drawn from the lengths of those that ended, given what it
    has generated already; before any has ended, from the configured predictor. Fewer preemptions
    than filling the memory, more requests at once than reserving for the longest output. Order of
    arrival.

    ``reserve``: share of the blocks kept for errors of the draw (0 to below 1).
    """

    def __init__(self, reserve: float = 0.03) -> None:
        if not 0 <= reserve < 1:
            raise ValueError(f"reserve is {reserve}, must be at least 0 and below 1")
        self.reserve = reserve

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def admit(self, req: Request, view: SchedView) -> Admission:
        if not view.running:
            return Admission.YES
        peak = view.kv.peak([*view.running, req], lambda other: self.remaining(other, view))
        fits = peak <= (1 - self.reserve) * view.kv.num_usable
        return Admission.YES if fits else Admission.CLOSE

    def remaining(self, req: Request, view: SchedView) -> int:
        """Output tokens still to come, drawn."""
        length = view.lengths.sample(view.rng, above=req.num_output) or view.predict(req)
        return min(length, req.max_total - req.num_prompt) - req.num_output
