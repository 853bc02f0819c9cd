"""ZeroMQ sockets: creation, limits, waking and closing.

Every queue is bounded, no frame is larger than ``MAX_MESSAGE_BYTES``, and TCP connections are
encrypted with keys derived from the shared secret. Only a process that can open the socket file, or
has the secret, can send messages.

A reader holds at most ``RECEIVE_QUEUE`` x ``MAX_MESSAGE_BYTES`` = 1 GiB of unread messages from one
sender. Exception: a message of several frames is not counted until it is complete.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress

import zmq
import zmq.utils.z85

from engine.errors import ConfigError
from engine.ipc.address import derive_key
from engine.ipc.codec import MAX_MESSAGE_BYTES

RECEIVE_QUEUE = 16  # unread messages per sender; further ones wait at the sender
SEND_QUEUE = 512  # messages to a client: all outputs with credits, and as many answers
MAX_CONNECTIONS = 1024
LINGER_MS = 1000  # time to send the last messages before a socket is closed
HANDSHAKE_MS = 5000
NEVER_MS = 1_000_000_000
TCP_HEARTBEAT_MS = 1000
TCP_SILENCE_MS = 3000
LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Socket = zmq.SyncSocket


def bind(
    context: zmq.Context[Socket],
    address: str,
    secret: str | None,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> Socket:
    """A listening ROUTER socket for frames of at most ``max_bytes``. Raises ``ConfigError`` if it
    cannot listen at the address."""
    router = _socket(context, zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected client is an error
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    router.setsockopt(zmq.BACKLOG, MAX_CONNECTIONS)
    if secret is not None:
        _notice_silence(router)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, zmq.utils.z85.encode(_server_key(secret)))
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close(0)
        raise ConfigError(f"cannot listen at {address}: {error}; choose another address") from error
    return router


def dealer(context: zmq.Context[Socket], secret: str | None) -> Socket:
    """A DEALER socket for one connection, not connected yet."""
    made = _socket(context, zmq.DEALER)
    # Holds all it may be sent, since messages still queued at the sender are lost when that ends.
    made.setsockopt(zmq.RCVHWM, SEND_QUEUE)
    # Never reconnect: it could be another core. (-1 would do this, too, but drops unread messages.)
    made.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    if secret is not None:
        _notice_silence(made)
        public, own = zmq.curve_keypair()
        made.setsockopt(zmq.CURVE_PUBLICKEY, public)
        made.setsockopt(zmq.CURVE_SECRETKEY, own)
        server = zmq.curve_public(zmq.utils.z85.encode(_server_key(secret)))
        made.setsockopt(zmq.CURVE_SERVERKEY, server)
    return made


def connect(
    context: zmq.Context[Socket],
    address: str,
    secret: str | None,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
    queue: int = SEND_QUEUE,
) -> tuple[Socket, Socket]:
    """A connected DEALER socket, and a socket that becomes readable when the connection is lost.

    It holds at most ``queue`` unread messages, with frames of at most ``max_bytes``. Keep the
    second socket open, and close it after the first. Raises ``ConfigError`` for an invalid
    address."""
    made = dealer(context, secret)
    made.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    made.setsockopt(zmq.RCVHWM, queue)
    lost = made.get_monitor_socket(LOST)
    try:
        made.connect(address)
    except (zmq.ZMQError, ValueError) as error:
        close(made, lost)
        raise ConfigError(f"cannot connect to {address!r}: {error}") from error
    return made, lost


def close(*sockets: Socket, linger_ms: int = 0) -> None:
    """Close sockets in the given order. May be repeated."""
    for each in sockets:
        if not each.closed:
            each.disable_monitor()  # first, since its events will not be read any more
            each.close(linger_ms)


def close_with(
    owner: object, context: zmq.Context[Socket], *sockets: Socket, waker: Waker | None = None
) -> None:
    """Close sockets and then their context if ``owner`` is garbage collected before it is closed.

    pyzmq closes them in arbitrary order; a context that is closed first waits for ever."""
    at_end = weakref.finalize(owner, _close_all, os.getpid(), context, sockets, waker)
    at_end.atexit = False  # threads may still use them


class Waker:
    """Wakes a thread that polls ``fd``. Any thread or signal handler may use it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    @property
    def fd(self) -> int:
        """File descriptor that is readable after ``wake``."""
        return self._reader.fileno()

    @property
    def signal_fd(self) -> int:
        """File descriptor for ``signal.set_wakeup_fd``."""
        return self._writer.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # full, so the thread is awake already; or closed
            self._writer.send(b"!")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def _close_all(
    owner: int, context: zmq.Context[Socket], sockets: Sequence[Socket], waker: Waker | None
) -> None:
    if waker is not None:
        waker.close()
    if os.getpid() != owner:  # a forked copy does not own the sockets
        return
    close(*sockets)
    context.term()


def _socket(context: zmq.Context[Socket], role: int) -> Socket:
    made = context.socket(role)
    made.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    made.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.LINGER, 0)
    return made


def _notice_silence(tcp: Socket) -> None:
    """Detect hosts that vanish without closing their TCP connections, by keep-alive messages."""
    tcp.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
    tcp.setsockopt(zmq.HEARTBEAT_TIMEOUT, TCP_SILENCE_MS)


def _server_key(secret: str) -> bytes:
    return derive_key(secret, "server")
