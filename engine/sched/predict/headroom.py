"""Headroom: decides whether to leave blocks free when a waiting request starts.

With too few free blocks a running request is soon preempted and computes its tokens again. If the
waiting request is held back instead, it waits for some steps. The cost model shows which costs
more.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.sched.predict.cost import LinearCost

LEARNING_STEPS = 50  # measured steps before the cost model is used
LOOK_EVERY = 64
HELD_STEPS = 1.5  # average number of steps that a held-back request adds
NUM_ERRORS = 2.0  # half width of the confidence interval, in standard errors


class Judgement(NamedTuple):
    """The decision for one step whether headroom is kept. It depends on measured times, so a step
    log records it for the replay."""

    step: int  # number of the step for which it was made
    is_kept: bool


class Headroom:
    """Decides by the cost model whether headroom (free blocks for running requests) is kept.

    Headroom is kept only after ``learning_steps`` measured steps, and only if it clearly saves
    time. A decision is valid for ``look_every`` steps."""

    def __init__(
        self, *, learning_steps: int = LEARNING_STEPS, look_every: int = LOOK_EVERY
    ) -> None:
        self.is_kept = False
        self.judgements: deque[Judgement] = deque(maxlen=16)  # since the last ``take``
        self.expected: dict[int, bool] = {}  # recorded decisions of a log, by step
        self._learning_steps = learning_steps
        self._look_every = look_every
        self._next_look = 0

    def is_due(self, step: int) -> bool:
        """True if a new decision must be made in this step."""
        return step >= self._next_look

    def judge(self, step: int, cost: LinearCost, num_tokens: float) -> None:
        """Decide whether to keep headroom (``is_kept``): whether computing ``num_tokens`` tokens of
        a preempted request again is expected to cost more time than delaying a waiting request."""
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
        """Return the decisions made since the last call of ``take``."""
        judgements = list(self.judgements)
        self.judgements.clear()
        return judgements
