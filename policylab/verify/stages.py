"""A worker whose model is split into stages, of which only the last one samples, and what must hold
of the steps that such a worker computes."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from engine.messages.step import StepPlan, StepResult
from engine.sched.interface import PauseState
from engine.sched.scheduler import Scheduler
from engine.worker.known_tokens import KnownTokens
from policylab.verify.check import FRUGAL_HOOKS
from policylab.verify.fake import FakeWork, LateWorker


class FirstStage:
    """Reads the tokens that each row of a plan computes, from plans only.

    It knows the tokens that a sequence starts with, and later ones as soon as a plan has them."""

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}  # by slot

    def start(self, slot: int, tokens: list[int]) -> None:
        """Learn the tokens of a sequence that starts to run in this slot."""
        self._known[slot] = list(tokens)

    def read(self, plan: StepPlan, work: list[FakeWork]) -> list[list[int]]:
        """The tokens of each row that are no drafts. Raises ``AssertionError`` if the stage knows
        one of them from no plan."""
        brought = [-1] * len(work) if plan.new_token_ids is None else plan.new_token_ids.tolist()
        assert len(brought) == len(work), "new_token_ids must have one entry per row"
        inputs = []
        for row, token in zip(work, brought, strict=True):
            known, end = self._known[row.new.slot], row.start + row.num_tokens - len(row.drafts)
            if token >= 0:
                assert end == row.start + 1, "a token is brought for a row that computes several"
                assert row.start <= len(known), f"position {len(known)} was brought by no plan"
                known[row.start :] = [token]
            assert end <= len(known), (
                f"step {plan.step} computes position {len(known)} of {row.new.request_id}, whose "
                "token no plan has brought"
            )
            inputs.append(known[row.start : end])
            if row.drafts:  # those that the last stage accepts are never brought
                known[end:] = row.drafts
        return inputs


MOST_SLOTS = 1 << 12  # of a simulated worker


class StagedWorker(LateWorker):
    """Computes each step from the tokens that its first stage hands on, when it is collected."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._first = FirstStage()
        self._known = KnownTokens(MOST_SLOTS)
        self._handed_on: deque[list[list[int]]] = deque()  # of steps that were not collected

    def launch(self, plan: StepPlan) -> StepResult:
        """Read the tokens of the step in the first stage."""
        ticket = super().launch(plan)
        for new in plan.new:
            self._first.start(new.slot, self.seqs[new.slot].tokens)
        work, _, _ = self._launched[-1]
        self._handed_on.append(self._first.read(plan, work))
        try:
            self._known.read(plan)
        except RuntimeError as error:
            raise AssertionError(f"real stages refuse the plan: {error}") from error
        return ticket

    def collect(self, ticket: StepResult) -> StepResult:
        """Compute the oldest step in the last stage."""
        work, _, _ = self._launched[0]
        for row, tokens in zip(work, self._handed_on.popleft(), strict=True):
            row.seq.tokens[row.start : row.start + len(tokens)] = tokens
        return super().collect(ticket)


class StagesCheck:
    """Checks which requests decode in the steps that stages compute at the same time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_stages = scheduler.config.pipeline_parallel_size
        self._sampled: deque[set[tuple[int, int]]] = deque()  # rows of each step in flight
        self._num_rescued = 0  # steps that were planned again

    def planned(self, plan: StepPlan) -> None:
        """Check that the plan samples no token after one that a step in flight samples (invariant
        40), and that it has its share of the decodes (invariant 41)."""
        if self._num_stages == 1 or not plan.num_tokens:
            return
        pairs = zip(plan.rows.tolist(), plan.generations.tolist(), strict=True)
        rows = [pair for pair, samples in zip(pairs, plan.samples, strict=True) if samples]
        again = set(rows) & set().union(*self._sampled)
        assert not again, f"rows {again} are sampled in two steps in flight"
        self._check_share(plan)
        self._sampled.append(set(rows))

    def settled(self, plan: StepPlan) -> None:
        """Note that the result of the oldest step has arrived."""
        if self._num_stages > 1 and plan.num_tokens:
            self._sampled.popleft()

    def _check_share(self, plan: StepPlan) -> None:
        scheduler, step = self._scheduler, self._scheduler.view.step
        table, members = scheduler.roster.table, scheduler.resources.members
        before, self._num_rescued = self._num_rescued, scheduler.settler.counters.num_rescued_steps
        # A request has ended, or was preempted at first, after the step's share was set.
        if scheduler.settler.has_ended or self._num_rescued > before:
            return
        own = int(np.count_nonzero(table.has_output.all[plan.rows]))
        planned, flying = set(plan.rows.tolist()), set().union(*self._sampled)
        left = num_flying = 0
        for req in scheduler.roster.running:
            if (req.row, int(table.generation.at[req.row])) in flying:
                goes_on = req.num_tokens + req.num_pending < req.max_total
                num_flying += bool(table.has_output.at[req.row] or goes_on)
            elif req.row not in planned:
                left += table.has_output.at[req.row]
        num_decodes = own + left + num_flying
        most = -(-(num_decodes + len(step.preempted)) // self._num_stages)
        assert own <= most, f"{own} of {num_decodes} decodes are in a step, more than {most}"
        is_free = len(members) == 1 and not scheduler.guard.overrides(*FRUGAL_HOOKS)
        is_free = is_free and scheduler.pause_state is PauseState.UNPAUSED
        is_short = step.short or step.preempted or step.tokens_left <= 0
        if left and is_free and not is_short and not scheduler.guard.waiting_may_preempt:
            least = num_decodes // self._num_stages
            assert own >= least, f"{own} of {num_decodes} decodes are in a step, {left} are left"
