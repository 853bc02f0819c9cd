"""Headroom: blocks that are left free when a waiting request starts, if that is worth it.

If a request starts while too few blocks are free, a running one is soon preempted and must compute
all its tokens again. If it is held back instead, it waits for some steps. Which of the two costs
more follows from the cost model: where steps take equally long whatever they compute, recomputing
costs nothing, and no request is held back.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.sched.predict.cost import LinearCost

LEARNING_STEPS = 50  # that are measured before the model is called
LOOK_EVERY = 64
HELD_STEPS = 1.5  # steps whose fixed cost a held-back request adds, on average
NUM_ERRORS = 2.0  # standard errors on either side of the estimate


class Judgement(NamedTuple):
    """A decision made from measured steps. It depends on the rounding of floats, so a step log
    records it, and a replay repeats it."""

    step: int  # that was being planned
    is_kept: bool


class Headroom:
    """Judges from the cost model whether headroom is kept.

    Until the model has seen ``learning_steps``, and while its interval contains both answers, none
    is: what fits may start. An answer is in force for ``look_every`` steps.
    """

    def __init__(
        self, *, learning_steps: int = LEARNING_STEPS, look_every: int = LOOK_EVERY
    ) -> None:
        self.is_kept = False
        self.judgements: deque[Judgement] = deque(maxlen=16)  # since they were taken
        self.expected: dict[int, bool] = {}  # what a log says was judged, by step
        self._learning_steps = learning_steps
        self._look_every = look_every
        self._next_look = 0

    def is_due(self, step: int) -> bool:
        """Is it time to judge again?"""
        return step >= self._next_look

    def judge(self, step: int, cost: LinearCost, num_tokens: float) -> None:
        """Does recomputing the tokens of a running request cost more than holding one back?"""
        num_missing = self._learning_steps - cost.num_observed
        self._next_look = step + (num_missing if num_missing > 0 else self._look_every)
        is_kept = self.expected.pop(step, None)
        if is_kept is None:
            pairs = num_tokens * (num_tokens + 1) / 2
            gain, error = cost.combine((-HELD_STEPS, 0.0, num_tokens, 0.0, pairs))
            is_kept = num_missing <= 0 and gain > NUM_ERRORS * error
        self.is_kept = is_kept
        self.judgements.append(Judgement(step, is_kept))

    def take(self) -> list[Judgement]:
        """Judgements since the last call."""
        judgements = list(self.judgements)
        self.judgements.clear()
        return judgements
