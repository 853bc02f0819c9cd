"""BlockServer: gives the KV blocks of this engine to others, by key.

One thread serves all consumers in turn, a chunk of blocks each. It reads blocks with a
``BlockReader`` into the consumer's slots, or sends them as messages of at most ``window_bytes``
that the consumer has not freed. ``messages`` describes the protocol.
"""

from __future__ import annotations

import hmac
import logging
import math
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import zmq

from engine.errors import ConfigError, WireError
from engine.ipc import sockets
from engine.ipc.address import Address, Directory
from engine.ipc.codec import MessageDecoder, MessageEncoder, plain_text
from engine.ipc.sealed_files import SealedFile, is_there, open_sealed
from engine.kv_transfer.peers.messages import (
    MAX_BLOCK_BYTES,
    MAX_REQUEST_BYTES,
    MAX_SHARED_BYTES,
    MAX_WAIT_SECONDS,
    PROTOCOL_VERSION,
    SEGMENT,
    Free,
    FromConsumer,
    Join,
    Joined,
    Leave,
    LentSlots,
    Pace,
    Pull,
    Refused,
    Sent,
    checksums,
    chunk_blocks,
    num_slots_of,
)
from engine.kv_transfer.peers.transports import Lent, Transport
from engine.kv_transfer.stores import Rows, StoreIdentity
from engine.observe.logs import Throttle

RETRY_SECONDS = 0.01  # between two looks for a block that may still be computed
MAX_ARRIVALS = 100  # messages that are handled before the next chunks are sent
COUNTED = ("sent", "missing", "refused", "lost", "slow", "failed")
logger = logging.getLogger("engine.kv_transfer")


class ServerLimits(NamedTuple):
    """``pace``: how slow transfers may be. ``window_bytes``: of blocks for a consumer, in
    messages or lent memory. ``sweep_seconds``: between two searches for consumers that have ended
    or are slow. ``close_seconds``: that a read may still take when the server is closed."""

    pace: Pace = Pace()
    window_bytes: int = 8 << 20
    max_consumers: int = 64
    sweep_seconds: float = 1.0
    close_seconds: float = 5.0


LIMITS = ServerLimits()


class BlockReader(Protocol):
    """What a server reads blocks from, such as a ``BlockStore``. Called by the server's thread."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys it has."""

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        """Copy the blocks with these keys into ``rows``. False: it does not have the block."""


@dataclass
class Consumer:
    """An engine that has joined. ``rows``: its slots, ``None`` if it gets messages. ``memory``: of
    these, if it shares them. ``lent``: memory of this engine that they are in."""

    identity: bytes
    num_slots: int
    rows: Rows | None
    memory: SealedFile | None
    lent: Lent | None
    last_at: float
    """When its last message came."""
    pull: Pull | None = None
    num_done: int = 0
    """Keys of the pull that are answered."""
    num_taken: int = 0
    """Slots that it has not freed."""
    wait_until: float = 0.0
    deadline: float = 0.0
    """When the transfer must be complete."""

    @property
    def is_busy(self) -> bool:
        return self.pull is not None or self.num_taken > 0

    @property
    def has_ended(self) -> bool:
        """True if its process has closed its shared memory."""
        return self.memory is not None and not is_there(self.memory)


class BlockServer:
    """Serves blocks of one identity at one address until it is closed."""

    def __init__(
        self,
        reader: BlockReader,
        identity: StoreIdentity,
        address: Address | None = None,
        *,
        coming: Callable[[bytes], bool] | None = None,
        transport: Transport | None = None,
        limits: ServerLimits = LIMITS,
    ) -> None:
        """address: as of ``tcp_address``; ``None`` for a socket file that only this user can open.
        coming: whether a block that the reader lacks may still come; by default a consumer waits as
        long as it likes. transport: for consumers that have it, too; the caller closes it. Raises
        ``ConfigError`` if the address is in use, or blocks are too large to be sent."""
        if not 0 < identity.block_bytes <= MAX_BLOCK_BYTES:
            raise ConfigError(
                f"a block has {identity.block_bytes} bytes, the limit for sending it to another "
                f"engine is {MAX_BLOCK_BYTES}; use a smaller block_size"
            )
        self._reader = reader
        self._identity = identity
        self._coming = coming
        self._limits = limits
        self._num_slots = num_slots_of(identity.block_bytes, limits.window_bytes)
        self._transport = transport
        self._lent: list[Lent] = []  # that no consumer uses
        self._directory = None
        if address is None:
            self._directory = Directory.create()
            address = self._directory.address
        self._where = address
        self._consumers: dict[bytes, Consumer] = {}
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._buffer: Rows = np.empty(
            (chunk_blocks(identity.block_bytes), identity.block_bytes), np.uint8
        )
        self._decoder: MessageDecoder[FromConsumer] = MessageDecoder(FromConsumer)
        self._encoder = MessageEncoder()
        self._complaints = Throttle()
        self._context: zmq.Context[sockets.Socket] = zmq.Context()
        try:
            self._router = sockets.bind(
                self._context, self._where.data, self._where.secret, max_bytes=MAX_REQUEST_BYTES
            )
        except ConfigError:
            self._context.term()
            raise
        self._waker = sockets.Waker()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="block server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where consumers connect."""
        return self._where.data

    def wake(self) -> None:
        """Look again for blocks for which consumers wait. Any thread may call it."""
        self._waker.wake()

    def counts(self) -> dict[str, int]:
        """Counters since the start: blocks ``sent``, keys ``missing``; consumers that were
        ``refused``, ``lost`` during a transfer or too ``slow``; ``failed`` reads. And
        ``num_consumers`` now."""
        return {**self._counts, "num_consumers": len(self._consumers)}

    def close(self) -> None:
        """End the thread and all transfers, and remove the socket file. May be repeated."""
        if self._is_closing:
            return
        self._is_closing = True
        self._waker.wake()
        self._thread.join(self._limits.close_seconds)
        if self._thread.is_alive():  # it ends when the reader returns
            logger.warning(
                "blocks for another engine are still being read after %g s",
                self._limits.close_seconds,
            )
        if self._directory is not None:
            self._directory.remove()

    # -- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        sweep_at = time.monotonic() + self._limits.sweep_seconds
        try:
            while not self._is_closing:
                if not self._send_chunks():
                    waits = any(c.pull is not None for c in self._consumers.values())
                    seconds = RETRY_SECONDS if waits else self._limits.sweep_seconds
                    poller.poll(math.ceil(1000 * seconds))
                    self._waker.clear()
                self._receive()
                if (now := time.monotonic()) >= sweep_at:
                    self._sweep(now)
                    sweep_at = now + self._limits.sweep_seconds
        finally:  # so that consumers notice, whatever has happened
            self._consumers.clear()
            sockets.close(self._router)
            self._context.term()
            self._waker.close()

    def _receive(self) -> None:
        for _ in range(MAX_ARRIVALS):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(identity, self._decoder.decode(frames))
            except WireError as error:
                self._refuse(identity, str(error))

    def _take(self, identity: bytes, message: FromConsumer) -> None:
        """Handle a message. Raises ``WireError`` if the consumer must be refused."""
        now = time.monotonic()
        if isinstance(message, Join):
            self._join(identity, message, now)
            return
        consumer = self._consumers.get(identity)
        if consumer is None:
            if isinstance(message, Pull):
                raise WireError("a consumer joins before it pulls")
            return
        consumer.last_at = now
        match message:
            case Pull():
                self._begin(consumer, message, now)
            case Free(count=count):
                if count > consumer.num_taken:
                    raise WireError(f"{count} slots were freed, {consumer.num_taken} are taken")
                consumer.num_taken -= count
            case Leave():
                self._lose(consumer)

    def _join(self, identity: bytes, join: Join, now: float) -> None:
        if join.version != PROTOCOL_VERSION:
            raise WireError(
                f"the consumer's protocol has version {join.version}, this engine's "
                f"{PROTOCOL_VERSION}"
            )
        if not hmac.compare_digest(join.token, self._where.token):
            raise WireError("wrong token")
        for name, wanted, own in zip(
            StoreIdentity._fields, join.identity, self._identity, strict=True
        ):
            if wanted != own:
                raise WireError(
                    f"blocks have {name} {own!r}, not {plain_text(repr(wanted)):.80}: both engines "
                    "need the same model files, dtype, block_size, draft model and version"
                )
        self._drop(identity)  # which may have joined before
        self._make_room()
        num_slots, rows, lent = join.num_slots, self._map(join), None
        memory = None if rows is None else join.memory
        if rows is None:
            num_slots = min(num_slots, self._num_slots)
            lent = self._lend(join.transport)
            rows = None if lent is None else lent.data.reshape(self._num_slots, -1)[:num_slots]
        self._consumers[identity] = Consumer(identity, num_slots, rows, memory, lent, now)
        slots = None
        if lent is not None and self._transport is not None:
            slots = LentSlots(self._transport.session, lent.address)
        self._send_frames(
            identity, [self._encoder.encode(Joined(num_slots, memory is not None, slots))]
        )

    def _lend(self, transport: str) -> Lent | None:
        """Slots for a consumer with this transport; ``None`` if this engine has another one, or
        no memory."""
        if self._transport is None or transport != self._transport.name:
            return None
        if self._lent:
            return self._lent.pop()
        try:
            return self._transport.lend(self._num_slots * self._identity.block_bytes)
        except OSError as error:
            self._complain("a consumer gets messages: %s", str(error))
            return None

    def _make_room(self) -> None:
        """Drop the consumer that was idle for longest if there are too many. Raises ``WireError``
        if none is idle."""
        if len(self._consumers) < self._limits.max_consumers:
            return
        idle = [c for c in self._consumers.values() if not c.is_busy]
        if not idle:
            raise WireError(
                f"{self._limits.max_consumers} consumers read blocks now, which is the limit"
            )
        self._lose(min(idle, key=lambda c: c.last_at))

    def _map(self, join: Join) -> Rows | None:
        """The consumer's slots; ``None`` if it has no shared memory that this process can open."""
        if join.memory is None:
            return None
        size = join.num_slots * self._identity.block_bytes
        if not join.memory.size == size <= MAX_SHARED_BYTES:
            raise WireError(
                f"{join.memory.size} bytes of shared memory for {join.num_slots} slots, must be "
                f"{size} and at most {MAX_SHARED_BYTES}"
            )
        try:
            fd = open_sealed(join.memory, SEGMENT, to_write=True)
        except WireError:
            return None
        try:
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            return None
        finally:
            os.close(fd)
        return np.frombuffer(memory, np.uint8).reshape(join.num_slots, -1)

    def _begin(self, consumer: Consumer, pull: Pull, now: float) -> None:
        if consumer.pull is not None or consumer.num_taken:
            raise WireError("a consumer pulls again when its last transfer is complete")
        wait = min(max(0.0, pull.wait_seconds), MAX_WAIT_SECONDS)
        consumer.pull, consumer.num_done = pull, 0
        consumer.wait_until = now + wait
        num_bytes = len(pull.keys) * self._identity.block_bytes
        consumer.deadline = consumer.wait_until + self._limits.pace.seconds(num_bytes)

    def _send_chunks(self) -> bool:
        """Send a chunk to each consumer that has free slots. False: there was nothing to send."""
        has_sent = False
        for consumer in list(self._consumers.values()):
            if consumer.pull is not None and consumer.num_taken < consumer.num_slots:
                has_sent |= self._send_chunk(consumer, consumer.pull)
        return has_sent

    def _send_chunk(self, consumer: Consumer, pull: Pull) -> bool:
        """False if the consumer waits for its next block."""
        slot = consumer.num_done % consumer.num_slots
        count = min(
            len(self._buffer),
            consumer.num_slots - max(slot, consumer.num_taken),
            len(pull.keys) - consumer.num_done,
        )
        keys = pull.keys[consumer.num_done : consumer.num_done + count]
        rows = (self._buffer if consumer.rows is None else consumer.rows[slot:])[:count]
        try:
            if time.monotonic() < consumer.wait_until:
                keys = self._present(keys)
            found = self._read(keys, rows[: len(keys)])
        except Exception as error:  # of the reader, which may be anything
            self._counts["failed"] += 1
            self._complain("blocks for another engine cannot be read: %s", repr(error))
            found = [False] * len(keys)
        if not found:
            return False
        rows = rows[: len(found)]
        sent = Sent(pull.number, consumer.num_done, found, checksums(rows, found))
        consumer.num_done += len(found)
        consumer.num_taken += len(found)
        if consumer.num_done == len(pull.keys):
            consumer.pull = None
        self._counts["sent"] += sum(found)
        self._counts["missing"] += len(found) - sum(found)
        if not self._send(consumer, sent, rows):
            self._lose(consumer)
        return True

    def _present(self, keys: list[bytes]) -> list[bytes]:
        """The first of these keys as far as they are there; all, if the first will not come."""
        is_there = self._reader.contains(keys)
        num_present = is_there.index(False) if False in is_there else len(keys)
        if num_present or (self._coming is not None and not self._coming(keys[0])):
            return keys[: num_present or len(keys)]
        return []

    def _read(self, keys: list[bytes], rows: Rows) -> list[bool]:
        found = [bool(one) for one in self._reader.read(keys, rows)] if keys else []
        if len(found) != len(keys):
            raise ValueError(f"the reader answered {len(found)} of {len(keys)} keys")
        return found

    def _sweep(self, now: float) -> None:
        """Drop consumers that have ended or are too slow."""
        for consumer in list(self._consumers.values()):
            if consumer.has_ended:
                self._lose(consumer)
            elif consumer.is_busy and now > consumer.deadline:
                self._counts["slow"] += 1
                self._refuse(consumer.identity, "the transfer took too long")

    def _send(self, consumer: Consumer, sent: Sent, rows: Rows) -> bool:
        frames: list[bytes | memoryview] = [self._encoder.encode(sent)]
        if consumer.rows is None:
            frames.append((rows if all(sent.found) else rows[sent.found]).reshape(-1).data)
        return self._send_frames(consumer.identity, frames)

    def _send_frames(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """False if the consumer is not connected any more."""
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._counts["refused"] += 1
        self._complain("a consumer of blocks was refused: %s", reason)
        self._drop(identity)
        self._send_frames(identity, [self._encoder.encode(Refused(plain_text(reason)))])

    def _lose(self, consumer: Consumer) -> None:
        self._counts["lost"] += consumer.is_busy
        self._drop(consumer.identity)

    def _drop(self, identity: bytes) -> None:
        consumer = self._consumers.pop(identity, None)
        if consumer is not None and consumer.lent is not None:
            self._lent.append(consumer.lent)

    def _complain(self, message: str, why: str) -> None:
        if (more := self._complaints.admit()) is not None:
            logger.warning(message + "%s", why, more)
