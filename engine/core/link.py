"""What synchronous and asyncio clients share: what to send, and what came back. Touches no socket.

requests ── Submit, Abort, Call ──> numbered; answered in order, each with its number
Outputs  ── kept in order until they are read, then paid for with Credit
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.core.failures import death_of, error_of
from engine.errors import WireError
from engine.ipc.codec import Decoder, Encoder
from engine.messages.check import check_plain
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Abort,
    Aborted,
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

MAX_SUBMIT_TOKENS = 1 << 20  # prompt tokens in one message, so that it stays far below the limit
MAX_SUBMIT_REQUESTS = 1000

Reply = Welcome | Submitted | Aborted | Answer


@dataclass
class Part:
    """Requests that travel in one message."""

    frame: bytes
    number: int
    places: list[int]
    """Of its requests, among all that were to be added."""


@dataclass
class Submission:
    """What adding requests takes: messages to send, and what could not be sent at all."""

    parts: list[Part] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)


class Link:
    """One client's side of the conversation."""

    def __init__(self) -> None:
        self.welcome: Welcome | None = None
        self.batches: deque[CoreOutputs] = deque()
        """Outputs that nobody has read yet."""
        self.live: set[str] = set()
        """Requests that were taken and have not ended, as far as was read."""
        self._numbers = itertools.count()
        self._encoder = Encoder()
        self._decoder: Decoder[ToClient] = Decoder(ToClient)
        self._num_unpaid = 0

    # -- what to send

    def hello(self, token: bytes, name: str) -> bytes:
        return self._encoder.encode(Hello(PROTOCOL_VERSION, token, name))

    def submit(self, requests: Sequence[AddRequest]) -> Submission:
        """Messages that add these. A request that cannot travel is an error of its own."""
        submission = Submission()
        for places in _in_parts(requests):
            try:
                submission.parts.append(self._part(requests, places))
            except WireError:
                for place in places:
                    try:
                        submission.parts.append(self._part(requests, [place]))
                    except WireError as error:
                        submission.errors[place] = error
        return submission

    def abort(self, request_ids: Sequence[str]) -> tuple[int, bytes]:
        """Number and frame."""
        number = next(self._numbers)
        return number, self._encoder.encode(Abort(number, list(request_ids)))

    def call(self, name: str, args: tuple[Any, ...]) -> tuple[int, bytes]:
        """Number and frame. Raises ``RequestTypeError`` for arguments that are no plain values."""
        for value in args:
            check_plain(name, value)
        number = next(self._numbers)
        return number, self._encoder.encode(Call(number, name, list(args)))

    def bye(self) -> bytes:
        return self._encoder.encode(Bye())

    def take_batches(self, send: Callable[[bytes], object]) -> list[CoreOutputs]:
        """All outputs that wait, in order; the core may send as many again."""
        batches = list(self.batches)
        self.batches.clear()
        for batch in batches:
            self.live.difference_update(batch.request_ids[end.index] for end in batch.finished)
        self._num_unpaid += len(batches)
        if self.welcome is not None and 2 * self._num_unpaid >= self.welcome.num_credits:
            send(self._encoder.encode(Credit(self._num_unpaid)))
            self._num_unpaid = 0
        return batches

    # -- what came back

    def feed(self, frames: list[bytes]) -> Reply | None:
        """Take a message: outputs are kept, a reply is returned.

        Raises ``EngineDeadError`` for the core's last words, ``WireError`` if it could not read
        what was sent.
        """
        message = self._decoder.decode(frames)
        match message:
            case Outputs(batch=batch):
                _check_places([each.index for each in batch.finished], batch.request_ids)
                _check_places([each.index for each in batch.started], batch.request_ids)
                self.batches.append(batch)
            case Dead():
                raise death_of(message.message, message.traceback)
            case Fault():
                raise WireError(f"the core could not read a message: {message.message}")
            case Welcome() | Submitted() | Aborted() | Answer():
                return message
        return None

    def submitted(
        self, requests: Sequence[AddRequest], part: Part, reply: Reply
    ) -> dict[int, Exception]:
        """Note what was taken. Returns why the others were not, by place."""
        assert isinstance(reply, Submitted)
        _check_places([each.index for each in reply.refusals], part.places)
        errors: dict[int, Exception] = {
            part.places[each.index]: error_of(each.failure) for each in reply.refusals
        }
        self.live.update(requests[i].request_id for i in part.places if i not in errors)
        return errors

    def aborted(self, request_ids: Iterable[str], reply: Reply) -> list[Finished]:
        """Note what was stopped. Returns what became of it."""
        assert isinstance(reply, Aborted)
        self.live.difference_update(request_ids)
        return reply.finished

    # -- helpers

    def _part(self, requests: Sequence[AddRequest], places: list[int]) -> Part:
        number = next(self._numbers)
        frame = self._encoder.encode(Submit(number, [requests[place] for place in places]))
        return Part(frame, number, places)


def _check_places(places: Sequence[int], among: Sequence[object]) -> None:
    """Raise ``WireError`` for a place that is none: a core with a fault, or none at all."""
    for place in places:
        if not 0 <= place < len(among):
            raise WireError(f"the core speaks of place {place}, where there are {len(among)}")


def value_of(name: str, reply: Reply) -> Any:
    """What a utility returned. Raises what it raised."""
    assert isinstance(reply, Answer)
    if reply.failure is not None:
        raise error_of(reply.failure)
    if name == "stats":
        return msgspec.convert(reply.value, SchedulerStats | None)
    return reply.value


def _in_parts(requests: Sequence[AddRequest]) -> Iterator[list[int]]:
    """Places of requests, cut into messages that are not too large."""
    places: list[int] = []
    num_tokens = 0
    for place, request in enumerate(requests):
        num_tokens += len(request.prompt_token_ids)
        if places and (num_tokens > MAX_SUBMIT_TOKENS or len(places) == MAX_SUBMIT_REQUESTS):
            yield places
            places, num_tokens = [], len(request.prompt_token_ids)
        places.append(place)
    if places:
        yield places
