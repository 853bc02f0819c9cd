"""The parent's handle of a text process: the program, its socket, its shared memory."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import zmq

from engine.errors import WireError
from engine.frontend.pool_tasks import Task
from engine.ipc.address import Directory
from engine.ipc.channel import Channel, Delivery
from engine.ipc.program import Program
from engine.ipc.shm import Arena, ArenaReader, create_memory
from engine.ipc.sockets import Socket, bind, close
from engine.messages.text import Ready, Reply, Role, StartText

PROGRAM = "engine.frontend.pool_process"


@dataclass(frozen=True)
class Asked:
    """How text processes are to be started. ``arena_bytes``: in each direction; 0 is none."""

    model: str
    tokenizer: str | None
    trust_remote_code: bool
    arena_bytes: int
    hang_seconds: float
    """A process that works on one task for longer, and longer than its text takes, is taken for
    hung and ended."""


class TextProcess:
    """A spawned process with its socket and its shared memory.

    Raises ``OSError``, ``zmq.ZMQError`` or ``ConfigError`` where the system has no room for it.
    """

    def __init__(self, context: zmq.Context[Socket], role: Role, asked: Asked) -> None:
        self.is_ready = False
        self._identity = b""
        self._token = secrets.token_bytes(16)
        with ExitStack() as opened:
            # Its socket has a name only until it is connected.
            self._directory = Directory.create()
            opened.callback(self._directory.remove)
            address = f"ipc://{self._directory.path}/text"
            self.socket = bind(context, address, None)
            opened.callback(close, self.socket)
            with ExitStack() as inherited:
                fds = []
                for _ in range(2 if asked.arena_bytes else 0):
                    fds.append(create_memory(asked.arena_bytes))
                    inherited.callback(os.close, fds[-1])
                self._channel = _channel(role, fds)
                opened.callback(self._channel.close)
                start = StartText(
                    role,
                    address,
                    self._token,
                    asked.model,
                    asked.tokenizer,
                    asked.trust_remote_code,
                    *fds,
                )
                self.program = Program(PROGRAM, msgspec.msgpack.encode(start), fds)
            opened.pop_all()

    def send(self, task: Task) -> None:
        """Raises ``WireError`` for a job that cannot travel."""
        frames = self._channel.pack(task.job, task.payloads)
        try:
            self.socket.send_multipart([self._identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise  # with these two the process is dead, which its descriptor shows

    def receive(self) -> Delivery[Reply] | None:
        """The next message; ``None`` if there is none. Raises ``WireError`` for invalid data."""
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if self.is_ready and identity != self._identity:
            raise WireError("another process sent a message to its socket")
        delivery = self._channel.unpack(frames)
        if isinstance(delivery.message, Ready):
            if self.is_ready or delivery.message.token != self._token:
                raise WireError("another process sent ready to its socket")
            self.is_ready = True
            self._identity = identity
            self._directory.remove()
        return delivery

    def close(self) -> None:
        self.program.close()
        close(self.socket)
        self._directory.remove()
        self._channel.close()


def _channel(role: Role, fds: list[int]) -> Channel[Reply]:
    if not fds:
        return Channel(Reply, None, None)
    own = Arena(fds[0], f"shared memory towards a {role} process")
    return Channel(Reply, own, ArenaReader(fds[1]))
