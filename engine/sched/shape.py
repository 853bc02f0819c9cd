"""The shape of a step: what a cost model needs to know of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.messages.step import StepPlan


class StepShape(NamedTuple):
    """Sizes of one step, in tokens where nothing else is said, and how long it took."""

    num_seqs: int
    num_tokens: int
    num_decodes: int  # rows of one token
    context: int  # sum over the rows of the tokens in the cache before the step
    attention: int  # sum over the rows of pairs (new token, earlier token)
    seconds: float  # from launch to result; 0.0 if it was not measured

    @classmethod
    def of(cls, plan: StepPlan, seconds: float) -> StepShape:
        """Read off a plan."""
        starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
        return cls(
            num_seqs=len(counts),
            num_tokens=plan.num_tokens,
            num_decodes=int((counts == 1).sum()),
            context=int(starts.sum()),
            attention=int((counts * starts + counts * (counts + 1) // 2).sum()),
            seconds=seconds,
        )


NO_STEP = StepShape(0, 0, 0, 0, 0, 0.0)
