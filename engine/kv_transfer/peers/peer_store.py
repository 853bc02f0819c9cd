"""PeerStore: blocks of other engines, by key.

    announce(address, keys) ──> contains(keys) is true ──> read(keys, rows) pulls them

It keeps no blocks itself. A block that a ``read`` does not get is not announced any more; the
request then computes it. After a failure the engine at this address is left alone for a while,
twice as long after each further one.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq

from engine.errors import ConfigError
from engine.ipc import sockets
from engine.ipc.address import IPC, address_of, tcp_address
from engine.kv_transfer.peers.link import LinkError, Offer, PeerLink, Wanted
from engine.kv_transfer.peers.messages import MAX_KEYS, MAX_WAIT_SECONDS, Pace
from engine.kv_transfer.peers.transports import Transport
from engine.kv_transfer.stores import Rows, StoreIdentity
from engine.observe.logs import Throttle

COUNTED = ("loaded", "missing", "damaged", "lost", "late", "refused")
MAX_PAUSE_SECONDS = 30.0
CLOSE_SECONDS = 5.0
logger = logging.getLogger("engine.kv_transfer")


class PeerLimits(NamedTuple):
    """``pace``: how slow transfers may be. ``window_bytes``: of blocks that a peer sends ahead, for
    each connection. ``num_links``: connections to a peer, so transfers at the same time.
    ``num_peers``, ``num_keys``: that are known; the oldest are forgotten. ``pause_seconds``: in
    which a peer is left alone after a first failure."""

    pace: Pace = Pace()
    window_bytes: int = 4 << 20
    num_links: int = 4
    num_peers: int = 64
    num_keys: int = 1 << 17
    join_seconds: float = 3.0
    pause_seconds: float = 0.5


LIMITS = PeerLimits()


class PeerStore:
    """A ``BlockStore`` of blocks that other engines have computed."""

    name = "peer"

    def __init__(
        self,
        identity: StoreIdentity,
        *,
        secret: str | None = None,
        allowed: Collection[str] | None = None,
        shares_memory: bool = True,
        transport: Transport | None = None,
        limits: PeerLimits = LIMITS,
    ) -> None:
        """secret: of addresses ``tcp://``. allowed: the addresses that may be announced; ``None``:
        any. shares_memory: get blocks of engines on this machine through shared memory.
        transport: for other blocks, of engines that have it, too; the caller closes it."""
        self._identity = identity
        self._secret = secret
        self._allowed = allowed
        self._offer = Offer(limits.window_bytes, shares_memory, transport)
        self._limits = limits
        self._lock = threading.Condition()
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # the oldest first
        self._announced: OrderedDict[bytes, Announced] = OrderedDict()  # the oldest first
        self._num_reading = 0
        self._is_closed = False
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._complaints = Throttle()
        self._context: zmq.Context[sockets.Socket] = zmq.Context()

    def announce(self, address: str, keys: Sequence[bytes], wait_seconds: float = 0.0) -> None:
        """Expect blocks at the engine whose ``BlockServer`` has this address. wait_seconds: from
        now until they are computed.

        Raises ``ConfigError`` for an address that is invalid or not allowed."""
        self._check(address)
        wait_until = time.monotonic() + min(max(0.0, wait_seconds), MAX_WAIT_SECONDS)
        with self._lock:
            peer = self._peer(address)
            for key in keys:
                entry = self._announced.setdefault(key, Announced(peer, wait_until))
                entry.peer, entry.wait_until = peer, wait_until
                self._announced.move_to_end(key)
            while len(self._announced) > self._limits.num_keys:
                self._announced.popitem(last=False)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys were announced for a peer that can be tried now."""
        now = time.monotonic()
        with self._lock:
            get = self._announced.get
            return [(entry := get(key)) is not None and entry.peer.is_usable(now) for key in keys]

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        """Pull blocks. It takes at most as long as they were announced to take, and what
        ``PeerLimits`` allows for the transfer."""
        found = [False] * len(keys)
        with self._lock:
            if self._is_closed:
                return found
            self._num_reading += 1
            entries = [self._announced.get(key) for key in keys]
        try:
            places: dict[Peer, list[int]] = {}
            for place, entry in enumerate(entries):
                if entry is not None:
                    places.setdefault(entry.peer, []).append(place)
            wait_until = max((each.wait_until for each in entries if each), default=0.0)
            deadline = self._deadline(wait_until, len(keys))
            for peer, all_of_it in places.items():
                for first in range(0, len(all_of_it), MAX_KEYS):
                    part = all_of_it[first : first + MAX_KEYS]
                    wait_until = max(entry.wait_until for i in part if (entry := entries[i]))
                    wanted = Wanted([keys[i] for i in part], part, rows, found)
                    self._pull(peer, wanted, wait_until, deadline)
        finally:
            self._settle(keys, entries, found)
        return found

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        """Keeps nothing."""
        return [False] * len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Do not read these blocks, unless they are announced again."""
        with self._lock:
            for key in keys:
                self._announced.pop(key, None)

    def clear(self) -> None:
        """Do not read any block, unless it is announced again."""
        with self._lock:
            self._announced.clear()

    def counts(self) -> dict[str, int]:
        """``num_blocks``: that are announced; they take no memory here. Since the start, blocks:
        ``loaded``, ``missing`` at the peer, ``damaged``; transfers that were ``lost`` with the
        connection, ``late`` or ``refused``."""
        return {"num_blocks": len(self._announced), "num_bytes": 0, **self._counts}

    def close(self) -> None:
        """End transfers and close all connections. May be repeated."""
        with self._lock:
            self._is_closed = True
            self._announced.clear()
            self._lock.wait_for(lambda: self._num_reading == 0, CLOSE_SECONDS)
            if self._num_reading == 0:
                self._end()

    # -- helpers

    def _check(self, address: str) -> None:
        if self._allowed is not None and address not in self._allowed:
            raise ConfigError(f"KV may not be read from {address!r:.200}: the address is unknown")
        if not address.startswith(IPC):
            tcp_address(address, self._secret)

    def _peer(self, address: str) -> Peer:
        """The peer with this address, which is now the newest."""
        peer = self._peers.get(address)
        if peer is None:
            peer = Peer(address, self._connect, self._limits, self._complaints)
            self._peers[address] = peer
        self._peers.move_to_end(address)
        while len(self._peers) > self._limits.num_peers:
            self._peers.popitem(last=False)[1].close()
        return peer

    def _connect(self, address: str, deadline: float) -> PeerLink:
        """A new connection. Raises ``LinkError``."""
        try:
            if address.startswith(IPC):
                _check_private(Path(address.removeprefix(IPC)).parent)
            where = address_of(address, self._secret)
            link = PeerLink(
                self._context, where, self._identity, self._offer, lambda: self._is_closed
            )
        except ConfigError as error:
            raise LinkError("lost", str(error)) from error
        try:
            link.join(min(deadline, time.monotonic() + self._limits.join_seconds))
        except BaseException:
            link.close()
            raise
        return link

    def _deadline(self, wait_until: float, num_blocks: int) -> float:
        """When a read that begins now must end, however many peers it has."""
        seconds = self._limits.pace.seconds(num_blocks * self._identity.block_bytes)
        return max(wait_until, time.monotonic()) + seconds

    def _pull(self, peer: Peer, wanted: Wanted, wait_until: float, read_until: float) -> None:
        if not peer.is_usable(now := time.monotonic()) or now >= read_until:
            return
        deadline = min(self._deadline(wait_until, len(wanted.keys)), read_until)
        num_damaged, cause, why = 0, "", ""
        try:
            num_damaged = peer.pull(wanted, wait_until, deadline)
        except LinkError as error:
            cause, why = error.cause, str(error)
        num_loaded = sum(wanted.found[place] for place in wanted.places)
        with self._lock:
            self._counts["loaded"] += num_loaded
            self._counts["damaged"] += num_damaged
            if not cause:
                self._counts["missing"] += len(wanted.keys) - num_loaded - num_damaged
            elif cause in COUNTED:
                self._counts[cause] += 1
        if num_damaged:
            cause, why = "damaged", f"{num_damaged} blocks had a wrong checksum"
        if cause in COUNTED:
            peer.complain(cause, why)

    def _settle(
        self, keys: Sequence[bytes], entries: Sequence[Announced | None], found: list[bool]
    ) -> None:
        """End a ``read``: what was withdrawn during it is not found, and what was not found is not
        announced any more."""
        with self._lock:
            for place, key in enumerate(keys):
                if self._announced.get(key) is not entries[place]:
                    found[place] = False
                elif not found[place]:
                    self._announced.pop(key, None)
            self._num_reading -= 1
            self._lock.notify_all()
            if self._is_closed and self._num_reading == 0:
                self._end()

    def _end(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._context.term()


@dataclass(slots=True)
class Announced:
    """A block that a peer has, or will have before ``wait_until``."""

    peer: Peer
    wait_until: float


class Peer:
    """Another engine: connections to it, and when it may be tried. Thread-safe."""

    def __init__(
        self,
        address: str,
        connect: Callable[[str, float], PeerLink],
        limits: PeerLimits,
        complaints: Throttle,
    ) -> None:
        """complaints: of all peers, since clients can name ever new addresses."""
        self._address = address
        self._connect = connect
        self._limits = limits
        self._complaints = complaints
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(limits.num_links)
        self._idle: list[PeerLink] = []
        self._is_closed = False
        self._retry_at = 0.0
        self._pause = 0.0
        self._causes: set[str] = set()  # that were logged

    def is_usable(self, now: float) -> bool:
        """False if it has failed lately, or is closed."""
        return now >= self._retry_at and not self._is_closed

    def pull(self, wanted: Wanted, wait_until: float, deadline: float) -> int:
        """Pull blocks with a free connection, like ``PeerLink.pull``."""
        if not self._turns.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LinkError("late", f"all {self._limits.num_links} connections are in use")
        try:
            num_damaged = self._pull(wanted, wait_until, deadline)
        except LinkError as error:
            if error.cause != "given_up":
                self._leave_alone()
            raise
        finally:
            self._turns.release()
        self._pause = 0.0
        return num_damaged

    def complain(self, cause: str, why: str) -> None:
        """Log a failure, if it is the first for this cause."""
        if cause not in self._causes and (more := self._complaints.admit()) is not None:
            self._causes.add(cause)
            logger.warning(
                "KV of the engine at %s was not read, requests compute it: %s (%s; counted, not "
                "logged again)%s",
                self._address,
                why,
                cause,
                more,
            )

    def close(self) -> None:
        """Close connections, those in use when they are not any more. May be repeated."""
        self._is_closed = True
        self._close_idle()

    def _pull(self, wanted: Wanted, wait_until: float, deadline: float) -> int:
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            is_new = link is None
            link = link or self._connect(self._address, deadline)
            is_sound = False
            try:
                wait_seconds = max(0.0, wait_until - time.monotonic())
                num_damaged = link.pull(wanted, wait_seconds, deadline)
                is_sound = True
                return num_damaged
            except LinkError as error:
                # The engine may have been restarted since this connection was last used.
                if is_new or error.cause not in ("lost", "refused"):
                    raise
                self._close_idle()
                wanted = wanted.rest()
                if not wanted.keys:
                    return 0
            finally:
                self._give_back(link, is_sound=is_sound)

    def _give_back(self, link: PeerLink, *, is_sound: bool) -> None:
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(link)
                return
        link.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _leave_alone(self) -> None:
        self._pause = min(max(self._limits.pause_seconds, 2 * self._pause), MAX_PAUSE_SECONDS)
        self._retry_at = time.monotonic() + self._pause


def _check_private(directory: Path) -> None:
    """Raise ``ConfigError`` unless only this user can have put a socket file there."""
    try:
        found = directory.stat()
    except OSError as error:
        raise ConfigError(f"there is no engine in {directory}: {error}") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{directory} is not a private directory of this user")
