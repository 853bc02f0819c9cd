"""Admission by the expected peak of memory use (Past-Future: Gong et al., ASPLOS 2025)."""

from __future__ import annotations

from engine.sched import Admission, Policy, Request, SchedView


class PastFuture(Policy):
    """Starts a request only if the estimated peak of memory use fits. Order of arrival.

    Output lengths are sampled from recently finished outputs that are longer than the request's own
    so far, or predicted by the configured predictor if no output was longer.

    ``reserve``: share of the KV blocks kept free for errors of the estimate (0 to below 1).
    """

    def __init__(self, reserve: float = 0.03) -> None:
        if not 0 <= reserve < 1:
            raise ValueError(f"reserve is {reserve}, must be a number from 0 to below 1")
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
        """A random sample of how many output tokens the request will still generate."""
        length = view.lengths.sample(view.rng, above=req.num_output) or view.predict(req)
        return min(length, req.max_total - req.num_prompt) - req.num_output
