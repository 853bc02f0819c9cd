"""Pooled requests of a simulated worker: they end with a result in place of a token."""

from __future__ import annotations

import numpy as np

from engine.messages.step import StepPlan, StepResult
from engine.messages.vectors import PooledPart


class PooledSlots:
    """The slots of running pooled requests."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def follow(self, plan: StepPlan) -> None:
        """Read which slots a plan frees and fills."""
        if self._slots:
            self._slots.difference_update(plan.freed_slots)
        self._slots.update(new.slot for new in plan.new if new.pooling is not None)

    def end(self, plan: StepPlan, result: StepResult) -> None:
        """Replace the tokens of pooled requests in a step's result by results without numbers."""
        if not self._slots:
            return
        is_pooled = np.isin(plan.slots, list(self._slots)) & (plan.samples == 1)
        if is_pooled.any():
            result.token_ids = result.token_ids[~is_pooled[plan.samples == 1]]
            result.counts = np.where(is_pooled, 0, plan.samples).astype(np.int32)
            result.pooled = PooledPart.without_values(np.flatnonzero(is_pooled).astype(np.int32))
