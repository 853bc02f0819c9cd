"""Drafts: the resource that adds draft tokens to decodes, which the model verifies.

    begin_step    calls the proposer for requests with new tokens
    extra         returns the number of drafts to verify after a request's next token
    describe      writes the drafts into ``plan.drafts``
    settle        counts the accepted drafts

A request with drafts is in only one step at a time, while other requests may be in several. A
request that is to get drafts while one of its steps runs waits for the token of that step; then the
proposer is called. See also `worker_drafts`."""

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
from engine.messages.step import PADDING, DraftPart, StepPlan, StepResult
from engine.sched.plugins.answers import raised, shown
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Resource
from engine.sched.step_state import Step, num_draft_places
from engine.spec.payoff import DraftStepKind, Payoff
from engine.spec.worth import Worth

MOST_TOKEN = 2**31 - 1  # the largest value of a column

Cut = Callable[[Request, Sequence[int]], int]
Forced = Callable[[Request, int], Sequence[int]]
# Assumed share of right forced drafts before any was verified: models may split the text otherwise.
FORCED = 0.8


class Proposer(Protocol):
    """Proposes draft tokens for a request from its prompt and output tokens."""

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        """Return at most ``num_tokens`` token ids, perhaps none, that may follow ``req.tokens``."""
        ...

    def release(self, req: Request) -> None:
        """Drop the state of a request that has ended."""
        ...


def keep_all(req: Request, drafts: Sequence[int]) -> int:
    """Default for ``cut`` of ``Drafts``, without grammars: all drafts are allowed."""
    return len(drafts)


def none_forced(req: Request, num_tokens: int) -> Sequence[int]:
    """Default for ``forced`` of ``Drafts``, without grammars: no token is forced."""
    return ()


class NoProposer:
    """A proposer that proposes nothing: only tokens that a grammar forces become drafts."""

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        return ()

    def release(self, req: Request) -> None:
        """Nothing to drop."""


class Offer(NamedTuple):
    """Drafts for a request, the number of tokens they are expected to yield, and why the proposer
    failed ("" if it did not)."""

    drafts: Sequence[int]
    expected: float = 0.0
    fault: str = ""


NO_OFFER = Offer(())


def is_due(worth: Worth | None, req: Request, tries: bool) -> bool:
    """Whether the request may get drafts now. tries: try again even if its last drafts were not
    worth verifying."""
    return worth is None or not (worth.is_resting(req) or (worth.has_rested(req) and not tries))


def is_token(value: object) -> bool:
    """Whether a value is an integer that can be a token id."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return 0 <= int(value) <= MOST_TOKEN


@dataclass(slots=True)
class DraftStats:
    """Counts of drafts since the start. ``num_drafts``: each request with drafts in a step counts
    one. ``num_accepted_tokens_per_pos[i]``: accepted drafts at index i of a request's drafts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def add(self, num_proposed: NDArray[np.int32], num_right: NDArray[np.int32]) -> None:
        """Count one step. num_proposed, num_right: drafts and right drafts of each request."""
        self.num_drafts += len(num_proposed)
        self.num_draft_tokens += int(num_proposed.sum())
        self.num_accepted_tokens += int(num_right.sum())
        for place in range(len(self.num_accepted_tokens_per_pos)):
            self.num_accepted_tokens_per_pos[place] += int(np.count_nonzero(num_right > place))


class Drafts(Resource):
    """Adds up to ``num_speculative_tokens`` draft tokens to each decode.

    A request with drafts is in one step at a time, because only the step's result shows how many
    tokens the request has. ``cut``: returns how many leading drafts the request's grammar allows.
    ``worth``: chooses how many drafts to verify (``None``: all). ``payoff``: decides whether a step
    has drafts (``None``: always). Raises ``ConfigError`` for an invalid
    ``num_speculative_tokens``."""

    name = "drafts"
    needs: tuple[str, ...] = ("drafts",)

    def __init__(
        self,
        num_speculative_tokens: int,
        proposer: Proposer,
        cut: Cut = keep_all,
        worth: Worth | None = None,
        payoff: Payoff | None = None,
    ) -> None:
        check_kind("num_speculative_tokens", num_speculative_tokens, (int,))
        if not 0 <= num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens is {num_speculative_tokens}, must be from 0 (no drafts) "
                f"to {MAX_DRAFTS}"
            )
        self.num_speculative_tokens = num_speculative_tokens
        self.stats = DraftStats(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)
        self._proposer = proposer
        self.cut = cut
        self.forced: Forced = none_forced
        self._worth_of_forced = None if worth is None else Worth(num_speculative_tokens, FORCED)
        self._are_forced: set[int] = set()  # rows whose drafts are forced by a grammar
        self._worth = worth
        self._payoff = payoff
        self._running: dict[int, Request] = {}  # by row
        self._moved: set[int] = set()  # rows with new tokens since the proposer was called
        self._drafting: set[int] = set()  # rows with drafts in a step, for the next step, or wanted
        self._proposed: dict[int, Sequence[int]] = {}  # drafts by row, for its next step
        self._taken: dict[int, list[int]] = {}  # drafts by row in the step being planned
        self._price: float | None = None  # price of a draft in the step being planned

    def follow_grammars(self, cut: Cut, forced: Forced) -> None:
        """Set functions that return the drafts a grammar allows, and the tokens that it forces."""
        self.cut, self.forced = cut, forced

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler

    def serializes(self, req: Request) -> bool:
        return req.row in self._drafting

    def watches(self, req: Request) -> bool:
        """Whether the request has drafts, in a step or for its next step, or waits for some."""
        return req.row in self._drafting

    def begin_step(self, step: Step) -> None:
        self._taken.clear()
        self._price = None
        if self._moved:
            self._propose()

    def extra(self, req: Request, step: Step) -> int:
        drafts = self._proposed.get(req.row)
        if not drafts or req.num_pending:
            return 0
        return min(self.cut(req, drafts), self._room(req))

    def seated(self, req: Request, step: Step) -> None:
        self._running[req.row] = req
        if self._payoff is not None:
            self._payoff.load(len(self._running)).add_credit(1.0)

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        drafts, num_places = self._proposed.pop(req.row, ()), num_draft_places(req)
        if num_places:
            self._taken[req.row] = list(drafts)[:num_places]

    def release(self, req: Request) -> None:
        self._running.pop(req.row, None)
        self._proposed.pop(req.row, None)
        self._moved.discard(req.row)
        self._are_forced.discard(req.row)
        self._set_drafting(req, False)
        if req.is_finished:
            self._proposer.release(req)
            for worth in (self._worth, self._worth_of_forced):
                if worth is not None:
                    worth.release(req)

    def describe(self, plan: StepPlan) -> None:
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
        # Requests that have ended since the plan was made get no more drafts.
        self._moved |= self._running.keys() & plan.rows[result.counts > 0].tolist()

    # -- helpers

    def _room(self, req: Request) -> int:
        """The most drafts that fit before the request reaches its maximum length."""
        return req.max_total - req.num_tokens - 1

    def _propose(self) -> None:
        """Call the proposer for every request that has new tokens.

        A request for which it fails gets no drafts until it has further tokens. Raises
        ``ValueError`` for the first failure, after processing all requests.
        """
        failed, expected, offered = "", 0.0, []
        load = None if self._payoff is None else self._payoff.load(len(self._running))
        may_draft = load is None or load.may_draft()
        tries = load is None or load.may_try()
        while self._moved:  # a row is removed before the proposer is called, which may raise
            if (req := self._running.get(self._moved.pop())) is None:
                continue
            offer = self._offer_of(req, tries) if may_draft else NO_OFFER
            if offer.fault:
                name = type(self._proposer).__name__
                failed = failed or f"{name}.propose, request {req.request_id}: {offer.fault}"
            if offer.drafts:
                self._proposed[req.row] = offer.drafts
                self._set_drafting(req, True)
                offered.append(req)
                expected += offer.expected
            else:
                self._forget(req)
        if offered and load is not None and not load.is_worth(expected):
            for req in offered:
                self._forget(req)
        if failed:
            raise ValueError(failed)

    def _offer_of(self, req: Request, tries: bool) -> Offer:
        """Return the tokens that the request's grammar forces; if there are none, drafts of the
        proposer. tries: also if the request's last drafts were not worth verifying."""
        if (offer := self._forced_of(req, tries=tries)).drafts:
            return offer
        if not is_due(self._worth, req, tries):
            return NO_OFFER
        drafts, fault = self._call(req)
        offer = self._judged(self._worth, req, drafts)
        return offer._replace(fault=fault) if fault else offer

    def _forced_of(self, req: Request, *, tries: bool) -> Offer:
        """The tokens forced by the request's grammar, as many as are worth drafting."""
        self._are_forced.discard(req.row)
        if not is_due(self._worth_of_forced, req, tries):
            return NO_OFFER
        if not (forced := list(self.forced(req, self.num_speculative_tokens))):
            return NO_OFFER
        if (offer := self._judged(self._worth_of_forced, req, forced)).drafts:
            self._are_forced.add(req.row)
        return offer

    def _judged(self, worth: Worth | None, req: Request, drafts: Sequence[int]) -> Offer:
        """Return the leading drafts of ``drafts`` that are worth verifying."""
        if not drafts:
            return NO_OFFER
        if worth is None:
            return Offer(drafts, float(len(drafts)))
        if self._price is None:
            self._price = self._price_of_a_draft()
        drafts = drafts[: worth.num_to_verify(req, drafts, self._price)]
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
        """Drop the drafts for the request's next step."""
        self._proposed.pop(req.row, None)
        self._set_drafting(req, False)

    def _price_of_a_draft(self) -> float:
        """The number of tokens that decodes would yield in the time that one more draft takes."""
        view = self._scheduler.view
        last, cost = view.last, view.cost
        num = max(1, last.num_seqs)
        alone = cost.step_seconds(num, num, last.context, last.context + num)
        attended = last.context + num + last.context // num
        more = cost.step_seconds(num, num + 1, last.context, attended)
        return num * (more - alone) / alone if alone > 0 else 0.0

    def _call(self, req: Request) -> tuple[list[int], str]:
        """Call the proposer. Returns its drafts, and why it failed ("" if it did not)."""
        most = self.num_speculative_tokens
        try:
            answer = self._proposer.propose(req, most)
            if not isinstance(answer, Iterable):
                return [], f"returns {shown(answer)}, must be token ids"
            tokens = list(islice(answer, most))
        except Exception as error:  # plug-in code
            return [], raised(error)
        for token in tokens:
            if not is_token(token):
                return [], (
                    f"returns {shown(tokens)}, must be token ids, integers from 0 to "
                    f"{MOST_TOKEN}, not {shown(token)}"
                )
        return [int(token) for token in tokens], ""

    def _set_drafting(self, req: Request, is_drafting: bool) -> None:
        if is_drafting != (req.row in self._drafting):
            (self._drafting.add if is_drafting else self._drafting.remove)(req.row)
            self._scheduler.watch_again(req)

    def _count(self, plan: StepPlan, part: DraftPart, result: StepResult) -> None:
        """Count the accepted drafts of a step, without padding and rows that have no result."""
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
