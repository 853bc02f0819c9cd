"""Structured output: requests wait for their grammar, and then follow it. No torch.

What a backend must offer is a ``GrammarCompiler``; no library is named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engine.errors import EngineError
from engine.messages.requests import AddRequest
from engine.messages.step import Column, MaskPart, Masks, StepPlan, StepResult
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.step_state import Step

WORD = 32  # tokens a word of a mask
RECENT = 4  # tokens that a tokenizer may look back at


class GrammarError(EngineError):
    """What is wrong with a grammar, or with how it went on."""


class Matcher(Protocol):
    """Follows one output through its grammar.

    End-of-text tokens are passed too; they are allowed where the grammar may end.
    """

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, from the first on. Changes nothing."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens, which are allowed."""

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        """Set the bits of what may follow, and of what may follow each of the drafts up to the
        first that is not allowed. Changes nothing else. Raises if the text cannot go on; where it
        only could not after a draft, no bit is set there.

        masks: [1 + drafts, words] int32, all zero; bit t % 32 of word t // 32 is token t.
        """

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        """At most this many tokens of the text that must follow, as the tokenizer would cut it
        after the recent tokens; empty where there is a choice. Changes nothing."""


class Compilation(Protocol):
    """A grammar that is being compiled."""

    def wait(self) -> Matcher:
        """What ``poll`` returns once it is done or late."""

    def poll(self) -> Matcher | None:
        """A matcher at the beginning of the grammar, ``None`` while it is being compiled.

        Raises with what is wrong if the grammar cannot be used.
        """


class GrammarCompiler(Protocol):
    """Compiles in the background; equal grammars need compiling once."""

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Compilation:
        """Begin to compile and return at once. May raise like ``Compilation.poll``.

        eos_token_ids: allowed where the grammar may end, and nowhere else.
        """

    def shutdown(self) -> None:
        """Let go of threads and memory."""


class CompiledAtOnce:
    """A ``GrammarCompiler`` for a run that is recorded: no request waits for its grammar, since
    when it is ready would differ in a replay."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Compilation:
        return Compiled(self._compiler.submit(grammar, eos_token_ids).wait())

    def shutdown(self) -> None:
        self._compiler.shutdown()


class Compiled:
    """A ``Compilation`` that is over."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def poll(self) -> Matcher:
        return self._matcher

    def wait(self) -> Matcher:
        return self._matcher


class GrammarsRefused(Resource):
    """Next to a plug-in that writes masks of its own, which know nothing of grammars."""

    name = "no grammar"
    serves = "grammar"

    def __init__(self, writer: str) -> None:
        """writer: the name of that plug-in."""
        self._writer = writer

    def objection(self, add: AddRequest) -> str | None:
        if not add.grammar:
            return None
        return (
            "structured_outputs is given, but which tokens are allowed is decided by the resource "
            f"{self._writer!r} alone: leave one of them out"
        )


def joined_by_grammars(resources: Sequence[Resource], grammars: Resource) -> tuple[Resource, ...]:
    """These resources with the one that serves grammars, unless one of them does; or with one that
    refuses them, where a plug-in writes masks."""
    writers = [resource for resource in resources if "masks" in resource.needs]
    if any(resource.serves == GrammarReadiness.serves for resource in resources):
        return tuple(resources)
    return (GrammarsRefused(writers[0].name) if writers else grammars, *resources)


class Tries:
    """When to ask what a request draws ahead of its mask: not for a while where that was of no use,
    twice as long each time. A model that follows the form is tried at each token."""

    MOST = 16  # tokens

    def __init__(self) -> None:
        self._wait = 0  # tokens, until it is called again
        self._next = 1  # the same, when it is of no use again

    def is_due(self) -> bool:
        """Called once a token."""
        self._wait -= 1
        return self._wait < 0

    def note(self, is_allowed: bool) -> None:
        if is_allowed:
            self._next = 1
        else:
            self._wait, self._next = self._next, min(2 * self._next, self.MOST)

    def resume(self) -> None:
        """Little is forbidden where it stands: within a string, say."""
        self._wait = 0


class Progress:
    """How far the grammar of a request is compiled, and how far its text has been followed."""

    def __init__(self) -> None:
        self.compilation: Compilation | None = None
        self.fault = ""  # what is wrong with the grammar
        self.matcher: Matcher | None = None
        self.num_followed = 0  # output tokens that the matcher has gone through
        self.tries = Tries()
        self.is_parked = False

    def has_compiled(self) -> bool:
        """Whether the compilation has ended, successfully or not."""
        assert self.compilation is not None
        try:
            self.matcher = self.compilation.poll()
        except Exception as error:  # whatever a backend raises
            self.fault = str(error)
        return self.matcher is not None or bool(self.fault)


class GrammarReadiness(Resource):
    """Compiles the grammars of requests as they come; those not ready are out of the queue.

    A grammar that is wrong, or a token that its own refuses, ends one request with an error. What
    may come next depends on the last token: the forward pass of the next step is launched before
    that is known, and its masks are made when it is.
    """

    name = "grammar"
    serves = "grammar"
    needs = ("masks",)
    on_refuse = OnRefuse.PARK

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // WORD)
        self._many = vocab_size // 4  # tokens that a mask allows: what is drawn next may be right
        self._progress: dict[str, Progress] = {}  # by request id, while it is unfinished
        self._compiling: dict[str, Progress] = {}
        self._broken: dict[str, str] = {}  # request id -> why no mask could be made
        self._allowed: dict[str, int] = {}  # tokens drawn ahead, of the step that waits for masks
        self._by_id: tuple[dict[str, Any], ...] = (
            *(self._progress, self._compiling, self._broken, self._allowed),
        )
        self._by_row: dict[int, Request] = {}

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler

    def added(self, req: Request) -> None:
        if req.add.grammar is None:
            return
        self._by_row[req.row] = req
        own = self._progress[req.request_id] = Progress()
        try:
            own.compilation = self._compiler.submit(req.add.grammar, req.add.eos_token_ids)
        except Exception as error:  # whatever a backend raises
            own.fault = str(error)
        else:
            self._compiling[req.request_id] = own

    def watches(self, req: Request) -> bool:
        """Never: a request that runs has its compiled grammar."""
        return False

    def begin_step(self, step: Step) -> None:
        for request_id, own in list(self._compiling.items()):
            if not own.has_compiled():
                continue
            del self._compiling[request_id]
            if own.is_parked:
                own.is_parked = False
                self._scheduler.wake(request_id)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if req.add.grammar is None:
            return Fit(num_tokens)
        own = self._progress[req.request_id]
        if own.fault:
            message = f"the grammar cannot be used: {own.fault}"
            return Fit(0, message, OnRefuse.FAIL, code="invalid_grammar")
        return Fit(0 if own.matcher is None else num_tokens)

    def parked(self, req: Request) -> None:
        self._progress[req.request_id].is_parked = True

    def release(self, req: Request) -> None:
        """A preempted request goes on later from the tokens it has."""
        if req.is_finished:
            self._by_row.pop(req.row, None)
            for by_id in self._by_id:
                by_id.pop(req.request_id, None)

    def describe(self, plan: StepPlan) -> None:
        if own := self._own_rows(plan, plan.samples):
            rows = np.array([index for index, _ in own], dtype=np.int32)
            plan.masks = MaskPart(rows, self._ahead(own))

    def masks(self, plan: StepPlan) -> Masks:
        """A mask takes twenty times as long as a look whether one token is allowed, so none is
        made where what is drawn without one is. Nobody reads what is drawn of a request that has
        ended."""
        drafts = [[]] * len(plan.rows) if plan.drafts is None else plan.drafts.by_row()
        owners = self._in_need_of_masks(plan)
        num_masks = len(owners) + sum(len(drafts[index]) for index in owners)
        words: Column = np.zeros((num_masks, self._num_words), dtype=np.int32)
        first = 0
        for index, req in owners.items():
            end = first + 1 + len(drafts[index])
            self._fill(req, words[first:end], drafts[index])
            if int(np.bitwise_count(words[first].view(np.uint32)).sum()) >= self._many:
                self._progress[req.request_id].tries.resume()
            first = end
        rows = np.array([*owners], dtype=np.int32)
        return Masks(words.reshape(-1), self._num_words, rows)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """A new token that is refused becomes the row's error. Matchers go on when the tokens
        stand: another resource may have the row computed again."""
        if not self._by_row:
            return
        ends = np.cumsum(result.counts)
        if self._broken and plan.masks is not None:
            self._report_broken(plan, result)
        for index, req in self._own_rows(plan, result.counts):
            first = int(ends[index] - result.counts[index])
            tokens = result.token_ids[first : ends[index]].tolist()
            is_known = tokens == [self._allowed.pop(req.request_id, None)]
            if not is_known and (refusal := self._refusal(req, tokens)):
                result.fail(index, refusal)

    def shutdown(self) -> None:
        self._compiler.shutdown()

    def num_allowed(self, req: Request, drafts: Sequence[int]) -> int:
        """How many of these drafts the request's grammar would let pass: none if that is not
        known; the mask or the next token then gives the reason."""
        if not self._is_followed(req):
            return len(drafts)
        try:
            return self._caught_up(req).num_allowed(drafts)
        except Exception:  # whatever a backend raises
            return 0

    def forced(self, req: Request, most: int) -> Sequence[int]:
        """Tokens that the request's grammar leaves no choice about, at most this many. The model
        may cut the same text into other tokens, so they are drafts."""
        if not self._is_followed(req):
            return ()
        try:
            return self._caught_up(req).forced(req.tokens[-RECENT:].tolist(), most)
        except Exception:  # whatever a backend raises: the mask or the next token says why
            return ()

    # -- helpers

    def _is_followed(self, req: Request) -> bool:
        own = self._progress.get(req.request_id)
        return own is not None and own.matcher is not None

    def _own_rows(self, plan: StepPlan, counts: Column) -> list[tuple[int, Request]]:
        """Rows of requests with a grammar that draw or have drawn something, and the requests.
        The others of the step are passed over together."""
        if not self._by_row:
            return []
        own = np.isin(plan.rows, np.fromiter(self._by_row, np.intp, len(self._by_row)))
        places = np.flatnonzero(own & (counts > 0)).tolist()
        found = ((index, self._owner(plan, index)) for index in places)
        return [(index, req) for index, req in found if req is not None]

    def _ahead(self, own: Sequence[tuple[int, Request]]) -> Column | None:
        """The rows to ask for a token ahead of its mask: all but those of whom few are allowed."""
        found = [i for i, req in own if self._progress[req.request_id].tries.is_due()]
        return np.array(found, dtype=np.int32) if found else None

    def _in_need_of_masks(self, plan: StepPlan) -> dict[int, Request]:
        """Their requests by row of the plan. Takes note of the others' tokens."""
        part = plan.masks
        assert part is not None, "no row of this plan is masked"
        owners = {index: self._owner(plan, index) for index in part.rows.tolist()}
        found = {index: req for index, req in owners.items() if req is not None}
        self._allowed.clear()
        if part.ahead is None or part.drawn is None:
            return found
        for index, token in zip(part.ahead.tolist(), part.drawn.tolist(), strict=True):
            if token < 0 or index not in found:
                continue
            req = found[index]
            is_allowed = self.num_allowed(req, [token]) == 1
            self._progress[req.request_id].tries.note(is_allowed)
            if is_allowed:
                self._allowed[req.request_id] = token
                del found[index]
        return found

    def _owner(self, plan: StepPlan, index: int) -> Request | None:
        """The request with a grammar that a row of the plan belongs to, still."""
        row = int(plan.rows[index])
        req = self._by_row.get(row)
        if req is None or req.table.generation.at[row] != plan.generations[index]:
            return None
        return req

    def _fill(self, req: Request, masks: Column, drafts: Sequence[int]) -> None:
        try:
            self._caught_up(req).fill(masks, drafts)
        except Exception as error:  # whatever a backend raises
            self._broken[req.request_id] = f"the grammar cannot be followed: {error}"
            masks[:] = 0

    def _report_broken(self, plan: StepPlan, result: StepResult) -> None:
        """The worker knows only that nothing was allowed."""
        assert plan.masks is not None
        for index in plan.masks.rows.tolist():
            req = self._owner(plan, index)
            if req is not None and (why := self._broken.get(req.request_id)):
                result.fail(index, why, "invalid_grammar")

    def _caught_up(self, req: Request) -> Matcher:
        """Its matcher, after all tokens that are known. Raises for one that it refuses."""
        own = self._progress[req.request_id]
        assert own.matcher is not None, "nothing is drawn before the grammar is compiled"
        if tokens := req.tokens[req.num_prompt + own.num_followed :].tolist():
            own.matcher.advance(tokens)
            own.num_followed += len(tokens)
        return own.matcher

    def _refusal(self, req: Request, tokens: list[int]) -> str | None:
        """Why one of the tokens, up to one that may end the text, is wrong."""
        ends = [place for place, token in enumerate(tokens, 1) if token in req.stop_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        try:
            allowed = self._caught_up(req).num_allowed(tokens)
        except Exception as error:  # whatever a backend raises
            return f"the grammar cannot be followed: {error}"
        if allowed == len(tokens):
            return None
        place = req.num_output + allowed
        return f"token {tokens[allowed]} at output {place} is not what the grammar allows"
