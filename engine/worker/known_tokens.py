"""``KnownTokens``: which tokens the stages of a pipeline know from plans. Does not import torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import Column, StepPlan


class KnownTokens:
    """How many tokens of each sequence are known from plans, by slot."""

    def __init__(self, num_slots: int) -> None:
        self._num_known: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)

    def read(self, plan: StepPlan) -> Column | None:
        """Learn the tokens that a plan has. Returns the rows for which it brings one; ``None`` for
        none. Raises ``RuntimeError`` if a row computes a token that no plan has brought."""
        known = self._num_known
        for seq in plan.new:
            known[seq.slot] = len(seq.token_ids)
        slots, starts, brought = plan.slots, plan.starts, None
        ends = starts + plan.counts
        if plan.drafts is not None:
            ends -= plan.drafts.counts
        if plan.new_token_ids is not None:
            brought = (plan.new_token_ids >= 0).nonzero()[0].astype(np.int32)
            self._check(plan, brought, starts <= known[slots])
            self._check(plan, brought, ends == starts + 1)
            known[slots[brought]] = starts[brought] + 1
        self._check(plan, slice(None), ends <= known[slots])
        if plan.drafts is not None:  # those that are accepted are never brought
            known[slots] = np.maximum(known[slots], ends + plan.drafts.counts)
        return brought

    def _check(self, plan: StepPlan, rows: Column | slice, is_right: NDArray[np.bool_]) -> None:
        wrong = np.flatnonzero(~is_right[rows])
        if wrong.size:
            slots, starts = plan.slots[rows], plan.starts[rows]
            slot, start = int(slots[wrong[0]]), int(starts[wrong[0]])
            raise RuntimeError(
                f"step {plan.step} computes position {start} of slot {slot}, of which plans have "
                f"brought {self._num_known[slot]} tokens: a stage computes only tokens that a plan "
                "has brought"
            )
