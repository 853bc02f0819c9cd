"""The clients of a core: what each may still be sent, and what it has at the core.

A client grants credits for batches of outputs as it reads them. Without credits its batches wait
here, up to ``max_backlog_bytes``; a client that lets more wait loses its requests, by name, and
nobody else notices.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from engine.errors import WireError
from engine.ipc.codec import Encoder
from engine.ipc.sockets import Socket
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.wire import Outputs, Probe, ToClient

logger = logging.getLogger("engine.core")

NUM_CREDITS = 256  # batches that may be on their way to a client
MAX_BACKLOG_BYTES = 64 << 20
MAX_NAME = 80  # characters of a client's name that are kept
Deadlines = tuple[float, ...]


@dataclass
class Peer:
    """A client that was welcomed."""

    identity: bytes
    index: int
    name: str
    credits: int = NUM_CREDITS
    live: dict[str, Deadlines] = field(default_factory=dict)
    """Its requests at the core, and when they end or may no longer start."""
    backlog: deque[bytes] = field(default_factory=deque)
    """Batches that wait for credits."""
    backlog_bytes: int = 0

    def __str__(self) -> str:
        return f"client {self.index} ({self.name})" if self.name else f"client {self.index}"


class Peers:
    """Who is there, and the way to them. ``end`` aborts requests at the core."""

    def __init__(
        self,
        router: Socket,
        end: Callable[[list[str]], object],
        *,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        self._router = router
        self._end = end
        self._max_backlog_bytes = max_backlog_bytes
        self._encoder = Encoder()
        self._by_identity: dict[bytes, Peer] = {}
        self._by_index: dict[int, Peer] = {}
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def welcome(self, identity: bytes, name: str) -> Peer:
        """A new client; those that vanished without a word are forgotten first."""
        for peer in self:
            self.send(peer.identity, Probe())
        shown = "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME])
        peer = Peer(identity, self._num_seen, shown)
        self._num_seen += 1
        self._by_identity[identity] = self._by_index[peer.index] = peer
        return peer

    def leave(self, peer: Peer) -> None:
        """It has gone: what it had at the core ends, what waits for it is dropped."""
        self._by_identity.pop(peer.identity, None)
        self._by_index.pop(peer.index, None)
        if peer.live:
            logger.info("%s has gone; its %d requests are aborted", peer, len(peer.live))
            self._end(list(peer.live))
            peer.live.clear()

    def send(self, identity: bytes, message: ToClient) -> None:
        """Send what costs no credit. Who cannot take it has gone, or does not read."""
        if not self._send(identity, self._encoder.encode(message)):
            peer = self.get(identity)
            if peer is not None:
                self.leave(peer)

    def publish(self, index: int, batch: CoreOutputs) -> None:
        """Send a client what a step brought for it, now or when it has read enough."""
        peer = self._by_index.get(index)
        if peer is None:  # it left while its step was computed
            return
        try:
            frame = self._encoder.encode(Outputs(batch))
        except WireError as error:
            batch = self._without_details(batch, str(error))
            frame = self._encoder.encode(Outputs(batch))
        for end in batch.finished:
            peer.live.pop(batch.request_ids[end.index], None)
        if peer.credits and not peer.backlog:
            self._spend(peer, frame)
        else:
            self._keep(peer, frame, batch.time)

    def grant(self, peer: Peer, num_batches: int) -> None:
        """The client has read so many batches."""
        peer.credits = min(peer.credits + num_batches, NUM_CREDITS)
        while peer.credits and peer.backlog:
            frame = peer.backlog.popleft()
            peer.backlog_bytes -= len(frame)
            self._spend(peer, frame)

    def broadcast(self, message: ToClient) -> None:
        """Tell everybody."""
        for peer in self:
            self.send(peer.identity, message)

    def has_backlog(self) -> bool:
        """Does anything wait for somebody to read?"""
        return any(peer.backlog for peer in self)

    def deadlines(self) -> Iterator[float]:
        """When requests end or may no longer start, in no particular order."""
        for peer in self._by_identity.values():
            for times in peer.live.values():
                yield from times

    def _spend(self, peer: Peer, frame: bytes) -> None:
        peer.credits -= 1
        if not self._send(peer.identity, frame):
            self.leave(peer)

    def _keep(self, peer: Peer, frame: bytes, time: float) -> None:
        peer.backlog.append(frame)
        peer.backlog_bytes += len(frame)
        if peer.backlog_bytes > self._max_backlog_bytes:
            self._give_up(peer, time)

    def _give_up(self, peer: Peer, time: float) -> None:
        """End the requests of a client that does not read, and keep only that for it."""
        waiting, ids = peer.backlog_bytes, list(peer.live)
        reason = (
            f"{waiting} bytes of outputs waited for {peer} to read them, the limit is "
            f"{self._max_backlog_bytes}"
        )
        logger.warning("%s: its %d requests are aborted", reason, len(ids))
        self._end(ids)
        peer.live.clear()
        ends = [Finished(i, "abort", message=reason) for i in range(len(ids))]
        last = CoreOutputs(ids, [], [0] * len(ids), time, finished=ends)
        peer.backlog = deque([self._encoder.encode(Outputs(last))])
        peer.backlog_bytes = 0

    def _without_details(self, batch: CoreOutputs, why: str) -> CoreOutputs:
        """A batch that is too large, less its log-probabilities: who wanted them fails."""
        rows = sorted(batch.logprobs.keys() | batch.prompt_logprobs.keys())
        logger.warning("outputs of %d requests cannot be sent: %s", len(rows), why)
        self._end([batch.request_ids[row] for row in rows])
        ends = [end for end in batch.finished if end.index not in rows]
        ends += [Finished(row, "error", message=f"log-probabilities: {why}") for row in rows]
        return msgspec.structs.replace(batch, logprobs={}, prompt_logprobs={}, finished=ends)

    def _send(self, identity: bytes, frame: bytes) -> bool:
        try:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH: it has gone; EAGAIN: it does not read
            return False
        return True
