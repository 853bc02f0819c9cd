"""Publishes prefix-cache events over ZeroMQ, for routers that choose a core by cached prefix.

    PUB      sends [topic, sequence, batch] for each; batches for a slow subscriber are dropped
    ROUTER   receives ["", sequence], replies with ["", topic, sequence, batch] for each batch from
             there on, and ["", "", -1, ""]

Sequence numbers have eight bytes, big-endian. Batches are sent as msgpack. They contain prompt
tokens, so by default the socket is a file that only its user can open. From subscribers, nothing
but a sequence number is decoded.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from engine.errors import ConfigError
from engine.ipc.address import IPC, Directory
from engine.messages.kv_events import KVEventBatch
from engine.observe.guard import Failures, ObserverGuard

END = -1  # the sequence number after the last batch of a reply
SEQUENCE_BYTES = 8
ROOM = 100_000  # batches that wait for a subscriber that reads slowly
SPARE_MESSAGES = 100  # that a socket queues for a subscriber, in addition to the past batches


def events_endpoint(endpoint: str, rank: int) -> str:
    """Address of the core number ``rank``: the socket file with the number appended, or the TCP
    port that is higher by the number. The core 0 has ``endpoint`` itself."""
    if not rank:
        return endpoint
    return f"{endpoint}-{rank}" if endpoint.startswith(IPC) else _next_port(endpoint, rank)


def replay_endpoint(endpoint: str, num_ranks: int = 1) -> str:
    """Address at which subscribers request past batches: the core's socket file with the suffix
    "-replay", or the TCP port that is higher by the number of cores."""
    if endpoint.startswith(IPC):
        return endpoint + "-replay"
    return _next_port(endpoint, num_ranks)


def _next_port(endpoint: str, distance: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + distance}"


class KVEventPublisher:
    """Publishes batches of prefix-cache events, and keeps the last ``num_remembered`` for replay.

    ``endpoint``: that of the core 0, ``None`` for a new socket file in a new private directory.
    ``topic``: sent with each batch, for subscribers that filter. ``rank``, ``num_ranks``: number of
    this core, and of all that share ``endpoint``. Raises ``ConfigError`` if the address cannot be
    used. Call ``close`` at the end."""

    def __init__(
        self,
        endpoint: str | None,
        *,
        topic: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        num_remembered: int = 10_000,
        guard: ObserverGuard | None = None,
    ) -> None:
        self._guard = guard or ObserverGuard(Failures(), "kv_events", "it is dropped")
        self._directory: Directory | None = None  # private directory of the socket file
        if endpoint is None:
            self._directory = Directory.create()
            endpoint = f"{IPC}{self._directory.path}/kv-events"
            rank = 0
        self.endpoint = events_endpoint(endpoint, rank)
        self.replay_endpoint = replay_endpoint(self.endpoint, num_ranks)
        self._topic = topic.encode()
        self._num_sent = 0
        self._past: deque[tuple[int, bytes]] = deque(maxlen=num_remembered)
        self._lock = threading.Lock()  # on _past
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._publisher = self._bind(zmq.PUB, self.endpoint)
        room = num_remembered + SPARE_MESSAGES
        router = self._bind(zmq.ROUTER, self.replay_endpoint, room)
        self._thread = threading.Thread(
            target=self._answer, args=(router,), name="kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Send a batch and store it for replay. Never waits and never raises: failures are
        counted."""
        self._guard.run(self._publish, batch)

    def _publish(self, batch: KVEventBatch) -> None:
        sequence, self._num_sent = self._num_sent, self._num_sent + 1
        payload = self._encoder.encode(batch)
        with self._lock:
            self._past.append((sequence, payload))
        self._publisher.send_multipart([self._topic, to_bytes(sequence), payload], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets and end the thread. May be repeated."""
        if self._publisher.closed:
            return
        self._publisher.close(linger=0)
        self._context.term()  # makes the thread's socket raise; the thread closes it
        self._thread.join()
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint.startswith(IPC):  # ZeroMQ does not remove the file
                Path(endpoint.removeprefix(IPC)).unlink(missing_ok=True)
        self._remove_directory()

    def _bind(self, kind: int, endpoint: str, room: int = ROOM) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, room)
        try:
            if _is_served(endpoint):  # ZeroMQ would take over another process's socket file
                raise zmq.ZMQError(errno.EADDRINUSE)
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._remove_directory()
            raise ConfigError(
                f"kv_events_endpoint: cannot listen at {endpoint}: {error}; choose another address"
            ) from error
        return bound

    def _remove_directory(self) -> None:
        if self._directory is not None:
            self._directory.remove()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        with suppress(zmq.ContextTerminated):
            while True:
                who, *frames = router.recv_multipart()
                try:
                    self._resend(router, who, frames)
                except zmq.ContextTerminated:
                    raise
                except Exception as error:  # later requests must still be answered
                    self._guard.fail(error)
        router.close(linger=0)

    def _resend(self, router: zmq.Socket[bytes], who: bytes, frames: list[bytes]) -> None:
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
            return  # not a valid request
        start = from_bytes(frames[1])
        with self._lock:
            past = [item for item in self._past if item[0] >= start]
        for sequence, payload in past:
            router.send_multipart([who, b"", self._topic, to_bytes(sequence), payload])
        router.send_multipart([who, b"", b"", to_bytes(END), b""])


def _is_served(endpoint: str) -> bool:
    """True if a process listens at this socket file."""
    if not endpoint.startswith(IPC):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix(IPC)) == 0


def to_bytes(sequence: int) -> bytes:
    """Encode the sequence number of a batch in 8 bytes."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def from_bytes(sequence: bytes) -> int:
    """Decode the sequence number of a batch from 8 bytes."""
    return int.from_bytes(sequence, "big", signed=True)
