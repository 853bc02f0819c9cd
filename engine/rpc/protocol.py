"""The client's side of the protocol: what to send, and what came back. Touches no socket.

requests ── Submit, Call ──> numbered; answered in order, each with its number
aborts   ── Abort ─────────> not answered: the ends come as outputs
Outputs  ── kept in order until they are read, then paid for with Credit

Only the core knows which ids are in use. Everything is noted when it comes in: tasks that wait for
it may run much later.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import EngineError, WireError
from engine.ipc.codec import Decoder, Encoder
from engine.messages.check import as_request_ids, check_plain
from engine.messages.outputs import CoreOutputs
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    MAX_CALL_BYTES,
    MAX_SUBMIT_REQUESTS,
    PROTOCOL_VERSION,
    Abort,
    Answer,
    Bye,
    Call,
    Credit,
    Dead,
    Fault,
    Hello,
    Outputs,
    Submit,
    Submitted,
    ToClient,
    Welcome,
)
from engine.rpc.clocks import ClockOffset
from engine.rpc.failures import death_of, error_of

MAX_SUBMIT_TOKENS = 1 << 20  # prompt tokens in one message, so that it stays far below the limit

Reply = Welcome | Submitted | Answer


@dataclass
class Part:
    """Requests that travel in one message."""

    frame: bytes
    number: int
    places: list[int]
    """Indices of its requests among all that were to be added."""
    asked_at: float


class ClientProtocol:
    """One client's side of the protocol. ``clock`` is that of the client's times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.welcome: Welcome | None = None
        self.unread: list[CoreOutputs] = []
        """Outputs that have come, in order."""
        self.num_unfinished = 0
        """Requests that the core took and whose end was not read."""
        self.stats: SchedulerStats | None = None
        """The latest statistics that ``ask_stats`` asked for."""
        self.offset = ClockOffset()
        self._clock = clock
        self._asked_at = 0.0  # when hello was sent
        self._submits: dict[int, Part] = {}  # not answered yet
        self._stats_asked: int | None = None  # number of the question that is not answered yet
        self._numbers = itertools.count()
        self._encoder = Encoder()
        self._decoder: Decoder[ToClient] = Decoder(ToClient)
        self._num_unpaid = 0

    # -- what to send

    def hello(self, token: bytes, name: str) -> bytes:
        self._asked_at = self._clock()
        return self._encoder.encode(Hello(PROTOCOL_VERSION, token, name))

    def submit(self, requests: Sequence[AddRequest]) -> tuple[list[Part], dict[int, Exception]]:
        """Messages that add these, and by index why some cannot be encoded."""
        parts: list[Part] = []
        errors: dict[int, Exception] = {}
        for places in _in_parts(requests):
            try:
                parts.append(self._part(requests, places))
            except WireError:
                for place in places:
                    try:
                        parts.append(self._part(requests, [place]))
                    except WireError as error:
                        errors[place] = error
        self._submits.update((part.number, part) for part in parts)
        return parts, errors

    def abort(self, request_ids: Sequence[str]) -> bytes:
        """Stop these; the end of each will come.

        Raises ``RequestTypeError`` for ids that are not strings: the core could not read them.
        """
        return self._encoder.encode(Abort(as_request_ids(request_ids)))

    def call(self, name: str, args: tuple[Any, ...]) -> tuple[int, bytes]:
        """Number and frame.

        Raises ``RequestTypeError`` for arguments that are no plain values, ``WireError`` for more
        than ``MAX_CALL_BYTES`` of them.
        """
        for value in args:
            check_plain(name, value)
        number = next(self._numbers)
        return number, self._encoder.encode(Call(number, name, list(args)), MAX_CALL_BYTES)

    def ask_stats(self) -> bytes | None:
        """A call of ``stats`` whose answer no caller waits for; ``None`` while one is under way."""
        if self._stats_asked is not None:
            return None
        self._stats_asked, frame = self.call("stats", ())
        return frame

    def bye(self) -> bytes:
        return self._encoder.encode(Bye())

    def take_batches(self, send: Callable[[bytes], object]) -> list[CoreOutputs]:
        """All outputs that wait, in order; the core may send as many again."""
        self._num_unpaid += len(self.unread)
        batches, self.unread = self.unread, []
        for batch in batches:
            self.num_unfinished -= len(batch.finished)
        if self.welcome is not None and 2 * self._num_unpaid >= self.welcome.num_credits:
            send(self._encoder.encode(Credit(self._num_unpaid)))
            self._num_unpaid = 0
        return batches

    # -- what came back

    def feed(self, frames: list[bytes]) -> Reply | None:
        """Take a message: outputs are kept, a reply is returned.

        Raises ``EngineDeadError`` for a ``Dead`` of the core, ``WireError`` if it could not read
        what was sent.
        """
        message = self._decoder.decode(frames)
        match message:
            case Outputs(batch=batch):
                _check_counts(batch)
                _check_places([each.index for each in batch.finished], batch.request_ids)
                _check_places([each.index for each in batch.started], batch.request_ids)
                self.offset.from_core(batch, self._clock())
                self.unread.append(batch)
            case Dead():
                raise death_of(message.message, message.traceback)
            case Fault():
                raise WireError(f"the core could not read a message: {message.message}")
            case Welcome():
                self.offset.measure(self._asked_at, message.time, self._clock())
                return message
            case Submitted():
                self._note_submitted(message)
                return message
            case Answer():
                self._note_never_sent(message.number)
                if message.number == self._stats_asked:
                    self._stats_asked = None
                    with suppress(EngineError, msgspec.ValidationError):  # it has none to tell
                        self.stats = value_of("stats", message)
                return message
        return None

    def _note_submitted(self, message: Submitted) -> None:
        self._note_never_sent(message.number)
        part = self._submits.pop(message.number, None)
        if part is None:
            raise WireError(f"the core answers message {message.number}, which was not asked")
        _check_places([each.index for each in message.refusals], part.places)
        self.offset.measure(part.asked_at, message.time, self._clock())
        self.num_unfinished += len(part.places) - len(message.refusals)

    def _note_never_sent(self, number: int) -> None:
        """Forget earlier questions without an answer: an interrupt kept them from being sent."""
        while self._submits and (first := next(iter(self._submits))) < number:
            del self._submits[first]
        if self._stats_asked is not None and self._stats_asked < number:
            self._stats_asked = None

    # -- helpers

    def _part(self, requests: Sequence[AddRequest], places: list[int]) -> Part:
        number = next(self._numbers)
        frame = self._encoder.encode(
            Submit(number, [self.offset.to_core(requests[place]) for place in places])
        )
        return Part(frame, number, places, self._clock())


def refused(part: Part, reply: Reply) -> dict[int, Exception]:
    """Why some were not taken, by index."""
    assert isinstance(reply, Submitted)
    return {part.places[each.index]: error_of(each.failure) for each in reply.refusals}


def _check_places(places: Sequence[int], among: Sequence[object]) -> None:
    """Raise ``WireError`` for an invalid index: the other side is faulty, or is no core."""
    for place in places:
        if not 0 <= place < len(among):
            raise WireError(
                f"invalid index {place} in a message from the core ({len(among)} entries)"
            )


def _check_counts(batch: CoreOutputs) -> None:
    """Raise ``WireError`` if rows and tokens do not belong together."""
    num_rows, counts = len(batch.request_ids), batch.counts
    if counts is None:
        is_right = len(batch.token_ids) == num_rows
    else:
        total = sum(counts)
        is_right = (
            len(counts) == num_rows
            and total == len(batch.token_ids)
            and min(counts, default=0) >= 0
        )
    if not is_right:
        raise WireError(
            f"invalid counts in a message from the core: {num_rows} requests, "
            f"{len(batch.token_ids)} tokens"
        )


def value_of(name: str, reply: Reply) -> Any:
    """What a utility returned. Raises what it raised."""
    assert isinstance(reply, Answer)
    if reply.failure is not None:
        raise error_of(reply.failure)
    if name == "stats":
        return msgspec.convert(reply.value, SchedulerStats | None)
    return reply.value


def _in_parts(requests: Sequence[AddRequest]) -> Iterator[list[int]]:
    """Indices of requests, cut into messages that are not too large."""
    places: list[int] = []
    num_tokens = 0
    for place, request in enumerate(requests):
        length = len(request.prompt_token_ids)
        num_tokens += length
        if places and (num_tokens > MAX_SUBMIT_TOKENS or len(places) == MAX_SUBMIT_REQUESTS):
            yield places
            places, num_tokens = [], length
        places.append(place)
    if places:
        yield places
