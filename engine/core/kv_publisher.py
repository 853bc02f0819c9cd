"""Cache events over ZeroMQ, for routers that send a prompt where its beginning is cached.

    PUB      [sequence, batch] once for each batch; what a slow listener cannot take is dropped
    ROUTER   [sequence] is answered with the batches from there on, a page at a time, and an end

Events hold the tokens of prompts, so the default is a socket file that only this user can open.
Batches travel as msgpack; nothing that comes in is decoded but a number.
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
from engine.observe.guard import Failures, Guard

PAGE = 500  # batches in one answer; below the 1000 messages that a socket queues for a listener
END = -1  # the sequence number after a page
SEQUENCE_BYTES = 8


def replay_endpoint(endpoint: str) -> str:
    """Where a publisher resends past batches: at a file next to its own, or on the next port."""
    if endpoint.startswith(IPC):
        return endpoint + "-replay"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"


class KVEventPublisher:
    """Publishes batches and remembers the last ``num_remembered``. Close it when done.

    ``endpoint`` may be ``None`` for a new socket file in a directory of its own. Raises
    ``ConfigError`` if the address cannot be had.
    """

    def __init__(
        self,
        endpoint: str | None,
        *,
        num_remembered: int = 10_000,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard or Guard(Failures(), "kv_events", "it is dropped")
        self._directory: Directory | None = None  # that only this user can enter
        if endpoint is None:
            self._directory = Directory.create()
            endpoint = f"{IPC}{self._directory.path}/kv-events"
        self.endpoint = endpoint
        self._past: deque[tuple[int, bytes]] = deque(maxlen=num_remembered)
        self._lock = threading.Lock()  # on _past
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._publisher = self._bind(zmq.PUB, self.endpoint)
        router = self._bind(zmq.ROUTER, replay_endpoint(self.endpoint))
        self._thread = threading.Thread(
            target=self._answer, args=(router,), name="kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Send and remember. Never waits, never raises: a failure is counted by the guard."""
        self._guard.run(self._publish, batch)

    def _publish(self, batch: KVEventBatch) -> None:
        payload = self._encoder.encode(batch)
        with self._lock:
            self._past.append((batch.sequence, payload))
        self._publisher.send_multipart([to_bytes(batch.sequence), payload], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets and end the thread; harmless when repeated."""
        if self._publisher.closed:
            return
        self._publisher.close(linger=0)
        self._context.term()  # the thread's socket raises, is closed there, and this returns
        self._thread.join()
        for endpoint in (self.endpoint, replay_endpoint(self.endpoint)):
            if endpoint.startswith(IPC):  # ZeroMQ does not remove the file
                Path(endpoint.removeprefix(IPC)).unlink(missing_ok=True)
        self._remove_directory()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        try:
            if _is_served(endpoint):  # ZeroMQ would take the file from its listener
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
                except Exception as error:  # later requests are still answered
                    self._guard.fail(error)
        router.close(linger=0)

    def _resend(self, router: zmq.Socket[bytes], who: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1 or len(frames[0]) != SEQUENCE_BYTES:
            return  # not one of ours
        start = from_bytes(frames[0])
        with self._lock:
            page = [item for item in self._past if item[0] >= start][:PAGE]
        for sequence, payload in page:
            router.send_multipart([who, to_bytes(sequence), payload])
        router.send_multipart([who, to_bytes(END), b""])


def _is_served(endpoint: str) -> bool:
    """Does a process listen at this socket file?"""
    if not endpoint.startswith(IPC):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix(IPC)) == 0


def to_bytes(sequence: int) -> bytes:
    """A sequence number on the wire."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def from_bytes(sequence: bytes) -> int:
    """A sequence number from the wire."""
    return int.from_bytes(sequence, "big", signed=True)
