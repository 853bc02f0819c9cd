"""Simulated clients, which check that each gets the expected tokens once, and one end per request.

The answer depends on the request alone, not on chunks, cache, preemptions, other requests, drafts,
pipeline depth or policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from engine.messages.requests import AddRequest, CoreOutputs, Finished, Started
from engine.messages.step import NewSeq, StepPlan
from engine.messages.vectors import Vectors, as_vectors
from engine.sched.interface import StepOutputs
from engine.sched.request import Request
from policylab.verify.case import VOCAB_SIZE
from policylab.verify.fake import NONE_LEFT, digest_of, mix, pooled_after
from policylab.verify.halves import Guide, guided

DEAD_END = ("error", None)  # end of a text that its grammar does not allow to continue


@dataclass(slots=True)
class LiveRequest:
    """An unfinished request with its expected answer and what was received so far."""

    req: Request
    extras: dict[int, int]  # by position: what the model sees in addition to the token
    answer: list[int]
    end: tuple[str, int | None]  # reason and stop reason, unless it ends earlier
    fails: bool  # it reaches a position that fails
    fails_at: int | None
    hints: dict[str, Any] | None  # a copy of the original hints
    num_heard: int = 0
    num_cached: int | None = None  # cached tokens at its first start
    has_new_seat: bool = False  # started since its last output
    adapter: str | None = None  # the content for which the answer is expected
    pooled: Vectors | None = None  # the expected result of a pooled request
    num_results: int = 0


class Clients:
    """Checks the outputs of all requests. Raises ``AssertionError`` for an unexpected output.

    ``num_tokens_used``: the number of different tokens that the model generates. ``guide``: makes a
    matcher of a request's grammar."""

    def __init__(
        self,
        max_model_len: int,
        on_end: Callable[[LiveRequest], None],
        *,
        num_tokens_used: int = VOCAB_SIZE,
        guide: Callable[[AddRequest], Guide] | None = None,
    ) -> None:
        self.live: dict[str, LiveRequest] = {}
        self.num_accepted = 0
        self.num_followed = 0  # texts that followed their grammar to the end
        self._max_model_len = max_model_len
        self._on_end = on_end
        self._num_tokens_used = num_tokens_used
        self._guide = guide
        self.adapter_may_fail: Callable[[str], bool] = lambda request_id: False
        """True for a request with an adapter that may fail because of it."""
        self.media_may_fail: Callable[[str, Finished], bool] = lambda request_id, end: True
        """True for a request with media that may end so because of them."""
        self.loads_may_fail = False
        """Whether a request may end in error because its KV could not be loaded."""

    def accept(self, req: Request, fails_at: int | None, hints: dict[str, Any] | None) -> None:
        """Record a request that the scheduler accepted. ``fails_at``: the position at which the
        worker reports an error, if any. ``hints``: a copy of the request's hints, to detect
        changes."""
        add = req.add
        assert add.request_id not in self.live, f"{req} is accepted twice"
        live = LiveRequest(req, {}, [], ("length", None), False, fails_at, hints)
        self.live[add.request_id] = live
        self._expect(live, add.adapter)
        self.num_accepted += 1

    def use(self, request_id: str, adapter: str | None) -> None:
        """Record that a request starts to run with this content of its adapter, the same at each
        start."""
        live = self.live[request_id]
        assert live.req.adapter == adapter, f"{live.req}: hashed as {live.req.adapter!r}"
        if live.adapter != adapter:
            assert not live.num_heard, f"{live.req}: {live.adapter!r} became {adapter!r}"
            self._expect(live, adapter)

    def _expect(self, live: LiveRequest, adapter: str | None) -> None:
        """Compute the answer to a request with this adapter."""
        add = msgspec.structs.replace(live.req.add, adapter=adapter)
        guide = None if self._guide is None or add.grammar is None else self._guide(add)
        most = min(add.max_tokens, max(self._max_model_len - len(add.prompt_token_ids), 0))
        live.adapter, live.extras = adapter, extras_of(add)
        live.answer, live.end = answer_to(
            add, live.extras, most, num_tokens_used=self._num_tokens_used, guide=guide
        )
        last = len(add.prompt_token_ids) + len(live.answer) - 2  # the last token has no KV
        if add.pooling is not None:
            live.answer, live.end = [], ("stop", None)
            live.pooled = pooled_after(seen_by(add, live.extras), add.pooling)
            last = len(add.prompt_token_ids) - 1
        live.fails = live.fails_at is not None and live.fails_at <= last

    def answers(self, request_id: str) -> Sequence[int]:
        """The expected answer to an unfinished request, as token ids."""
        return self.live[request_id].answer

    def answer_if_alive(self, request_id: str) -> Sequence[int] | None:
        """The expected answer as token ids; ``None`` if the request has ended or is unknown."""
        live = self.live.get(request_id)
        return None if live is None else live.answer

    def content(self, new: NewSeq) -> list[int]:
        """The numbers that the fake model reads for a new sequence: its token ids, some increased
        by a number for salt, adapter or media."""
        tokens = list(new.token_ids)
        for position, extra in self.live[new.request_id].extras.items():
            tokens[position] += extra
        return tokens

    def watch(self, plan: StepPlan) -> None:
        """Record which requests start in this plan and, at their first start, their number of
        cached tokens."""
        if not plan.new:
            return
        starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        for new in plan.new:
            live = self.live[new.request_id]
            live.has_new_seat = True
            if live.num_cached is None:
                live.num_cached = starts[new.slot]

    def fail(self, new: NewSeq, upto: int) -> str | None:
        """The error message if the sequence should fail at a position below ``upto``; else
        ``None``."""
        live = self.live.get(new.request_id)  # it may have ended meanwhile
        if live is None or live.fails_at is None or upto <= live.fails_at:
            return None
        return "this position fails"

    def alive(self, ids: list[str] | None) -> list[Request]:
        """The requests with these ids (``None``: all) that the scheduler has not ended."""
        wanted = list(self.live) if ids is None else list(dict.fromkeys(ids))
        live = [self.live[name].req for name in wanted if name in self.live]
        return [req for req in live if not req.is_finished]

    def abort(self, reqs: Sequence[Request]) -> None:
        """Record that these requests were aborted; no output will report their end."""
        for req in reqs:
            self._end(req.request_id)

    def hear(self, outputs: StepOutputs, now: float) -> None:
        """Compare a step's outputs with the expected ones. ``now``: the clock's time in seconds."""
        for client, out in outputs.items():
            counts = out.counts or [1] * len(out.request_ids)
            assert len(counts) == len(out.request_ids) == len(set(out.request_ids)), "columns"
            assert sum(counts) == len(out.token_ids), "token columns"
            starts = {started.index: started for started in out.started}
            pooled = (
                {} if out.pooled is None else {row: each for row, *each in out.pooled.entries()}
            )
            place = 0
            for index, (name, count) in enumerate(zip(out.request_ids, counts, strict=True)):
                live = self._find(name, client)
                tokens = out.token_ids[place : place + count]
                place += count
                right = live.answer[live.num_heard : live.num_heard + count]
                assert tokens == right, f"{name}: {tokens} after {live.num_heard}, expected {right}"
                check_pooled(live, pooled.get(index))
                check_start(live, count > 0 or index in pooled, starts.get(index))
                live.num_heard += count
            self._hear_ends(out, now)

    def _hear_ends(self, out: CoreOutputs, now: float) -> None:
        for end in out.finished:
            name = out.request_ids[end.index]
            live = self.live[name]
            may_fail = live.req.adapter is not None and self.adapter_may_fail(name)
            may_fail |= bool(live.req.media) and self.media_may_fail(name, end)
            may_fail |= self.loads_may_fail and end.code == "kv_transfer_failed"
            check_end(live, end, now, may_fail=may_fail)
            is_whole = self._guide is not None and end.reason == "stop"
            self.num_followed += is_whole and live.req.add.grammar is not None
            self._end(name)

    def check_over(self) -> None:
        """Check that the end of every request was reported."""
        assert not self.live, f"no end was reported for {list(self.live)}"

    def _end(self, name: str) -> None:
        live = self.live.pop(name)
        assert live.req.is_finished, f"{live.req} is reported as ended, but is not finished"
        assert live.req.add.hints == live.hints, f"{live.req}: its hints were changed"
        check_waits(live.req)
        live.extras = extras_of(live.req.add)  # its adapter may be known only since it was sent
        self._on_end(live)

    def _find(self, name: str, client: int) -> LiveRequest:
        live = self.live.get(name)
        assert live is not None, f"{name}: an output for a request that is not live"
        assert live.req.add.client_index == client, f"{name}: sent to the wrong client"
        return live


def check_pooled(live: LiveRequest, result: list[Any] | None) -> None:
    """Check the result of a pooled request, numbers per vector and values; ``None`` if it got
    none."""
    if result is None:
        return
    width, values = result
    assert live.pooled is not None, f"{live.req}: a result for a request that is not pooled"
    by_token = live.pooled.ndim > 1
    vectors = as_vectors(values, width, by_token=by_token)
    assert np.array_equal(vectors, live.pooled), f"{live.req}: {vectors}, expected {live.pooled}"
    live.num_results += 1


def check_start(live: LiveRequest, has_output: bool, started: Started | None) -> None:
    """Check that a request reports cached tokens, preemptions, waits and events with its first
    output after each start, and with no other output."""
    req, history, is_due = live.req, live.req.history, live.has_new_seat and has_output
    assert (started is not None) == is_due, f"{req}: started is {started}, expected: {is_due}"
    if started is not None:
        live.has_new_seat = False
        assert started.num_cached_tokens == live.num_cached, f"{req}: cached tokens"
        assert started.num_preemptions == history.num_preempted, f"{req}: preemptions"
        assert (started.waits, started.events) == (history.waits, history.events), f"{req}: history"


def check_end(live: LiveRequest, end: Finished, now: float, *, may_fail: bool) -> None:
    """Check that a request ended for the expected reason and after all of its expected tokens.
    ``may_fail``: its adapter or its media may have failed."""
    add, text = live.req.add, f"{live.req.request_id}: ends with {end.reason} {end.message!r}"
    assert end.num_preemptions == live.req.num_preempted, f"{text}: preemptions"
    if end.reason == "deadline":
        due = [time for time in (add.queue_deadline, add.end_deadline) if time is not None]
        assert due and min(due) <= now, f"{text} at {now}, due {due}"
    elif end.reason == "error":
        assert end.message, f"{text}: no message"
        # Without real grammars, this field is read by a resource of the case.
        is_faked = add.grammar is not None and add.grammar.lstrip("-").isdecimal()
        is_early = live.fails_at is not None or is_faked or may_fail
        assert is_early or live.end == DEAD_END, f"{text}: the request was valid"
        assert is_early or live.num_heard == len(live.answer), (
            f"{text} after {live.num_heard} tokens of {len(live.answer)}"
        )
    else:
        assert (end.reason, end.stop_reason) == live.end, f"{text}, not {live.end}"
        assert live.num_results == (live.pooled is not None), f"{text}: {live.num_results} results"
        assert live.num_heard == len(live.answer), f"{text} after {live.num_heard} tokens"
        assert not live.fails, f"{text}, but it should have failed at a position"


def check_waits(req: Request) -> None:
    """Check that the causes of waiting add up to the seconds that the request was queued."""
    history = req.history
    total = sum(history.waits.values())
    assert total == history.queue_seconds, (
        f"{req}: waits {history.waits}, {history.queue_seconds} s"
    )


def extras_of(add: AddRequest) -> dict[int, int]:
    """Numbers that the fake model adds to the token, by position: for salt and adapter at position
    0, for each media item at its offset."""
    extras = {}
    if add.cache_salt is not None or add.adapter is not None:
        extras[0] = _number(add.cache_salt, add.adapter)
    for item in add.media:
        extras[item.offset] = extras.get(item.offset, 0) + _number(
            item.offset, item.length, item.hash
        )
    return extras


def seen_by(add: AddRequest, extras: dict[int, int]) -> list[int]:
    """The numbers that the fake model reads for a prompt."""
    return [token + extras.get(at, 0) for at, token in enumerate(add.prompt_token_ids)]


def answer_to(
    add: AddRequest,
    extras: dict[int, int],
    most: int,
    *,
    num_tokens_used: int = VOCAB_SIZE,
    guide: Guide | None = None,
) -> tuple[list[int], tuple[str, int | None]]:
    """The tokens, at most ``most``, that a request must get, and the reason for its end with the
    stop token, if any. ``extras``: numbers added to the prompt's token ids, by position."""
    digest = digest_of(seen_by(add, extras))
    stops = {*add.eos_token_ids, *add.params.stop_token_ids}
    answer: list[int] = []
    for _ in range(most):
        token = digest % num_tokens_used
        if guide is not None and (token := guided(guide, token)) == NONE_LEFT:
            return answer, DEAD_END
        answer.append(token)
        if token in stops and len(answer) >= add.params.min_tokens:
            return answer, ("stop", None if token in add.eos_token_ids else token)
        digest = mix(digest, token)
    return answer, ("length", None)


def _number(*parts: object) -> int:
    return crc32(repr(parts).encode()) << 16
