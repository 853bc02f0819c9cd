"""What one client may still be sent, and what waits until it has read.

    answers ── cost nothing; wait only while the queue towards the client is full
    batches ── cost a credit each; wait while there are none, and behind answers that wait

Nothing that waits is lost but by ``give_up`` and ``forget``, and whoever calls these is told whose
ends were among it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from engine.ipc.codec import Decoder, Encoder
from engine.messages.columns import without_ids
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.wire import Outputs

NUM_CREDITS = 256  # batches that may be on their way to a client
FRAME_BYTES = 512  # that a waiting frame takes beside its own bytes

_encoder = Encoder()
_decoder: Decoder[Outputs] = Decoder(Outputs)


@dataclass(slots=True)
class Waiting:
    """Outputs that wait. ``rows``: whom they are about, less tokens and scores."""

    frame: bytes
    rows: CoreOutputs
    serial: int
    """Its number among all that ever waited."""

    @property
    def num_bytes(self) -> int:
        return len(self.frame) + FRAME_BYTES

    def is_void(self, forgotten: set[str]) -> bool:
        """Is there nothing left to send without these requests?"""
        rows = self.rows
        return bool(forgotten) and rows.stats is None and forgotten.issuperset(rows.request_ids)

    def ends(self) -> dict[str, Finished]:
        """By request."""
        return {self.rows.request_ids[end.index]: end for end in self.rows.finished}

    def ids_with_tokens(self) -> set[str]:
        """Requests of which it has tokens."""
        ids, counts = self.rows.request_ids, self.rows.counts
        return {name for i, name in enumerate(ids) if counts is None or counts[i]}


class Outbox:
    """In order, and counted. ``send`` says whether there was room for a frame."""

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self.credits = NUM_CREDITS
        self.answer_bytes = 0
        self.batch_bytes = 0
        self.unread: dict[str, Finished] = {}
        """Requests that have ended, of which the client was not told yet."""
        self._send = send
        self._answers: deque[bytes] = deque()
        self._batches: deque[Waiting] = deque()
        self._num_waited = 0
        self._last: dict[str, int] = {}  # request -> serial of the last batch with rows of it
        self._void: dict[str, int] = {}  # forgotten one -> of the last batch with rows for nobody

    def __len__(self) -> int:
        """Frames that wait."""
        return len(self._answers) + len(self._batches)

    @property
    def num_bytes(self) -> int:
        """What waits takes so many bytes."""
        return self.answer_bytes + self.batch_bytes

    @property
    def is_stuck(self) -> bool:
        """Does anything wait for room in the queue, rather than for credits?"""
        return bool(self._answers or (self._batches and self.credits))

    def answer(self, frame: bytes) -> None:
        """Send what costs no credit, now or when there is room."""
        if self._answers or not self._send(frame):
            self._answers.append(frame)
            self.answer_bytes += len(frame) + FRAME_BYTES

    def publish(self, frame: bytes, batch: CoreOutputs) -> None:
        """Send the outputs ``frame``, which say ``batch``, now or when they have a credit."""
        if self.credits and not len(self) and self._send(frame):
            self.credits -= 1
            return
        rows = replace(batch, token_ids=[], started=[], logprobs={}, prompt_logprobs={})
        waiting = Waiting(frame, rows, self._num_waited)
        self._num_waited += 1
        self._batches.append(waiting)
        self.batch_bytes += waiting.num_bytes
        self._last.update(dict.fromkeys(rows.request_ids, waiting.serial))
        self.unread |= waiting.ends()

    def grant(self, num_batches: int) -> None:
        """The client has read so many batches."""
        self.credits = min(self.credits + num_batches, NUM_CREDITS)
        self.flush()

    def flush(self) -> None:
        """Send what there is room and credit for."""
        while self._answers and self._send(self._answers[0]):
            self.answer_bytes -= len(self._answers.popleft()) + FRAME_BYTES
        while self._batches and not self._answers:
            first = self._batches[0]
            forgotten = self._forgotten_in(first)
            if not first.is_void(forgotten):
                if not self.credits or not self._send(_frame_of(first, forgotten)):
                    return
                self.credits -= 1
            self._drop_first(forgotten)

    def forget(self, request_ids: Iterable[str]) -> dict[str, Finished]:
        """Send nothing of these any more. Returns the ends of which the client was not told.

        Takes no longer when much waits: rows are looked at when their turn comes.
        """
        ends = {}
        for name in request_ids:
            if name in self._last:
                self._void[name] = self._last[name]
            if name in self.unread:
                ends[name] = self.unread.pop(name)
        return ends

    def give_up(self, reason: str) -> dict[str, Finished]:
        """Drop the outputs. Returns the ends in them; where tokens are lost, with ``reason``."""
        ends: dict[str, Finished] = {}
        lost: set[str] = set()
        for waiting in self._batches:
            forgotten = self._forgotten_in(waiting)
            ends |= {name: end for name, end in waiting.ends().items() if name not in forgotten}
            lost |= waiting.ids_with_tokens() - forgotten
        self.batch_bytes = 0
        for each in (self._batches, self.unread, self._last, self._void):
            each.clear()
        return {name: aborted(end, reason) if name in lost else end for name, end in ends.items()}

    def _forgotten_in(self, waiting: Waiting) -> set[str]:
        """Requests whose rows in it must not be sent any more."""
        if not self._void:
            return set()
        ids = waiting.rows.request_ids
        return {name for name in ids if self._void.get(name, -1) >= waiting.serial}

    def _drop_first(self, forgotten: set[str]) -> None:
        waiting = self._batches.popleft()
        self.batch_bytes -= waiting.num_bytes
        for name in waiting.ends().keys() - forgotten:
            del self.unread[name]
        for name in waiting.rows.request_ids:
            for serials in (self._last, self._void):
                if serials.get(name) == waiting.serial:
                    del serials[name]


def aborted(end: Finished, reason: str) -> Finished:
    """The end as a client sees it that lost tokens of the request: it was aborted."""
    return replace(end, reason="abort", stop_reason=None, message=reason)


def _frame_of(waiting: Waiting, forgotten: set[str]) -> bytes:
    """What is to be sent, less the rows that were forgotten."""
    if not forgotten:
        return waiting.frame
    batch = _decoder.decode([waiting.frame]).batch
    return _encoder.encode(Outputs(without_ids(batch, forgotten)))
