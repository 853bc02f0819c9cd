"""Highest response ratio next (Hansen, 1971; as in SGLang, in tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from engine.sched import Policy, Ranks, Request, SchedView, StepShape, newcomers_by


class HRRN(Policy):
    """Starts the request that has waited longest in relation to its prompt (response ratio).

    The ratio is the prompt tokens computed since the request arrived, divided by the uncached
    tokens of its own prompt. It grows while the request waits, so no request starves.
    """

    dynamic = True

    def __init__(self) -> None:
        self.computed = 0  # prompt tokens of all requests computed so far

    def on_add(self, req: Request, view: SchedView) -> None:
        view.own("computed before")[req] = self.computed

    def on_step(self, shape: StepShape, view: SchedView) -> None:
        self.computed += shape.num_tokens - shape.num_decodes

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        return newcomers_by(
            lambda new: (
                (new.own("computed before") - self.computed) / (new.num_tokens - new.cached_prefix)
            ),
            *(view.columns(reqs), view.now, inf),
        )
