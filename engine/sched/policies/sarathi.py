"""Steps of a fixed size (Sarathi-Serve: Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from engine.sched import Limits, Policy, Request, SchedView, require_positive


class Sarathi(Policy):
    """All decodes first, then prompts in chunks, up to a fixed number of tokens per step.

    So a prompt delays decodes by at most the time of a full step. Order of arrival.

    ``step_tokens``: tokens per step, as many as the wanted time between tokens allows. At most
    ``step_tokens`` requests run, so that each gets a token.
    """

    def __init__(self, step_tokens: int = 512) -> None:
        require_positive(step_tokens=step_tokens)
        self.step_tokens = step_tokens

    def limits(self, view: SchedView) -> Limits:
        return Limits(max_tokens=self.step_tokens, max_seqs=self.step_tokens)

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)
