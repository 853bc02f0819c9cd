"""Cut connections of clients that stop reading, and limit the memory of unread output."""

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

MAX_UNREAD_BYTES = 256 << 10  # of one request, besides what its connection buffers
MAX_TOTAL_BYTES = 64 << 20  # of all requests
LOOK_SECONDS = 1.0  # most seconds between two checks


class Transport(Protocol):
    """The methods of asyncio's transport that are used here."""

    def get_write_buffer_size(self) -> int: ...
    def abort(self) -> None: ...
    def get_extra_info(self, name: str) -> Any: ...


class Connection(Protocol):
    """The attributes of uvicorn's connection that are used here."""

    @property
    def transport(self) -> Transport: ...


class StalledWrite(NamedTuple):
    """How many bytes a connection has not sent, and since when this has not changed."""

    size: int
    since: float


class SlowReaders:
    """Cuts connections whose client reads nothing for ``timeout`` seconds, and aborts requests
    whose unread output exceeds the limits (``MAX_UNREAD_BYTES``, ``MAX_TOTAL_BYTES``)."""

    def __init__(
        self, engine: AsyncLLMEngine, connections: Iterable[Connection], timeout: float
    ) -> None:
        self._engine = engine
        self._connections = connections
        self._timeout = timeout
        self._stalled: dict[Connection, StalledWrite] = {}

    async def watch(self) -> None:
        """Check for clients that stop reading and for too much unread output until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self._timeout / 4))
            try:
                self.look(time.monotonic())
            except Exception:  # for example no file descriptor is left: check again later
                logger.exception("slow readers could not be checked")

    def look(self, now: float) -> None:
        """Cut connections whose clients stopped reading, and limit unread output; now: seconds."""
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
                "a connection is cut, and its request aborted: the client has read none of %d "
                "bytes for %.0f s",
                size,
                now - since,
            )
            cut(connection.transport)

    def _bound_unread(self) -> None:
        """Abort requests, those with the most unread output first, until the limits are kept."""
        unread = self._engine.unread_bytes()
        left = sum(unread.values())
        for name, size in sorted(unread.items(), key=lambda item: -item[1]):
            if size <= MAX_UNREAD_BYTES and left <= MAX_TOTAL_BYTES:
                break
            left -= size
            logger.warning("request %s is aborted: its client has %d unread bytes", name, size)
            message = (
                f"the request was aborted: its client read too slowly, {size} bytes were unread"
            )
            self._engine.give_up(ApiError(503, message, code="aborted"), [name])


def cut(transport: Transport) -> None:
    """Reset a connection immediately, so that the system frees its buffers."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
