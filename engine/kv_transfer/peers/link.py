"""PeerLink: one connection to a server of KV blocks, for one transfer at a time."""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash
import zmq

from engine.errors import WireError
from engine.ipc import sockets
from engine.ipc.address import Address
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.ipc.sealed_files import create, seal
from engine.kv_transfer.peers.messages import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    SEGMENT,
    Free,
    FromConsumer,
    FromServer,
    Join,
    Joined,
    Leave,
    LentSlots,
    Pull,
    Refused,
    Sent,
    num_slots_of,
)
from engine.kv_transfer.peers.transports import Transport
from engine.kv_transfer.stores import Rows, StoreIdentity

POLL_SECONDS = 0.05  # between two looks whether the transfer was given up
MAX_REASON = 400  # characters of a server's reason
LEAVE_MS = 100  # time to send the last message


class LinkError(Exception):
    """A transfer that has failed. ``cause``: its name in counters."""

    def __init__(self, cause: str, why: str) -> None:
        super().__init__(why)
        self.cause = cause


class Wanted(NamedTuple):
    """Blocks to pull: ``keys[i]`` to ``rows[places[i]]``; then ``found[places[i]]`` becomes
    true."""

    keys: Sequence[bytes]
    places: Sequence[int]
    rows: Rows
    found: list[bool]

    def rest(self) -> Wanted:
        """The blocks that have not been found."""
        left = [i for i, place in enumerate(self.places) if not self.found[place]]
        return self._replace(
            keys=[self.keys[i] for i in left], places=[self.places[i] for i in left]
        )


class SharedSlots:
    """Slots of this process, into which a server writes: ``rows`` [num_slots, block_bytes]."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """Raises ``OSError`` if the system has no shared memory of this kind."""
        size = num_slots * block_bytes
        fd = create(SEGMENT, size)
        self.close = weakref.finalize(self, os.close, fd)
        self.handle = seal(fd, can_be_written=True)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.rows: Rows = np.frombuffer(memory, np.uint8).reshape(num_slots, block_bytes)


class FetchedSlots:
    """Slots of a server, which a transport copies to ``rows`` [num_slots, block_bytes]."""

    def __init__(self, transport: Transport, lent: LentSlots, shape: tuple[int, int]) -> None:
        """Raises ``OSError`` if the transport has no memory."""
        self._transport = transport
        self._lent = lent
        self.rows: Rows = transport.lend(shape[0] * shape[1]).data.reshape(shape)

    def fetch(self, first: int, count: int, is_over: Callable[[], bool]) -> bool:
        """Copy ``count`` slots from ``first`` on. False if it fails or is over."""
        return self._transport.read(
            self._lent.session,
            self._lent.address + first * self.rows.shape[1],
            self.rows[first : first + count].reshape(-1),
            is_over,
        )


class Offer(NamedTuple):
    """How a consumer can get blocks. ``window_bytes``: that the server sends ahead."""

    window_bytes: int
    shares_memory: bool
    transport: Transport | None


class PeerLink:
    """Pulls blocks from one server. For one thread at a time. After a ``LinkError`` the link can
    only be closed."""

    def __init__(
        self,
        context: zmq.Context[sockets.Socket],
        address: Address,
        identity: StoreIdentity,
        offer: Offer,
        is_given_up: Callable[[], bool],
    ) -> None:
        """is_given_up: whether to end, which is looked at while waiting. Raises ``ConfigError`` for
        an invalid address."""
        self._identity = identity
        self._offer = offer
        self._is_given_up = is_given_up
        self._num_slots = num_slots_of(identity.block_bytes, offer.window_bytes)
        self._slots: SharedSlots | FetchedSlots | None = None
        self._number = 0
        self._is_sound = False
        self._decoder: MessageDecoder[FromServer] = MessageDecoder(FromServer)
        self._encoder = MessageEncoder(MAX_REQUEST_BYTES)
        self._token = address.token
        self._dealer, self._lost = sockets.connect(
            context,
            address.data,
            address.secret,
            max_bytes=max(identity.block_bytes, CHUNK_BYTES, MAX_HEADER_BYTES),
            queue=self._num_slots + 1,
        )
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._lost, zmq.POLLIN)

    def join(self, deadline: float) -> None:
        """Be accepted by the server. deadline: by the monotonic clock. Raises ``LinkError``."""
        shared, transport = None, self._offer.transport
        if self._offer.shares_memory:
            with suppress(OSError):
                shared = SharedSlots(self._num_slots, self._identity.block_bytes)
        self._send(
            Join(
                PROTOCOL_VERSION,
                self._token,
                self._identity,
                self._num_slots,
                None if shared is None else shared.handle,
                "" if transport is None else transport.name,
            )
        )
        joined, frames = self._receive(deadline)
        if not isinstance(joined, Joined) or frames or joined.num_slots > self._num_slots:
            raise LinkError("damaged", f"it did not accept this engine, but sent {joined!r:.200}")
        if joined.shares_memory:
            if shared is None or joined.num_slots < self._num_slots:
                raise LinkError("damaged", "it shares memory that was not offered")
            self._slots = shared
        elif joined.lent is not None:
            if transport is None:
                raise LinkError("damaged", "it uses a transport that was not offered")
            shape = joined.num_slots, self._identity.block_bytes
            try:
                self._slots = FetchedSlots(transport, joined.lent, shape)
            except OSError as error:
                raise LinkError("lost", str(error)) from error
        self._num_slots = joined.num_slots
        self._is_sound = True

    def pull(self, wanted: Wanted, wait_seconds: float, deadline: float) -> int:
        """Copy blocks that the server has, or gets within ``wait_seconds``.

        Returns the number of damaged blocks. Raises ``LinkError`` if the transfer fails or is not
        complete at ``deadline``; then some blocks may have been found."""
        self._is_sound = False
        self._number += 1
        self._send(Pull(self._number, list(wanted.keys), wait_seconds))
        num_done = num_damaged = 0
        while num_done < len(wanted.keys):
            sent, frames = self._receive(deadline)
            if not isinstance(sent, Sent) or (sent.number, sent.first) != (self._number, num_done):
                raise LinkError("damaged", f"it sent {sent!r:.200} in place of block {num_done}")
            end = num_done + len(sent.found)
            if end > len(wanted.keys) or len(sent.sums) != sum(sent.found):
                raise LinkError("damaged", f"it sent {end} blocks of {len(wanted.keys)}")
            num_damaged += _copy(sent, self._sources(sent, frames, deadline), wanted)
            self._send(Free(len(sent.found)))
            num_done = end
        self._is_sound = True
        return num_damaged

    def close(self) -> None:
        """May be repeated."""
        if self._is_sound:
            with suppress(LinkError):
                self._send(Leave())
        sockets.close(self._dealer, self._lost, linger_ms=LEAVE_MS if self._is_sound else 0)
        self._is_sound = False
        self._slots = None

    # -- helpers

    def _sources(self, sent: Sent, frames: list[zmq.Frame], deadline: float) -> list[Rows]:
        """The blocks that were found, where they have arrived."""
        if self._slots is not None:
            first, count = sent.first % self._num_slots, len(sent.found)
            if frames or first + count > self._num_slots:
                raise LinkError("damaged", "it sent blocks that are not in its slots")
            if isinstance(self._slots, FetchedSlots) and sent.sums:
                self._fetch(self._slots, first, count, deadline)
            rows = self._slots.rows[first : first + count]
            return [row for row, one in zip(rows, sent.found, strict=True) if one]
        shape = (len(sent.sums), self._identity.block_bytes)
        if len(frames) != 1 or len(frames[0]) != shape[0] * shape[1]:
            got = [len(frame) for frame in frames[:2]]
            raise LinkError("damaged", f"it sent frames of {got} bytes for {shape[0]} blocks")
        return list(np.frombuffer(frames[0].buffer, np.uint8).reshape(shape))

    def _fetch(self, slots: FetchedSlots, first: int, count: int, deadline: float) -> None:
        def is_over() -> bool:
            return time.monotonic() > deadline or self._is_given_up()

        if not slots.fetch(first, count, is_over):
            raise LinkError(
                "late" if is_over() else "lost", "the transport did not read its blocks"
            )

    def _send(self, message: FromConsumer) -> None:
        try:
            self._dealer.send(self._encoder.encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, WireError) as error:
            raise LinkError("lost", f"nothing can be sent to it: {error}") from error

    def _receive(self, deadline: float) -> tuple[FromServer, list[zmq.Frame]]:
        """The next message, and its other frames."""
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poller.poll(math.ceil(1000 * max(0.0, min(left, POLL_SECONDS)))))
            if self._dealer in ready:
                break
            if self._lost in ready:
                raise LinkError("lost", "the connection was refused or lost")
            if self._is_given_up():
                raise LinkError("given_up", "the transfer was given up")
            if left <= 0:
                raise LinkError("late", "it did not answer in time")
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            message = self._decoder.decode([frames[0].bytes])
        except (WireError, zmq.ZMQError) as error:
            raise LinkError("damaged", f"it sent no message: {error}") from error
        if isinstance(message, Refused):
            raise LinkError("refused", message.reason[:MAX_REASON])
        return message, frames[1:]


def _copy(sent: Sent, sources: Sequence[Rows], wanted: Wanted) -> int:
    """Copy blocks to their rows. Returns the number of those with a wrong checksum."""
    num_damaged = 0
    places = [wanted.places[sent.first + index] for index, one in enumerate(sent.found) if one]
    for place, source, checksum in zip(places, sources, sent.sums, strict=True):
        row = wanted.rows[place]
        row[:] = source
        # The copy is checked, since the server could still change what it shares.
        is_right = xxhash.xxh3_64_intdigest(row.data) == checksum
        wanted.found[place] = is_right
        num_damaged += not is_right
    return num_damaged
