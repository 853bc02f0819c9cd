"""Structured output: requests wait for their grammar, and then follow it. No torch.

What a backend must offer is a ``GrammarCompiler``; no library is named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.messages.step import StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.step.builder import Step


class Matcher(Protocol):
    """Follows one output through its grammar.

    End-of-text tokens are passed too; they are allowed where the grammar may end.
    """

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, from the first on. Changes nothing."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens, which are allowed."""


class Compilation(Protocol):
    """A grammar that is being compiled."""

    def poll(self) -> Matcher | None:
        """A matcher at the beginning of the grammar, ``None`` while it is being compiled.

        Raises with what is wrong if the grammar cannot be used.
        """


class GrammarCompiler(Protocol):
    """Compiles in the background; equal grammars need compiling once."""

    def submit(self, grammar: str) -> Compilation:
        """Begin to compile and return at once. May raise like ``Compilation.poll``."""


class GrammarReadiness(Resource):
    """Compiles the grammars of requests as they come; those not ready are out of the queue.

    A grammar that is wrong, or a token that its own refuses, ends one request with an error. What
    may come next depends on the last token, so a request with a grammar is in one step at a time.
    """

    name = "grammar"
    on_refuse = OnRefuse.PARK

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._compiling: dict[str, Compilation] = {}  # by request id
        self._faulty: dict[str, str] = {}  # request id -> what is wrong with its grammar
        self._matchers: dict[str, Matcher] = {}
        self._by_row: dict[int, Request] = {}
        self._parked: set[str] = set()

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler

    def added(self, req: Request) -> None:
        if req.add.grammar is None:
            return
        self._by_row[req.row] = req
        try:
            self._compiling[req.request_id] = self._compiler.submit(req.add.grammar)
        except Exception as error:  # whatever a backend raises
            self._faulty[req.request_id] = str(error)

    def watches(self, req: Request) -> bool:
        """Never: a request that runs has its compiled grammar."""
        return False

    def serializes(self, req: Request) -> bool:
        return req.add.grammar is not None

    def begin_step(self, step: Step) -> None:
        for request_id, compilation in list(self._compiling.items()):
            if self._is_over(request_id, compilation) and request_id in self._parked:
                self._parked.remove(request_id)
                self._scheduler.wake(request_id)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if req.add.grammar is None:
            return Fit(num_tokens)
        if what := self._faulty.get(req.request_id):
            return Fit(0, f"the grammar cannot be used: {what}", OnRefuse.FAIL)
        return Fit(num_tokens if req.request_id in self._matchers else 0)

    def parked(self, req: Request) -> None:
        self._parked.add(req.request_id)

    def release(self, req: Request) -> None:
        """A preempted request goes on later from the tokens it has."""
        if req.is_finished:
            self._by_row.pop(req.row, None)
            self._parked.discard(req.request_id)
            for by_id in (self._compiling, self._faulty, self._matchers):
                by_id.pop(req.request_id, None)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Follow the new tokens; one that is refused becomes the row's error."""
        if not self._matchers:
            return
        ends = np.cumsum(result.counts)
        for index in np.flatnonzero(result.counts > 0).tolist():
            row = int(plan.rows[index])
            req = self._by_row.get(row)
            if req is None or req.table.generation.at[row] != plan.generations[index]:
                continue
            first = int(ends[index] - result.counts[index])
            if refusal := self._follow(req, result.token_ids[first : ends[index]].tolist()):
                result.errors[index] = refusal

    def num_allowed(self, req: Request, drafts: Sequence[int]) -> int:
        """How many of these drafts the request's grammar would let pass."""
        matcher = self._matchers.get(req.request_id)
        return len(drafts) if matcher is None else matcher.num_allowed(drafts)

    # -- helpers

    def _is_over(self, request_id: str, compilation: Compilation) -> bool:
        """Has the compilation ended, successfully or not?"""
        try:
            matcher = compilation.poll()
        except Exception as error:  # whatever a backend raises
            self._faulty[request_id] = str(error)
        else:
            if matcher is None:
                return False
            self._matchers[request_id] = matcher
        del self._compiling[request_id]
        return True

    def _follow(self, req: Request, tokens: list[int]) -> str | None:
        """Advance by the tokens up to one that may end the text; why one of them is wrong."""
        ends = [place for place, token in enumerate(tokens, 1) if token in req.stop_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        matcher = self._matchers[req.request_id]
        try:
            allowed = matcher.num_allowed(tokens)
            if allowed == len(tokens):
                matcher.advance(tokens)
                return None
        except Exception as error:  # whatever a backend raises
            return f"the grammar cannot be followed: {error}"
        place = req.num_output + allowed
        return f"token {tokens[allowed]} at output {place} is not what the grammar allows"
