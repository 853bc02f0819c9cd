"""Drafts: guessed tokens that a decode verifies beside its own.

settle    result.parts["drafts"]: row index -> tokens proposed behind those of this step
extra     a decode asks for as many slots as there are drafts
describe  plan.draft_counts, plan.draft_tokens
settle    how many were right; the others are computed in vain and rolled back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.messages.step import StepPlan, StepResult
from engine.sched.builder import PADDING, Step
from engine.sched.request import Request
from engine.sched.resource import Resource
from engine.sched.scheduler import Scheduler

Cut = Callable[[Request, Sequence[int]], int]


def keep_all(req: Request, drafts: Sequence[int]) -> int:
    """Every draft may be verified."""
    return len(drafts)


@dataclass(slots=True)
class DraftStats:
    """What drafting has brought. A row with any drafts in a step counts as one of ``num_drafts``.

    ``accepted_at[i]``: how often the draft at place i was right.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_proposed: NDArray[np.int32], num_accepted: NDArray[np.int32]) -> None:
        """The rows of one step that had drafts."""
        self.num_drafts += len(num_proposed)
        self.num_draft_tokens += int(num_proposed.sum())
        self.num_accepted += int(num_accepted.sum())
        for place in range(len(self.accepted_at)):
            self.accepted_at[place] += int(np.count_nonzero(num_accepted > place))


class Drafts(Resource):
    """Up to ``num_speculative_tokens`` drafts for each decode.

    What a drafting row will have computed is known when its step is settled, so it is in one step
    at a time. ``cut`` says how many leading drafts of a request are worth a try: those its grammar
    allows.
    """

    name = "drafts"

    def __init__(self, num_speculative_tokens: int, cut: Cut = keep_all) -> None:
        if num_speculative_tokens < 0:
            raise ConfigError(
                f"num_speculative_tokens is {num_speculative_tokens}, must not be negative"
            )
        self.num_speculative_tokens = num_speculative_tokens
        self.stats = DraftStats(accepted_at=[0] * num_speculative_tokens)
        self._cut = cut
        self._running: dict[int, Request] = {}  # by row
        self._watched: set[int] = set()  # rows with drafts in this step or for the next one
        self._proposed: dict[int, list[int]] = {}  # by row, for its next step
        self._taken: dict[int, list[int]] = {}  # by row, in the step being planned
        self._has_prefill = False  # the step being planned computes a part of a prompt

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def serializes(self, req: Request) -> bool:
        return self.num_speculative_tokens > 0

    def watches(self, req: Request) -> bool:
        """A decode without drafts is one like any other."""
        return req.row in self._watched

    def begin_step(self, step: Step) -> None:
        self._taken.clear()
        self._has_prefill = False

    def extra(self, req: Request, step: Step) -> int:
        """A slot for each draft. One that comes with all but a token of its prompt cached has none
        yet and is padded to the shape of decodes. So is a prompt of one token, beside decodes."""
        if req.num_pending:
            return 0
        room = req.max_total - req.num_tokens - 1
        if req.is_waiting:
            is_decode = step.has_running or self._scheduler.view.start_of(req) > 0
            is_padded = is_decode and not self._has_prefill
            return min(self.num_speculative_tokens, room) if is_padded else 0
        drafts = self._proposed.get(req.row)
        return min(self._cut(req, drafts), room) if drafts else 0

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        if not self.num_speculative_tokens:
            return
        self._running[req.row] = req
        drafts = self._proposed.pop(req.row, [])
        num_slots = max(0, req.num_computed - req.num_tokens)
        if num_slots:
            padding = [PADDING] * num_slots
            self._taken[req.row] = (drafts + padding)[:num_slots]
        self._has_prefill |= num_tokens - num_slots > 1

    def release(self, req: Request) -> None:
        self._running.pop(req.row, None)
        self._proposed.pop(req.row, None)
        self._watch(req, False)

    def describe(self, plan: StepPlan) -> None:
        if not self._taken:
            return
        by_row = [self._taken.get(row, []) for row in plan.rows.tolist()]
        plan.draft_counts = np.array([len(drafts) for drafts in by_row], dtype=np.int32)
        plan.draft_tokens = np.array([t for drafts in by_row for t in drafts], dtype=np.int32)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        if plan.draft_counts is not None:
            self._count(plan, result)
        proposals: dict[int, list[int]] = result.parts.get(self.name, {})
        if not (proposals or self._watched):
            return
        columns = zip(plan.rows.tolist(), plan.generations.tolist(), strict=True)
        for index, (row, generation) in enumerate(columns):
            req = self._running.get(row)
            if req is not None and req.table.generation.at[row] == generation:
                drafts = proposals.get(index, ())[: self.num_speculative_tokens]
                if drafts:
                    self._proposed[row] = list(drafts)
                self._watch(req, len(drafts) > 0)

    def _watch(self, req: Request, wish: bool) -> None:
        if wish != (req.row in self._watched):
            (self._watched.add if wish else self._watched.remove)(req.row)
            self._scheduler.watch_again(req)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        """Padding was no draft, and a row without a result says nothing about its drafts."""
        assert plan.draft_counts is not None and plan.draft_tokens is not None
        num_real = np.concatenate([[0], np.cumsum(plan.draft_tokens != PADDING)])
        ends = np.cumsum(plan.draft_counts)
        proposed = num_real[ends] - num_real[ends - plan.draft_counts]
        counted = (proposed > 0) & (result.counts > 0)
        self.stats.add(proposed[counted], result.counts[counted] - 1)
