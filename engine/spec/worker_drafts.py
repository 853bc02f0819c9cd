"""WorkerDrafts: drafts that the worker proposes, such as those of a draft model.

    describe      writes into ``plan.proposals`` how many drafts to propose for each request
    settle        takes the proposed drafts from the step's result
    begin_step    makes them the drafts of the request's next step

A request that gets drafts is in one step at a time, since drafts follow that step's token."""

from __future__ import annotations

import numpy as np

from engine.messages.step import Column, StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.step_state import Step, num_draft_places
from engine.spec.decide import Cut, Drafts, NoProposer, is_due, keep_all
from engine.spec.payoff import Payoff
from engine.spec.worth import Worth


class WorkerDrafts(Drafts):
    """Adds drafts that the worker proposes to each decode. For arguments, see ``Drafts``."""

    needs = (*Drafts.needs, "proposals")

    def __init__(
        self,
        num_speculative_tokens: int,
        cut: Cut = keep_all,
        worth: Worth | None = None,
        payoff: Payoff | None = None,
    ) -> None:
        super().__init__(num_speculative_tokens, NoProposer(), cut, worth, payoff)
        self._made: dict[int, tuple[int, list[int]]] = {}  # by row: its generation, the drafts
        self._wishing: set[int] = set()  # rows for which the worker proposes drafts
        self._has_prefill = False  # True if the step being planned computes prompt tokens

    def begin_step(self, step: Step) -> None:
        self._has_prefill = False
        super().begin_step(step)

    def _propose(self) -> None:
        """Give each request with new tokens its drafts: tokens that its grammar forces, or else
        those that the worker has proposed."""
        while self._moved:
            if (req := self._running.get(self._moved.pop())) is None:
                continue
            generation, made = self._made.pop(req.row, (None, []))
            if req.table.generation.at[req.row] != generation:
                made = []
            drafts = self._forced_of(req, tries=True).drafts or made[: self.num_speculative_tokens]
            self._proposed[req.row] = drafts
            self._set_drafting(req, len(drafts) > 0 or req.row in self._wishing)

    def extra(self, req: Request, step: Step) -> int:
        """Return how many drafts to verify after the request's next token. A new request with one
        token left to compute gets padding as drafts, since all decodes of a step with drafts have
        the same shape."""
        if not req.is_waiting:
            return super().extra(req, step)
        if req.num_pending or self._has_prefill or not self._drafting:
            return 0
        if not (step.has_running or self._scheduler.view.start_of(req) > 0):
            return 0
        return min(self.num_speculative_tokens, self._room(req))

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        super().take(req, num_tokens, step)
        self._has_prefill |= num_tokens - num_draft_places(req) > 1

    def release(self, req: Request) -> None:
        self._wishing.discard(req.row)
        self._made.pop(req.row, None)
        super().release(req)

    def describe(self, plan: StepPlan) -> None:
        plan.proposals = self.wanted(plan)
        if plan.proposals is not None:
            for row in plan.rows[plan.proposals > 0].tolist():
                self._wishing.add(row)
                self._set_drafting(self._running[row], True)
        super().describe(plan)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        super().settle(plan, result)
        if result.drafts is not None:
            columns = (plan.rows.tolist(), plan.generations.tolist(), result.drafts.by_row())
            for row, generation, drafts in zip(*columns, strict=True):
                if row in self._running:
                    self._made[row] = generation, drafts
        if plan.proposals is not None:
            self._wishing.difference_update(plan.rows[plan.proposals > 0].tolist())

    # -- helpers

    def wanted(self, plan: StepPlan) -> Column | None:
        """Return how many drafts the worker shall propose for each row of the plan. ``None``: no
        drafts, and the draft model need not compute the step's tokens."""
        useful = self._useful(plan)
        # Zeros let the draft model compute a prompt's tokens now, not all of them later.
        nothing = None if plan.samples.all() else useful * 0
        if self._worth is None or self._payoff is None:
            return useful if useful.any() else nothing
        load = self._payoff.load(len(self._running))
        if not load.may_draft():
            return None
        wanted, expected, tries = np.zeros_like(useful), 0.0, load.may_try()
        price = load.price() or self._price_of_a_draft()
        for index in np.flatnonzero(useful).tolist():
            req = self._running.get(int(plan.rows[index]))
            if req is not None and is_due(self._worth, req, tries):
                wanted[index] = self._worth.num_to_verify(req, range(useful[index]), price)
                expected += self._worth.expect(req, int(wanted[index]))[1]
        # A try makes two steps more expensive: one proposes drafts, the next verifies them.
        if wanted.any() and load.is_worth(expected, num_steps=2):
            return wanted
        return nothing if tries else None

    def _useful(self, plan: StepPlan) -> Column:
        """How many drafts each row of the plan can use within its request's length limit."""
        useful: Column = plan.samples * np.int32(self.num_speculative_tokens)
        for index in np.flatnonzero(useful).tolist():
            req = self._running.get(int(plan.rows[index]))
            # This step yields at least one token.
            left = 0 if req is None else req.max_total - req.num_tokens - req.num_pending - 1
            useful[index] = max(0, min(useful[index], left))
        return useful
