"""Readers who do not read: what waits for them is bounded, and the memory comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from engine.async_engine import AsyncLLMEngine
from engine.server.errors import ApiError

logger = logging.getLogger("engine.server")

MAX_UNREAD_BYTES = 256 << 10  # for one request, in addition to what its connection holds
MAX_TOTAL_BYTES = 64 << 20  # for all
LOOK_SECONDS = 1.0  # between two looks, at most


class Transport(Protocol):
    """The part of asyncio's transport that is needed here."""

    def get_write_buffer_size(self) -> int: ...
    def abort(self) -> None: ...
    def get_extra_info(self, name: str) -> Any: ...


class Connection(Protocol):
    """The part of uvicorn's connection that is needed here."""

    @property
    def transport(self) -> Transport: ...


class StalledWrite(NamedTuple):
    """Bytes that wait in a connection, and since when none of them has left."""

    size: int
    since: float


class SlowReaders:
    """Ends requests whose reader takes nothing for ``timeout`` seconds, and connections likewise;
    and requests for which more waits than ``MAX_UNREAD_BYTES``."""

    def __init__(
        self, engine: AsyncLLMEngine, connections: Iterable[Connection], timeout: float
    ) -> None:
        self._engine = engine
        self._connections = connections
        self._timeout = timeout
        self._stalled: dict[Connection, StalledWrite] = {}

    async def watch(self) -> None:
        """Look at them until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self._timeout / 4))
            try:
                self.look(time.monotonic())
            except Exception:  # as without file descriptors: look again later
                logger.exception("slow readers could not be looked at")

    def look(self, now: float) -> None:
        """Look at them once; ``now`` on any clock that goes on."""
        self._bound_unread()
        before, self._stalled = self._stalled, {}
        for connection in list(self._connections):
            size = connection.transport.get_write_buffer_size()
            if not size:
                continue
            earlier = before.get(connection)
            has_moved = earlier is None or size != earlier.size
            since = now if has_moved or earlier is None else earlier.since
            if now - since < self._timeout:
                self._stalled[connection] = StalledWrite(size, since)
                continue
            logger.warning(
                "a connection is cut, and its request aborted: nothing of %d bytes was read "
                "for %.0f s",
                size,
                now - since,
            )
            cut(connection.transport)

    def _bound_unread(self) -> None:
        """Give up the requests of the slowest readers."""
        unread = self._engine.unread_bytes()
        left = sum(unread.values())
        for name, size in sorted(unread.items(), key=lambda item: -item[1]):
            if size <= MAX_UNREAD_BYTES and left <= MAX_TOTAL_BYTES:
                break
            left -= size
            logger.warning("request %s is aborted: %d bytes of it are unread", name, size)
            error = ApiError(503, "the request was aborted: it was read too slowly", code="aborted")
            self._engine.give_up(error, [name])


def cut(transport: Transport) -> None:
    """Close a connection at once, here and for its client; the system keeps nothing of it."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
