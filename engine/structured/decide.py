"""Structured output: a request waits until its grammar is compiled, then its output must match it.

Imports neither torch nor a grammar library: a backend implements ``GrammarCompiler``.
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

WORD = 32  # tokens per mask word
RECENT = 4  # recent tokens that a tokenizer may need as context


class GrammarError(EngineError):
    """A grammar is invalid, or allows no further output."""


class Matcher(Protocol):
    """Matches the output of one request with its grammar.

    End-of-text tokens are passed too; they are allowed where the grammar may end.
    """

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first on, the grammar allows next. Changes nothing."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance over these output tokens. The grammar must allow all of them."""

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        """Set the bits of allowed tokens: mask i is for the token after the first i drafts. Masks
        after a draft that is not allowed stay empty. Raises if no token is allowed in mask 0; a
        later mask may be empty. Changes nothing else.

        masks: [1 + drafts, words] int32, all zero; bit t % 32 of word t // 32 is token t.
        """

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        """Return the next tokens, at most ``most``, if the grammar allows only one text; else
        empty. recent: the tokens before. Changes nothing."""


class Compilation(Protocol):
    """The compilation of one grammar, in progress or ended."""

    def wait(self) -> Matcher:
        """Block until compilation ends. Returns a new matcher, or raises as ``poll`` does."""

    def poll(self) -> Matcher | None:
        """Return a new matcher, or ``None`` while the grammar is still being compiled.

        Raises if the grammar is invalid or takes too long to compile.
        """


class GrammarCompiler(Protocol):
    """Compiles grammars in the background, and equal grammars only once."""

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Compilation:
        """Start to compile a grammar, without waiting. Raises like ``Compilation.poll``.

        eos_token_ids: tokens allowed only where the grammar may end.
        """

    def shutdown(self) -> None:
        """Release threads and memory."""


class CompiledAtOnce:
    """A ``GrammarCompiler`` that waits until each grammar is compiled, so that a recorded run and
    its replay start a request in the same step."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Compilation:
        return Compiled(self._compiler.submit(grammar, eos_token_ids).wait())

    def shutdown(self) -> None:
        self._compiler.shutdown()


class Compiled:
    """A ``Compilation`` that has ended with a matcher."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def poll(self) -> Matcher:
        return self._matcher

    def wait(self) -> Matcher:
        return self._matcher


class GrammarsRefused(Resource):
    """Refuses requests with a grammar, where a plug-in writes the token masks instead."""

    name = "no grammar"
    serves = "grammar"

    def __init__(self, writer: str) -> None:
        """writer: the name of the plug-in that writes the masks."""
        self._writer = writer

    def objection(self, add: AddRequest) -> str | None:
        if not add.grammar:
            return None
        return (
            "structured_outputs is given, but the resource "
            f"{self._writer!r} alone decides which tokens are allowed: leave one of them out"
        )


def joined_by_grammars(resources: Sequence[Resource], grammars: Resource) -> tuple[Resource, ...]:
    """Return the resources with ``grammars`` in front, unless one of them handles grammars already.
    If one of them writes masks, ``GrammarsRefused`` is put in front instead."""
    writers = [resource for resource in resources if "masks" in resource.needs]
    if any(resource.serves == GrammarReadiness.serves for resource in resources):
        return tuple(resources)
    return (GrammarsRefused(writers[0].name) if writers else grammars, *resources)


class EarlySampling:
    """Decides whether a request's next token is sampled before its mask is made.

    If the grammar allows the token, no mask is needed, and the next one is sampled early, too. If
    not, the next token waits for its mask; after refusals in a row, the next 2, 4, 8 or 16.
    """

    MOST = 16  # tokens to wait at most

    def __init__(self) -> None:
        self._wait = 0  # tokens until the next early one
        self._next = 1  # tokens to wait after the next refusal

    def is_due(self) -> bool:
        """Whether to sample the next token early. Call this once per token."""
        self._wait -= 1
        return self._wait < 0

    def record(self, is_allowed: bool) -> None:
        if is_allowed:
            self._next = 1
        else:
            self._wait, self._next = self._next, min(2 * self._next, self.MOST)

    def resume(self) -> None:
        """Sample early again, because the grammar allows most tokens here, as in a string."""
        self._wait = 0


class GrammarProgress:
    """The compilation of a request's grammar, and the output tokens matched so far."""

    def __init__(self) -> None:
        self.compilation: Compilation | None = None
        self.fault = ""  # why the grammar cannot be used
        self.matcher: Matcher | None = None
        self.num_followed = 0  # output tokens that the matcher has advanced past
        self.early = EarlySampling()
        self.is_parked = False

    def has_compiled(self) -> bool:
        """Whether compilation has ended, with a matcher or an error."""
        assert self.compilation is not None
        try:
            self.matcher = self.compilation.poll()
        except Exception as error:  # whatever a backend raises
            self.fault = str(error)
        return self.matcher is not None or bool(self.fault)


class GrammarReadiness(Resource):
    """Compiles the grammars of new requests, and makes the token masks of running ones.

    A request waits outside the queue until its grammar is compiled. It ends with an error if the
    grammar is invalid or does not allow a sampled token. A request's mask needs its last token, so
    it is made during the forward pass of the step that samples the next one.
    """

    name = "grammar"
    serves = "grammar"
    needs = ("masks",)
    on_refuse = OnRefuse.PARK

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // WORD)
        self._many = vocab_size // 4  # a mask with this many tokens allows most samples
        self._progress: dict[str, GrammarProgress] = {}  # by id of unfinished requests
        self._compiling: dict[str, GrammarProgress] = {}
        self._broken: dict[str, str] = {}  # request id -> why no mask could be made
        self._allowed: dict[str, int] = {}  # early tokens of the current step, by request id
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
        own = self._progress[req.request_id] = GrammarProgress()
        try:
            own.compilation = self._compiler.submit(req.add.grammar, req.add.eos_token_ids)
        except Exception as error:  # whatever a backend raises
            own.fault = str(error)
        else:
            self._compiling[req.request_id] = own

    def watches(self, req: Request) -> bool:
        """Return False: a running request has its compiled grammar, so no step must check it."""
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
        """Drop the state of a finished request. A preempted request keeps its matcher."""
        if req.is_finished:
            self._by_row.pop(req.row, None)
            for by_id in self._by_id:
                by_id.pop(req.request_id, None)

    def describe(self, plan: StepPlan) -> None:
        if own := self._own_rows(plan, plan.samples):
            rows = np.array([index for index, _ in own], dtype=np.int32)
            plan.masks = MaskPart(rows, self._ahead(own))

    def masks(self, plan: StepPlan) -> Masks:
        """Make the masks of this step. None is made for requests that have ended, and for those
        whose early token the grammar allows."""
        drafts = [[]] * len(plan.rows) if plan.drafts is None else plan.drafts.by_row()
        owners = self._in_need_of_masks(plan)
        num_masks = len(owners) + sum(len(drafts[index]) for index in owners)
        words: Column = np.zeros((num_masks, self._num_words), dtype=np.int32)
        first = 0
        for index, req in owners.items():
            end = first + 1 + len(drafts[index])
            self._fill(req, words[first:end], drafts[index])
            if int(np.bitwise_count(words[first].view(np.uint32)).sum()) >= self._many:
                self._progress[req.request_id].early.resume()
            first = end
        rows = np.array([*owners], dtype=np.int32)
        return Masks(words.reshape(-1), self._num_words, rows)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """End a request with an error if the grammar does not allow its new tokens."""
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
        """Return how many of the drafts, from the first on, the request's grammar allows. 0 if the
        matcher fails: the next mask or token check reports the error."""
        if not self._is_followed(req):
            return len(drafts)
        try:
            return self._caught_up(req).num_allowed(drafts)
        except Exception:  # whatever a backend raises
            return 0

    def forced(self, req: Request, most: int) -> Sequence[int]:
        """Return the next tokens, at most ``most``, of the only text that the grammar allows. They
        are drafts, since the model may tokenize the text differently."""
        if not self._is_followed(req):
            return ()
        try:
            return self._caught_up(req).forced(req.tokens[-RECENT:].tolist(), most)
        except Exception:  # whatever a backend raises: the mask or the next token reports it
            return ()

    # -- helpers

    def _is_followed(self, req: Request) -> bool:
        own = self._progress.get(req.request_id)
        return own is not None and own.matcher is not None

    def _own_rows(self, plan: StepPlan, counts: Column) -> list[tuple[int, Request]]:
        """Return (plan row, request) for requests that have a grammar and new tokens
        (``counts``)."""
        if not self._by_row:
            return []
        own = np.isin(plan.rows, np.fromiter(self._by_row, np.intp, len(self._by_row)))
        places = np.flatnonzero(own & (counts > 0)).tolist()
        found = ((index, self._owner(plan, index)) for index in places)
        return [(index, req) for index, req in found if req is not None]

    def _ahead(self, own: Sequence[tuple[int, Request]]) -> Column | None:
        """Return the plan rows whose next token is sampled before its mask; ``None`` for none."""
        found = [i for i, req in own if self._progress[req.request_id].early.is_due()]
        return np.array(found, dtype=np.int32) if found else None

    def _in_need_of_masks(self, plan: StepPlan) -> dict[int, Request]:
        """Return the requests that need a mask, by row of the plan. Requests whose early token the
        grammar allows need none. Records whether early tokens are allowed."""
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
            self._progress[req.request_id].early.record(is_allowed)
            if is_allowed:
                self._allowed[req.request_id] = token
                del found[index]
        return found

    def _owner(self, plan: StepPlan, index: int) -> Request | None:
        """Return the request in this row of the plan; ``None`` if it has ended or has no
        grammar."""
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
        """Replace the worker's error for an empty mask by the reason why the mask is empty."""
        assert plan.masks is not None
        for index in plan.masks.rows.tolist():
            req = self._owner(plan, index)
            if req is not None and (why := self._broken.get(req.request_id)):
                result.fail(index, why, "invalid_grammar")

    def _caught_up(self, req: Request) -> Matcher:
        """Return the request's matcher after all its output. Raises if it refuses a token."""
        own = self._progress[req.request_id]
        assert own.matcher is not None, "nothing is drawn before the grammar is compiled"
        if tokens := req.tokens[req.num_prompt + own.num_followed :].tolist():
            own.matcher.advance(tokens)
            own.num_followed += len(tokens)
        return own.matcher

    def _refusal(self, req: Request, tokens: list[int]) -> str | None:
        """Return why the grammar does not allow one of these tokens; ``None`` if it allows all of
        them up to the first stop token."""
        ends = [place for place, token in enumerate(tokens, 1) if token in req.stop_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        try:
            allowed = self._caught_up(req).num_allowed(tokens)
        except Exception as error:  # whatever a backend raises
            return f"the grammar cannot be followed: {error}"
        if allowed == len(tokens):
            return None
        place = req.num_output + allowed
        return f"the grammar does not allow token {tokens[allowed]} at output position {place}"
