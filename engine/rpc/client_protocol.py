"""The client's side of the protocol: builds messages and processes received ones, without sockets.

    Submit, Call ──> numbered; answered in order with the same number
    Abort ─────────> not answered: the ends of requests are sent as outputs
    Outputs <─────── stored in order until the user takes them; then Credit is sent

Only the core knows which request ids are in use.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.errors import EngineError, WireError
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.media import MediaContent
from engine.messages.requests import AddRequest, CoreOutputs, as_request_ids, check_plain
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    MAX_CALL_BYTES,
    MAX_SUBMIT_REQUESTS,
    PROTOCOL_VERSION,
    Abort,
    Answer,
    Bring,
    Bye,
    CacheNews,
    Call,
    Credit,
    Dead,
    Fault,
    Follow,
    Hello,
    Outputs,
    Submit,
    Submitted,
    ToClient,
    Welcome,
)
from engine.rpc.checks import check_counts, check_places
from engine.rpc.clocks import ClockOffset
from engine.rpc.failures import death_of, error_of

MAX_SUBMIT_TOKENS = 1 << 20  # prompt tokens per message, far below the limit of its size

Reply = Welcome | Submitted | Answer


@dataclass
class Part:
    """Requests that are sent in one message."""

    frame: bytes
    number: int
    places: list[int]
    """Indices of these requests in the list that the user passed."""
    sent_at: float


class ClientProtocol:
    """The client's side of the protocol. ``clock``: the client's clock, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.welcome: Welcome | None = None
        self.unread: list[CoreOutputs] = []
        """Received outputs that the user has not taken yet, in order."""
        self.num_unfinished = 0
        """Number of requests that the core has accepted and whose end the user has not taken."""
        self.stats: SchedulerStats | None = None
        """The latest statistics that ``request_stats`` requested."""
        self.on_news: Callable[[CacheNews], object] | None = None
        """Called with each report of the core's cache, if this client follows it."""
        self.has_gap = False
        """True if a report was lost, so that the whole cache must be requested."""
        self._num_news = 0  # reports since the whole cache
        self.offset = ClockOffset()
        self._clock = clock
        self._hello_at = 0.0  # when hello was sent
        self._submits: dict[int, Part] = {}  # Submit messages without an answer, by number
        self._stats_call: int | None = None  # number of the call of ``stats`` without an answer
        self._numbers = itertools.count()
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[ToClient] = MessageDecoder(ToClient)
        self._num_unpaid = 0

    # -- messages to send

    def hello(self, token: bytes, name: str) -> bytes:
        self._hello_at = self._clock()
        return self._encoder.encode(Hello(PROTOCOL_VERSION, token, name))

    def submit(self, requests: Sequence[AddRequest]) -> tuple[list[Part], dict[int, Exception]]:
        """Make the messages that add these requests to the core. Also returns the errors of
        requests that cannot be encoded, by index in ``requests``."""
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

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> bytes:
        """The message that brings the content of a media item: the handle of its pixels if the core
        can read it, else the pixels. If they are too large, it brings the reason."""
        names = list(request_ids)
        if content.shared is not None:
            where = "" if self.welcome is None else self.welcome.namespace
            is_read = where == content.shared.namespace != ""
            content = replace(content, pixels=None) if is_read else replace(content, shared=None)
        try:
            return self._encoder.encode(Bring(names, content))
        except WireError as error:
            reason = f"a picture's content cannot be sent to the core: {error}; shrink the picture"
            return self._encoder.encode(Bring(names, MediaContent(content.key, error=reason)))

    def abort(self, request_ids: Sequence[str]) -> bytes:
        """The message that aborts requests.

        Raises ``RequestTypeError`` for ids that are not strings, which the core could not read.
        """
        return self._encoder.encode(Abort(as_request_ids(request_ids)))

    def call(self, name: str, args: tuple[Any, ...]) -> tuple[int, bytes]:
        """The number of a utility call, and its message.

        Raises ``RequestTypeError`` for arguments that are not plain values, ``WireError`` if they
        take more than ``MAX_CALL_BYTES``.
        """
        for value in args:
            check_plain(name, value)
        number = next(self._numbers)
        return number, self._encoder.encode(Call(number, name, list(args)), MAX_CALL_BYTES)

    def request_stats(self) -> bytes | None:
        """Make the message of a ``stats`` call; ``None`` while the previous one is not answered."""
        if self._stats_call is not None:
            return None
        self._stats_call, frame = self.call("stats", ())
        return frame

    def follow(self) -> bytes:
        """The message that requests the whole cache, and then its changes."""
        self.has_gap, self._num_news = False, -1
        return self._encoder.encode(Follow())

    def bye(self) -> bytes:
        return self._encoder.encode(Bye())

    def take_batches(self, send: Callable[[bytes], object]) -> list[CoreOutputs]:
        """Take all received outputs, in order, and let the core send as many further batches."""
        self._num_unpaid += len(self.unread)
        batches, self.unread = self.unread, []
        for batch in batches:
            self.num_unfinished -= len(batch.finished)
        if self.welcome is not None and 2 * self._num_unpaid >= self.welcome.num_credits:
            send(self._encoder.encode(Credit(self._num_unpaid)))
            self._num_unpaid = 0
        return batches

    # -- received messages

    def feed(self, frames: list[bytes]) -> Reply | None:
        """Process a received message: store it if it has outputs, return it if it is a reply.

        Raises ``EngineDeadError`` if the core reports its death, ``WireError`` if it reports that
        it could not read a message.
        """
        message = self._decoder.decode(frames)
        match message:
            case Outputs(batch=batch):
                check_counts(batch)
                check_places([each.index for each in batch.finished], batch.request_ids)
                check_places([each.index for each in batch.started], batch.request_ids)
                self.offset.from_core(batch, self._clock())
                self.unread.append(batch)
            case CacheNews():
                self._note_news(message)
            case Dead():
                raise death_of(message.message, message.traceback)
            case Fault():
                raise WireError(f"the core could not read a message: {message.message}")
            case Welcome():
                self.offset.measure(self._hello_at, message.time, self._clock())
                return message
            case Submitted():
                self._note_submitted(message)
                return message
            case Answer():
                self._note_never_sent(message.number)
                if message.number == self._stats_call:
                    self._stats_call = None
                    with suppress(EngineError, msgspec.ValidationError):  # it has no statistics
                        self.stats = value_of("stats", message)
                return message
        return None

    def _note_news(self, news: CacheNews) -> None:
        """Pass a report on. After a gap, all are dropped until the whole cache comes."""
        if news.is_whole:
            self._num_news = 0
        elif self._num_news >= 0 and news.sequence == self._num_news + 1:
            self._num_news += 1
        else:
            self.has_gap = self._num_news >= 0
            return
        if self.on_news is not None:
            self.on_news(news)

    def _note_submitted(self, message: Submitted) -> None:
        self._note_never_sent(message.number)
        part = self._submits.pop(message.number, None)
        if part is None:
            raise WireError(f"the core answered message {message.number}, which was not sent")
        check_places([each.index for each in message.refusals], part.places)
        self.offset.measure(part.sent_at, message.time, self._clock())
        self.num_unfinished += len(part.places) - len(message.refusals)

    def _note_never_sent(self, number: int) -> None:
        """Forget unanswered messages with smaller numbers. Since answers come in order, these
        messages were never sent, because of an interrupt."""
        while self._submits and (first := next(iter(self._submits))) < number:
            del self._submits[first]
        if self._stats_call is not None and self._stats_call < number:
            self._stats_call = None

    # -- helpers

    def _part(self, requests: Sequence[AddRequest], places: list[int]) -> Part:
        number = next(self._numbers)
        frame = self._encoder.encode(
            Submit(number, [self.offset.to_core(requests[place]) for place in places])
        )
        return Part(frame, number, places, self._clock())


def refused(part: Part, reply: Reply) -> dict[int, Exception]:
    """The errors of requests that the core refused, by their index in the call of ``submit``."""
    assert isinstance(reply, Submitted)
    return {part.places[each.index]: error_of(each.failure) for each in reply.refusals}


def value_of(name: str, reply: Reply) -> Any:
    """Return the result of the utility ``name``, or raise its error."""
    assert isinstance(reply, Answer)
    if reply.failure is not None:
        raise error_of(reply.failure)
    if name == "stats":
        return msgspec.convert(reply.value, SchedulerStats | None)
    return reply.value


def _in_parts(requests: Sequence[AddRequest]) -> Iterator[list[int]]:
    """Split requests into messages of limited size. Yields the request indices of each."""
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
