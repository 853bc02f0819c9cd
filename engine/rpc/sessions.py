"""The sessions of a core: its clients, their requests, and the send queue of each.

Answers are sent as soon as the socket has room. A batch of outputs also needs a credit, which the
client grants as it reads, and waits for answers to be sent first. If the unsent messages of a
client exceed ``max_backlog_bytes``, its requests are aborted. A client counts as disconnected only
when the socket reports it as unreachable.

A batch that cannot be encoded, because it is too large or contains an unknown object, is halved
until each piece can be encoded, or has a single request, which then fails alone.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
from msgspec import Struct
from msgspec.structs import replace

from engine.errors import WireError
from engine.ipc.codec import MAX_MESSAGE_BYTES, MessageEncoder, plain_text
from engine.ipc.sockets import MAX_CONNECTIONS, Socket
from engine.messages.requests import CoreOutputs, Finished, pick_rows, with_ends
from engine.messages.wire import Dead, Outputs, Probe, ToClient
from engine.observe.logs import Throttle
from engine.rpc.work import Work

logger = logging.getLogger("engine.core")
MAX_BACKLOG_BYTES = 64 << 20
MAX_NAME = 80  # characters of a client's name; longer names are cut
PROBE_SECONDS = 1.0  # between two checks whether clients with requests are connected
RETRY_SECONDS = 0.05  # between two attempts to send to a full socket
Deadlines = tuple[float, ...]
NUM_CREDITS = 256
FRAME_BYTES = 512  # counted for a waiting frame in addition to its own bytes


class ClientGoneError(Exception):
    """A client has disconnected."""


@dataclass
class ClientSession:
    """A client that has received ``Welcome``, with its requests."""

    identity: bytes
    index: int
    name: str
    queue: SendQueue
    live: dict[str, Deadlines] = field(default_factory=dict)
    """Its unfinished requests by id, with their deadlines."""
    complaints: Throttle = field(default_factory=Throttle)
    """Limits log lines about this client."""
    work: Work = field(default_factory=Work)
    """The work of its unfinished requests."""

    def __str__(self) -> str:
        return f"client {self.index} ({self.name})" if self.name else f"client {self.index}"

    @property
    def is_concerned(self) -> bool:
        """True if the client has unfinished requests or unsent messages, so it is probed."""
        return bool(self.live or self.queue)


class ClientSessions:
    """The client sessions of a core. ``drop``: ends requests, given by id, without outputs."""

    def __init__(
        self,
        router: Socket,
        drop: Callable[[list[str]], object],
        *,
        num_credits: int = NUM_CREDITS,
        max_clients: int = MAX_CONNECTIONS,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.num_credits = num_credits
        """Number of batches that may be on their way to each client."""
        self._router = router
        self._drop = drop
        self._max_clients = max_clients
        self._max_backlog_bytes = max_backlog_bytes
        self._encoder = MessageEncoder(max_message_bytes)
        self._by_identity: dict[bytes, ClientSession] = {}
        self._by_index: dict[int, ClientSession] = {}
        self._farewells: dict[bytes, bytes] = {}  # last messages to clients that were disconnected
        self._num_seen = 0
        self._probe_at = -math.inf
        self._retry_at = -math.inf

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> ClientSession | None:
        return self._by_identity.get(identity)

    def at(self, index: int) -> ClientSession | None:
        """The session of the client with this index; ``None`` if it has disconnected."""
        return self._by_index.get(index)

    @property
    def load(self) -> int:
        """Tokens that the unfinished requests of all clients have yet to compute, at most."""
        return sum(session.work.load for session in self._by_identity.values())

    # -- sessions

    def welcome(self, identity: bytes, name: str) -> ClientSession:
        """Open a session, after dropping clients that have vanished.

        If there is a session with this routing id, the client has reconnected: the old session is
        dropped. Raises ``WireError`` if there are ``max_clients`` sessions already.
        """
        former = self.get(identity)
        if former is not None:
            self.leave(former)
        self._probe(self)
        if len(self) >= self._max_clients:
            raise WireError(f"{self._max_clients} clients are connected already, try again later")
        self._farewells.pop(identity, None)
        shown = "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME])
        queue = SendQueue(lambda frame: self._send(identity, frame), self.num_credits)
        session = ClientSession(identity, self._num_seen, shown, queue)
        self._num_seen += 1
        self._by_identity[identity] = self._by_index[session.index] = session
        return session

    def leave(self, session: ClientSession) -> None:
        """End a session: abort its requests and drop its unsent messages."""
        self._by_identity.pop(session.identity, None)
        self._by_index.pop(session.index, None)
        if session.live:
            logger.info("%s has left; its %d requests are aborted", session, len(session.live))
            self._drop(list(session.live))
            session.live.clear()
            session.work.clear()

    def tend(self, now: float) -> None:
        """Retry unsent messages and probe clients; does nothing before ``next_look``."""
        if now >= self._retry_at:
            self._retry_at = now + RETRY_SECONDS
            for session in self:
                if session.queue.is_stuck:
                    self._tell(session, session.queue.flush)
            self._say_farewells()
        if now >= self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            self._probe(session for session in self if session.is_concerned)

    def next_look(self) -> float:
        """The time at which ``tend`` must be called next."""
        sessions = self._by_identity.values()
        if self._farewells or any(session.queue.is_stuck for session in sessions):
            return self._retry_at
        return self._probe_at if any(session.is_concerned for session in sessions) else math.inf

    # -- sending

    def send(self, identity: bytes, message: ToClient, max_bytes: int | None = None) -> None:
        """Send a message that needs no credit. While the socket is full, the message is queued for
        a client with a session, and dropped for others.

        Raises ``WireError`` if the message cannot be encoded, or has more than ``max_bytes``.
        """
        frame = self._encoder.encode(message, max_bytes)
        session = self.get(identity)
        if session is None:
            self._offer(identity, frame)
            return
        self._tell(session, session.queue.answer, frame)
        self._limit(session, session.queue.answer_bytes, "answers", self._max_backlog_bytes)

    def try_to_send(self, session: ClientSession, message: ToClient) -> bool:
        """Send a message that may be lost. Returns False, and drops it, if the socket is full or
        others wait to be sent before it."""
        return not session.queue and self._offer(session.identity, self._encoder.encode(message))

    def publish(self, index: int, batch: CoreOutputs) -> None:
        """Send a step's outputs to the client with this index, or queue them."""
        session = self._by_index.get(index)
        if session is None:  # it disconnected during the step
            return
        self._publish(session, batch)
        if session.queue.num_bytes > self._max_backlog_bytes:
            self._give_up(session, batch.time)

    def grant(self, session: ClientSession, num_batches: int) -> None:
        """Add credits for batches that the client has read, and send waiting batches."""
        self._tell(session, session.queue.grant, num_batches)

    def broadcast(self, last: Dead) -> None:
        """Send the message ``last`` to every client. Never raises."""
        frame = self._encoder.encode(Dead(plain_text(last.message), plain_text(last.traceback)))
        for session in self:
            self._offer(session.identity, frame)

    def has_backlog(self) -> bool:
        """True if a client has unsent messages."""
        return any(session.queue for session in self._by_identity.values())

    def deadlines(self) -> Iterator[float]:
        """The deadlines of all requests, in no particular order."""
        for session in self._by_identity.values():
            for times in session.live.values():
                yield from times

    # -- helpers

    def _probe(self, sessions: Iterable[ClientSession]) -> None:
        frame = self._encoder.encode(Probe())
        for session in list(sessions):
            self._tell(session, self._send, session.identity, frame)

    def _tell(self, session: ClientSession, act: Callable[..., object], *args: object) -> None:
        """Send to a client with ``act(*args)``. If it has disconnected, end its session."""
        try:
            act(*args)
        except ClientGoneError:
            self.leave(session)

    def _publish(self, session: ClientSession, batch: CoreOutputs) -> None:
        for piece in pieces_of(batch, self._encoder.encode):
            ids = piece.batch.request_ids
            if piece.fault:
                logger.warning("outputs of request %.80r cannot be sent: %s", ids[0], piece.fault)
                self._drop(ids)
            for started in piece.batch.started:
                session.work.start(ids[started.index])
            for end in piece.batch.finished:
                session.live.pop(ids[end.index], None)
                session.work.end(ids[end.index])
            self._tell(session, session.queue.publish, piece.frame, piece.batch)

    def _give_up(self, session: ClientSession, time: float) -> None:
        """Abort all requests of a client that does not read; only their ends are still sent."""
        ids = list(session.live)
        reason = (
            f"{session.queue.num_bytes} bytes of outputs waited for {session} to read them, "
            f"the limit is {self._max_backlog_bytes}"
        )
        logger.warning("%s: its %d requests are aborted", reason, len(ids))
        self._drop(ids)
        session.live.clear()
        session.work.clear()
        ends = session.queue.give_up(reason)
        ends += [(name, Finished(0, "abort", message=reason)) for name in ids]
        self._publish(session, with_ends(CoreOutputs([], [], [], time), ends))
        self._limit(session, session.queue.batch_bytes, "ends", self._max_backlog_bytes // 2)

    def _limit(self, session: ClientSession, num_bytes: int, of: str, limit: int) -> None:
        """Disconnect a client if ``num_bytes`` of unread messages exceed ``limit``. of: the kind of
        these messages, for the log."""
        if num_bytes <= limit:
            return
        reason = (
            f"{num_bytes} bytes of {of} waited for {session} to read them, the limit is {limit}: "
            "the core disconnected it"
        )
        logger.warning("%s", reason)
        self.leave(session)
        self._farewells[session.identity] = self._encoder.encode(Dead(reason))

    def _say_farewells(self) -> None:
        for identity, frame in list(self._farewells.items()):
            if self._offer(identity, frame):
                del self._farewells[identity]

    def _offer(self, identity: bytes, frame: bytes) -> bool:
        """Try to send a frame; it is dropped if the client is gone. False: the socket is full."""
        try:
            return self._send(identity, frame)
        except ClientGoneError:
            return True

    def _send(self, identity: bytes, frame: bytes) -> bool:
        """Try to send a frame. Returns False if the socket is full. Raises ``ClientGoneError`` if
        the client has disconnected."""
        try:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise ClientGoneError from error
        return True


@dataclass(slots=True)
class Waiting:
    """An encoded batch of outputs that is not sent yet; ``rows``: its outputs without tokens and
    vectors; ``pooled``: the rows that have vectors."""

    frame: bytes
    rows: CoreOutputs
    pooled: list[int]

    @property
    def num_bytes(self) -> int:
        return len(self.frame) + FRAME_BYTES

    def ids_with_results(self) -> set[str]:
        """The ids of requests with tokens or vectors in this batch."""
        ids, counts = self.rows.request_ids, self.rows.counts
        with_tokens = {name for i, name in enumerate(ids) if counts is None or counts[i]}
        return with_tokens.union(ids[row] for row in self.pooled)


class SendQueue:
    """Sends frames to one client in order, and counts unsent bytes. ``send(frame)`` returns False
    if the socket is full; the frame is then queued."""

    def __init__(self, send: Callable[[bytes], bool], num_credits: int = NUM_CREDITS) -> None:
        self.credits = num_credits
        self._max_credits = num_credits
        self.answer_bytes = 0
        self.batch_bytes = 0
        self._send = send
        self._answers: deque[bytes] = deque()
        self._batches: deque[Waiting] = deque()

    def __len__(self) -> int:
        """Number of unsent frames."""
        return len(self._answers) + len(self._batches)

    @property
    def num_bytes(self) -> int:
        """Number of unsent bytes."""
        return self.answer_bytes + self.batch_bytes

    @property
    def is_stuck(self) -> bool:
        """True if a frame is unsent because the socket is full, not for lack of a credit."""
        return bool(self._answers or (self._batches and self.credits))

    def answer(self, frame: bytes) -> None:
        """Send a frame that needs no credit, e.g. an answer; queue it while the socket is full."""
        if self._answers or not self._send(frame):
            self._answers.append(frame)
            self.answer_bytes += len(frame) + FRAME_BYTES

    def publish(self, frame: bytes, batch: CoreOutputs) -> None:
        """Send the encoded ``batch``; queue it if there is no credit or the socket is full."""
        if self.credits and not len(self) and self._send(frame):
            self.credits -= 1
            return
        rows = replace(
            batch, token_ids=[], started=[], logprobs={}, prompt_logprobs={}, pooled=None
        )
        pooled = [] if batch.pooled is None else batch.pooled.rows
        waiting = Waiting(frame, rows, pooled)
        self._batches.append(waiting)
        self.batch_bytes += waiting.num_bytes

    def grant(self, num_batches: int) -> None:
        """Let ``num_batches`` more batches be sent to the client, and send queued frames."""
        self.credits = min(self.credits + num_batches, self._max_credits)
        self.flush()

    def flush(self) -> None:
        """Send queued frames in order until the socket is full or no credits are left."""
        while self._answers and self._send(self._answers[0]):
            self.answer_bytes -= len(self._answers.popleft()) + FRAME_BYTES
        while self._batches and self.credits and not self._answers:
            if not self._send(self._batches[0].frame):
                return
            self.credits -= 1
            self.batch_bytes -= self._batches.popleft().num_bytes

    def give_up(self, reason: str) -> list[tuple[str, Finished]]:
        """Drop the unsent outputs. Returns (request id, end) for each end in them. If tokens or
        vectors of the request were dropped, its end becomes an abort with ``reason``."""
        ends: list[tuple[str, Finished]] = []
        lost: set[str] = set()
        for waiting in self._batches:
            lost |= waiting.ids_with_results()
            for end in waiting.rows.finished:
                name = waiting.rows.request_ids[end.index]
                ends.append((name, _aborted(end, reason) if name in lost else end))
        self._batches.clear()
        self.batch_bytes = 0
        return ends


def _aborted(end: Finished, reason: str) -> Finished:
    """A copy of a request's end, changed to an abort with ``reason`` since results were dropped."""
    return replace(end, reason="abort", stop_reason=None, message=reason)


Encode = Callable[[Struct], bytes]


class Piece(NamedTuple):
    """A part of a batch of outputs, encoded as one message."""

    frame: bytes
    batch: CoreOutputs
    fault: str = ""
    """Why the only request in ``batch`` fails; empty if it does not fail."""


def pieces_of(batch: CoreOutputs, encode: Encode) -> list[Piece]:
    """Encode a batch as one message, or several if it is too large or cannot be encoded.

    A request whose own outputs cannot be encoded ends with an error instead.
    """
    try:
        return [Piece(encode(Outputs(batch)), batch)]
    except WireError as error:
        fault = str(error)
    num_rows = len(batch.request_ids)
    if num_rows == 0:
        return []
    if num_rows == 1:
        end = Finished(0, "error", message=plain_text(fault))
        ending = CoreOutputs(batch.request_ids, [], [0], batch.time, finished=[end])
        return [Piece(encode(Outputs(ending)), ending, fault)]
    middle = num_rows // 2
    halves = (range(middle), range(middle, num_rows))
    return [piece for rows in halves for piece in pieces_of(pick_rows(batch, rows), encode)]
