"""The socket of a core's clients, without one."""

from __future__ import annotations

from typing import Any

import zmq

from engine.ipc.codec import MessageDecoder
from engine.messages.requests import CoreOutputs
from engine.messages.wire import Outputs, ToClient
from engine.rpc.sessions import ClientSession, ClientSessions


class Router:
    """Takes what is sent; clients in ``gone`` cannot be reached, those in ``full`` do not read."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.gone: set[bytes] = set()
        self.full: set[bytes] = set()
        self._decoder: MessageDecoder[Any] = MessageDecoder(ToClient)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if frames[0] in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if frames[0] in self.full:
            raise zmq.Again
        self.sent.append((frames[0], self._decoder.decode(frames[1:])))

    def batches(self) -> list[CoreOutputs]:
        return [message.batch for _, message in self.sent if isinstance(message, Outputs)]


def with_requests(peers: ClientSessions, identity: bytes, *names: str) -> ClientSession:
    peer = peers.welcome(identity, identity.decode())
    peer.live.update(dict.fromkeys(names, ()))
    return peer
