"""The send queue of one client: what waits for credits, or for room in the socket.

    answers ── cost nothing; wait only while the queue towards the client is full
    batches ── cost a credit each; wait while there are none, and behind answers that wait

Only ``give_up`` drops what waits; it returns the ends that were among it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from engine.messages.outputs import CoreOutputs, Finished

NUM_CREDITS = 256  # batches that may be on their way to a client
FRAME_BYTES = 512  # counted for a waiting frame beside its own bytes


@dataclass(slots=True)
class Waiting:
    """Outputs that wait. ``rows``: the batch without tokens and log-probabilities."""

    frame: bytes
    rows: CoreOutputs

    @property
    def num_bytes(self) -> int:
        return len(self.frame) + FRAME_BYTES

    def ids_with_tokens(self) -> set[str]:
        """Requests that have tokens in it."""
        ids, counts = self.rows.request_ids, self.rows.counts
        return {name for i, name in enumerate(ids) if counts is None or counts[i]}


class SendQueue:
    """Sends in order and counts what waits. ``send`` returns whether there was room for a frame."""

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self.credits = NUM_CREDITS
        self.answer_bytes = 0
        self.batch_bytes = 0
        self._send = send
        self._answers: deque[bytes] = deque()
        self._batches: deque[Waiting] = deque()

    def __len__(self) -> int:
        """Frames that wait."""
        return len(self._answers) + len(self._batches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that waits."""
        return self.answer_bytes + self.batch_bytes

    @property
    def is_stuck(self) -> bool:
        """Does anything wait for room in the socket, rather than for credits?"""
        return bool(self._answers or (self._batches and self.credits))

    def answer(self, frame: bytes) -> None:
        """Send what costs no credit, now or when there is room."""
        if self._answers or not self._send(frame):
            self._answers.append(frame)
            self.answer_bytes += len(frame) + FRAME_BYTES

    def publish(self, frame: bytes, batch: CoreOutputs) -> None:
        """Send ``frame``, the encoded ``batch``, now or when there are credit and room."""
        if self.credits and not len(self) and self._send(frame):
            self.credits -= 1
            return
        rows = replace(batch, token_ids=[], started=[], logprobs={}, prompt_logprobs={})
        waiting = Waiting(frame, rows)
        self._batches.append(waiting)
        self.batch_bytes += waiting.num_bytes

    def grant(self, num_batches: int) -> None:
        """Return credits: the client has read so many batches."""
        self.credits = min(self.credits + num_batches, NUM_CREDITS)
        self.flush()

    def flush(self) -> None:
        """Send as much as there is room and credit for."""
        while self._answers and self._send(self._answers[0]):
            self.answer_bytes -= len(self._answers.popleft()) + FRAME_BYTES
        while self._batches and self.credits and not self._answers:
            if not self._send(self._batches[0].frame):
                return
            self.credits -= 1
            self.batch_bytes -= self._batches.popleft().num_bytes

    def give_up(self, reason: str) -> list[tuple[str, Finished]]:
        """Drop the outputs. Returns their ends by request, in order; a request that loses tokens
        ends with "abort" and ``reason``."""
        ends: list[tuple[str, Finished]] = []
        lost: set[str] = set()
        for waiting in self._batches:
            lost |= waiting.ids_with_tokens()
            for end in waiting.rows.finished:
                name = waiting.rows.request_ids[end.index]
                ends.append((name, _aborted(end, reason) if name in lost else end))
        self._batches.clear()
        self.batch_bytes = 0
        return ends


def _aborted(end: Finished, reason: str) -> Finished:
    """The end of a request whose tokens were dropped: to its client it was aborted."""
    return replace(end, reason="abort", stop_reason=None, message=reason)
