"""Drafts: guessed tokens that a decode verifies next to its own.

    settle        tokens are known: a proposer may be called again
    begin_step    the proposer is called; a request with drafts is watched and serial
    extra         a decode asks for as many places as it has drafts
    describe      plan.drafts
    settle        count the accepted drafts; the others are rolled back

Where a worker proposes (``result.drafts``), it does so for all rows, and none is in two steps at a
time. A ``Proposer`` sees only tokens that are known: a request without drafts keeps as many steps
in flight as any other. If it finds drafts while a step of the request is in flight, the request
waits for that step's token, and the proposer is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config.check import check_kind
from engine.config.speculative import MAX_DRAFTS
from engine.errors import ConfigError
from engine.messages.step import PADDING, Column, DraftPart, StepPlan, StepResult
from engine.sched.plugins.answers import raised, shown
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Resource
from engine.sched.step_state import Step, num_draft_places
from engine.spec.payoff import DraftStepKind, Payoff
from engine.spec.worth import Worth

MOST_TOKEN = 2**31 - 1  # what a column can hold

Cut = Callable[[Request, Sequence[int]], int]
Forced = Callable[[Request, int], Sequence[int]]
FORCED = 0.8  # of a text without a choice, before any was verified: models may cut it otherwise


class Proposer(Protocol):
    """Guesses what follows the known tokens of a request, from these tokens alone."""

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        """At most this many token ids that may follow ``req.tokens``; empty if it has no guess."""
        ...

    def release(self, req: Request) -> None:
        """The request has ended: nothing need be kept of it."""
        ...


def keep_all(req: Request, drafts: Sequence[int]) -> int:
    """Every draft may be verified."""
    return len(drafts)


def none_forced(req: Request, num_tokens: int) -> Sequence[int]:
    """Every token has a choice."""
    return ()


class NoProposer:
    """Guesses nothing: only what a grammar forces is drafted."""

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        return ()

    def release(self, req: Request) -> None:
        """Nothing is kept."""


class WorkersProposals:
    """What the worker proposed with its last result for a row, while that is one request's."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[int, list[int]]] = {}  # generation of the row, tokens

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """A step has ended."""
        if result.drafts is None:
            return
        columns = zip(
            plan.rows.tolist(), plan.generations.tolist(), result.drafts.by_row(), strict=True
        )
        self._by_row.update({row: (generation, drafts) for row, generation, drafts in columns})

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        generation, drafts = self._by_row.pop(req.row, (None, []))
        return drafts[:num_tokens] if req.table.generation.at[req.row] == generation else []

    def release(self, req: Request) -> None:
        """The request has ended, or lost its place."""
        self._by_row.pop(req.row, None)


class Offer(NamedTuple):
    """Drafts of a request, the tokens they are expected to bring, and what is wrong with them."""

    drafts: Sequence[int]
    expected: float = 0.0
    fault: str = ""


NO_OFFER = Offer(())


def is_due(worth: Worth | None, req: Request, tries: bool) -> bool:
    """Are drafts of the request looked for? tries: also if nothing good is known of them."""
    return worth is None or not (worth.rests(req) or (worth.has_rested(req) and not tries))


def is_token(value: object) -> bool:
    """Can it be a token id of any vocabulary?"""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return 0 <= int(value) <= MOST_TOKEN


@dataclass(slots=True)
class DraftStats:
    """Statistics of drafting. A row with any drafts in a step counts as one of ``num_drafts``.

    ``num_accepted_tokens_per_pos[i]``: how often the draft at place i was right.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def add(self, num_proposed: NDArray[np.int32], num_right: NDArray[np.int32]) -> None:
        """The rows of one step that had drafts."""
        self.num_drafts += len(num_proposed)
        self.num_draft_tokens += int(num_proposed.sum())
        self.num_accepted_tokens += int(num_right.sum())
        for place in range(len(self.num_accepted_tokens_per_pos)):
            self.num_accepted_tokens_per_pos[place] += int(np.count_nonzero(num_right > place))


class Drafts(Resource):
    """Up to ``num_speculative_tokens`` drafts for each decode.

    What a drafting row will have computed is known when its step is settled, so it is in one step
    at a time. ``proposer``: makes drafts; ``None``: the worker does. ``cut`` says how many leading
    drafts of a request may be right: those its grammar allows; ``forced`` which tokens it leaves no
    choice about, which go before any proposal. ``worth`` chooses how many of a
    proposer's are verified; ``None``: all. ``payoff`` says whether a step is worth it; ``None``: it
    is. Raises ``ConfigError`` for a number that cannot be.
    """

    name = "drafts"
    needs: tuple[str, ...] = ("drafts",)

    def __init__(
        self,
        num_speculative_tokens: int,
        proposer: Proposer | None = None,
        cut: Cut = keep_all,
        worth: Worth | None = None,
        payoff: Payoff | None = None,
    ) -> None:
        check_kind("num_speculative_tokens", num_speculative_tokens, (int,))
        if not 0 <= num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens is {num_speculative_tokens}, must be in "
                f"0..{MAX_DRAFTS}; 0 asks for none"
            )
        self._workers: WorkersProposals | None = None
        if proposer is None and num_speculative_tokens:
            self.needs = (*self.needs, "proposals")  # of a worker that never has any: no drafts
            proposer = self._workers = WorkersProposals()
        self.num_speculative_tokens = num_speculative_tokens
        self.stats = DraftStats(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)
        self._proposer = proposer
        self.cut = cut
        self.forced: Forced = none_forced
        self._worth_of_forced = None if worth is None else Worth(num_speculative_tokens, FORCED)
        self._are_forced: set[int] = set()  # rows whose drafts are
        self._worth = worth
        self._payoff = payoff
        self._running: dict[int, Request] = {}  # by row
        self._moved: set[int] = set()  # rows whose tokens have grown since the proposer was called
        self._drafting: set[int] = set()  # rows with drafts, now, for the next step, or requested
        self._wishing: set[int] = set()  # rows whose drafts the worker is to make
        self._proposed: dict[int, Sequence[int]] = {}  # by row, for its next step
        self._taken: dict[int, list[int]] = {}  # drafts by row, in the step being planned
        self._price: float | None = None  # of a draft in the step being planned
        self._has_prefill = False  # the step being planned computes a part of a prompt

    def follow_grammars(self, cut: Cut, forced: Forced) -> None:
        """Let grammars decide which drafts may stand, and draft what they force."""
        self.cut, self.forced = cut, forced

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler

    def serializes(self, req: Request) -> bool:
        return req.row in self._drafting

    def watches(self, req: Request) -> bool:
        """True for requests with drafts; the others are planned like any decode."""
        return req.row in self._drafting

    def begin_step(self, step: Step) -> None:
        self._taken.clear()
        self._has_prefill = False
        self._price = None
        if not self._moved:
            return
        if self._workers is not None:
            self._take_up(self._workers)
        elif self._proposer is not None:
            self._propose(self._proposer)

    def extra(self, req: Request, step: Step) -> int:
        """A slot for each draft. Where the worker proposes, all decodes have the same shape: a new
        request with all but one token of its prompt cached has no drafts yet and is padded to that
        shape. So is a prompt of one token, next to decodes."""
        if req.num_pending:
            return 0
        room = req.max_total - req.num_tokens - 1
        if req.is_waiting:
            if self._workers is None:
                return 0
            is_decode = step.has_running or self._scheduler.view.start_of(req) > 0
            is_padded = is_decode and not self._has_prefill and len(self._drafting) > 0
            return min(self.num_speculative_tokens, room) if is_padded else 0
        drafts = self._proposed.get(req.row)
        return min(self.cut(req, drafts), room) if drafts else 0

    def seated(self, req: Request, step: Step) -> None:
        self._running[req.row] = req
        if self._payoff is not None:
            self._payoff.load(len(self._running)).lend(1.0)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        drafts, num_places = self._proposed.pop(req.row, ()), num_draft_places(req)
        if num_places:
            self._taken[req.row] = list(drafts)[:num_places]
        self._has_prefill |= num_tokens - num_places > 1

    def release(self, req: Request) -> None:
        self._running.pop(req.row, None)
        self._proposed.pop(req.row, None)
        self._moved.discard(req.row)
        self._wishing.discard(req.row)
        self._are_forced.discard(req.row)
        self._set_drafting(req, False)
        if self._workers is not None:  # made for where it stood
            self._workers.release(req)
        elif req.is_finished and self._proposer is not None:
            self._proposer.release(req)
        if req.is_finished:
            for worth in (self._worth, self._worth_of_forced):
                if worth is not None:
                    worth.release(req)

    def describe(self, plan: StepPlan) -> None:
        if self._workers is not None:
            self._wish(plan)
        if not self._taken:
            return
        by_row = [self._taken.get(row, []) for row in plan.rows.tolist()]
        plan.drafts = DraftPart(
            np.array([len(drafts) for drafts in by_row], dtype=np.int32),
            np.array([token for drafts in by_row for token in drafts], dtype=np.int32),
        )

    def counters(self) -> dict[str, int]:
        stats = self.stats
        by_place = enumerate(stats.num_accepted_tokens_per_pos)
        return {
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            **{f"num_accepted_tokens_per_pos.{place}": num for place, num in by_place if num},
        }

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        if plan.drafts is not None:
            self._count(plan, plan.drafts, result)
        if self._payoff is not None:
            self._measure(self._payoff, plan, result)
        if self._workers is not None:
            self._workers.take(plan, result)
            if plan.proposals is not None:
                self._wishing.difference_update(plan.rows[plan.proposals > 0].tolist())
        if self._proposer is not None:
            self._moved.update(plan.rows[result.counts > 0].tolist())

    # -- helpers

    def _propose(self, proposer: Proposer) -> None:
        """Ask about every request that has new tokens.

        One for which the proposer fails has no drafts and is looked at again when it has more.
        Raises ``ValueError`` for the first of these, when all others have been tried.
        """
        failed, expected, offered = "", 0.0, []
        load = None if self._payoff is None else self._payoff.load(len(self._running))
        asks = load is None or load.asks()
        tries = load is None or load.tries()
        while self._moved:  # removed before the proposer is called
            if (req := self._running.get(self._moved.pop())) is None:
                continue
            offer = self._offer_of(proposer, req, tries) if asks else NO_OFFER
            if offer.fault:
                name = type(proposer).__name__
                failed = failed or f"{name}.propose, request {req.request_id}: {offer.fault}"
            if offer.drafts:
                self._proposed[req.row] = offer.drafts
                self._set_drafting(req, True)
                offered.append(req)
                expected += offer.expected
            else:
                self._forget(req)
        if offered and load is not None and not load.takes(expected):
            for req in offered:
                self._forget(req)
        if failed:
            raise ValueError(failed)

    def _take_up(self, workers: WorkersProposals) -> None:
        """Drafts of every request that has new tokens: those that its grammar forces, or that the
        worker has made already, as many as were requested."""
        while self._moved:
            if (req := self._running.get(self._moved.pop())) is None:
                continue
            made = workers.propose(req, self.num_speculative_tokens)
            drafts = self._forced_of(req, tries=True).drafts or made
            self._proposed[req.row] = drafts
            self._set_drafting(req, len(drafts) > 0 or req.row in self._wishing)

    def _wish(self, plan: StepPlan) -> None:
        """Ask the worker for drafts. A row that is looked at is in no other step until then."""
        plan.proposals = self.wished(plan)
        if plan.proposals is None:
            return
        for row in plan.rows[plan.proposals > 0].tolist():
            self._wishing.add(row)
            self._set_drafting(self._running[row], True)

    def wished(self, plan: StepPlan) -> Column | None:
        """How many drafts the worker is to make after each row of this step; ``None``: it need
        not even compute what its drafts would follow."""
        useful = self._useful(plan)
        # A long prompt need not be gone through later.
        nothing = None if plan.samples.all() else useful * 0
        if self._worth is None or self._payoff is None:
            return useful if useful.any() else nothing
        load = self._payoff.load(len(self._running))
        if not load.asks():
            return None
        wished, expected, tries = np.zeros_like(useful), 0.0, load.tries()
        price = load.price() or self._price_of_a_draft()
        for index in np.flatnonzero(useful).tolist():
            req = self._running.get(int(plan.rows[index]))
            if req is not None and is_due(self._worth, req, tries):
                wished[index] = self._worth.num_worth(req, range(useful[index]), price)
                expected += self._worth.expect(req, int(wished[index]))[1]
        # A try is two dearer steps: one that makes drafts, and one that verifies them.
        if wished.any() and load.takes(expected, num_steps=2):
            return wished
        return nothing if tries else None

    def _useful(self, plan: StepPlan) -> Column:
        """Drafts that may be verified after each row of this step: none after the last token."""
        useful: Column = plan.samples * np.int32(self.num_speculative_tokens)
        for index in np.flatnonzero(useful).tolist():
            req = self._running.get(int(plan.rows[index]))
            # One token more is known after it, if no draft of this step is right.
            left = 0 if req is None else req.max_total - req.num_tokens - req.num_pending - 1
            useful[index] = max(0, min(useful[index], left))
        return useful

    def _offer_of(self, proposer: Proposer, req: Request, tries: bool) -> Offer:
        """Drafts of a request: what its grammar forces, or a proposal. tries: also of one of whose
        drafts nothing good is known."""
        if (offer := self._forced_of(req, tries=tries)).drafts:
            return offer
        if not is_due(self._worth, req, tries):
            return NO_OFFER
        drafts, fault = self._ask(proposer, req)
        offer = self._judged(self._worth, req, drafts)
        return offer._replace(fault=fault) if fault else offer

    def _forced_of(self, req: Request, *, tries: bool) -> Offer:
        """Drafts that its grammar forces."""
        self._are_forced.discard(req.row)
        if not is_due(self._worth_of_forced, req, tries):
            return NO_OFFER
        if not (forced := list(self.forced(req, self.num_speculative_tokens))):
            return NO_OFFER
        if (offer := self._judged(self._worth_of_forced, req, forced)).drafts:
            self._are_forced.add(req.row)
        return offer

    def _judged(self, worth: Worth | None, req: Request, drafts: Sequence[int]) -> Offer:
        """The drafts that are worth it."""
        if not drafts:
            return NO_OFFER
        if worth is None:
            return Offer(drafts, float(len(drafts)))
        if self._price is None:
            self._price = self._price_of_a_draft()
        drafts = drafts[: worth.num_worth(req, drafts, self._price)]
        return Offer(drafts, worth.expect(req, len(drafts))[1])

    def _measure(self, payoff: Payoff, plan: StepPlan, result: StepResult) -> None:
        num_drafts = num_places = num_wished = 0
        if plan.drafts is not None:
            num_places = int(plan.drafts.counts.sum())
            num_drafts = int(np.count_nonzero(plan.drafts.tokens != PADDING))
        if plan.proposals is not None:
            num_wished = int(plan.proposals.max(initial=0))
        now, is_busy = self._scheduler.view.now, len(self._running) > 0
        if plan.num_tokens - num_places > len(plan.rows) or result.errors:
            payoff.interrupted(now, is_busy=is_busy)
            return
        kind = DraftStepKind(has_drafts=num_drafts + num_wished > 0, num_wished=num_wished)
        payoff.settled(len(plan.rows), now, kind, is_busy=is_busy)

    def _forget(self, req: Request) -> None:
        """It has no drafts now."""
        self._proposed.pop(req.row, None)
        self._set_drafting(req, False)

    def _price_of_a_draft(self) -> float:
        """Tokens that the running decodes would bring in the time that one draft more takes."""
        view = self._scheduler.view
        last, cost = view.last, view.cost
        num = max(1, last.num_seqs)
        alone = cost.step_seconds(num, num, last.context, last.context + num)
        attended = last.context + num + last.context // num
        more = cost.step_seconds(num, num + 1, last.context, attended)
        return num * (more - alone) / alone if alone > 0 else 0.0

    def _ask(self, proposer: Proposer, req: Request) -> tuple[list[int], str]:
        """At most as many tokens as may be verified; or none, and the fault."""
        most = self.num_speculative_tokens
        try:
            answer = proposer.propose(req, most)
            if not isinstance(answer, Iterable):
                return [], f"returns {shown(answer)}, must be token ids"
            tokens = list(islice(answer, most))
        except Exception as error:  # plug-in code
            return [], raised(error)
        for token in tokens:
            if not is_token(token):
                return [], (
                    f"returns {shown(tokens)}, must be token ids, whole numbers from 0 to "
                    f"{MOST_TOKEN}, which {shown(token)} is not"
                )
        return [int(token) for token in tokens], ""

    def _set_drafting(self, req: Request, wish: bool) -> None:
        if wish != (req.row in self._drafting):
            (self._drafting.add if wish else self._drafting.remove)(req.row)
            self._scheduler.watch_again(req)

    def _count(self, plan: StepPlan, part: DraftPart, result: StepResult) -> None:
        """Count accepted drafts. Padding is not a draft, and rows without a result are left out."""
        num_real = np.concatenate([[0], np.cumsum(part.tokens != PADDING)])
        ends = np.cumsum(part.counts)
        proposed = num_real[ends] - num_real[ends - part.counts]
        counted = (proposed > 0) & (result.counts > 0)
        self.stats.add(proposed[counted], result.counts[counted] - 1)
        for index in np.flatnonzero(counted).tolist():
            row = int(plan.rows[index])
            req = self._running.get(row)
            if req is None or req.table.generation.at[row] != plan.generations[index]:
                continue
            num, num_right = int(proposed[index]), int(result.counts[index]) - 1
            req.history.count("drafts.num_drafts", 1)
            req.history.count("drafts.num_draft_tokens", num)
            req.history.count("drafts.num_accepted_tokens", num_right)
            worth = self._worth_of_forced if row in self._are_forced else self._worth
            if worth is not None:
                worth.count(req, num, num_right)
