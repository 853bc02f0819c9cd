"""Steps of a fixed size (Sarathi-Serve: Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from engine.sched import Limits, Policy, Request, SchedView, require_positive


class Sarathi(Policy):
    """Every decode first, then prompts in chunks, up to a fixed number of tokens in a step.

    No prompt then delays the decodes next to it by more than a full step takes. Order of arrival.

    ``step_tokens``: of a step; as large as the wanted time between tokens allows. As many requests
    may run, so that each of them gets a token.
    """

    def __init__(self, step_tokens: int = 512) -> None:
        require_positive(step_tokens=step_tokens)
        self.step_tokens = step_tokens

    def limits(self, view: SchedView) -> Limits:
        return Limits(max_tokens=self.step_tokens, max_seqs=self.step_tokens)

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)
