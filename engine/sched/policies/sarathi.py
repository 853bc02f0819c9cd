"""Steps of a fixed size (Sarathi-Serve: Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from engine.sched import Limits, Policy, Request, SchedView, require_positive


class Sarathi(Policy):
    """Computes all decodes in each step, and fills it up with prompt chunks, in order of arrival.

    A decode therefore waits at most for a step of ``step_tokens`` tokens.

    ``step_tokens``: tokens per step; choose it by the wanted time between tokens. It also limits
    the number of running requests, so that each gets a token.
    """

    def __init__(self, step_tokens: int = 512) -> None:
        require_positive(step_tokens=step_tokens)
        self.step_tokens = step_tokens

    def limits(self, view: SchedView) -> Limits:
        return Limits(max_tokens=self.step_tokens, max_seqs=self.step_tokens)

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)
