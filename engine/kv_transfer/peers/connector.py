"""The connector ``peers``: serves the blocks of this host's memory, and reads those of others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from engine.ipc.address import tcp_address
from engine.kv_transfer.peers.messages import Pace
from engine.kv_transfer.peers.mooncake import MooncakeTransport
from engine.kv_transfer.peers.options import PeerOptions, check_secret, peer_address
from engine.kv_transfer.peers.peer_store import PeerLimits, PeerStore
from engine.kv_transfer.peers.server import BlockServer
from engine.kv_transfer.peers.transports import Transport
from engine.kv_transfer.stores import BlockStore, Rows, StoreIdentity

logger = logging.getLogger("engine.kv")
NUM_THREADS = 4  # loads at the same time, so that a slow engine does not hold up all others


class PeerConnector:
    """What this core has of the connector, opened once. Raises ``ConfigError``."""

    def __init__(self, options: PeerOptions, secret: str | None) -> None:
        self.options = options
        self._secret = check_secret(secret)
        self._store: PeerStore | None = None

    def serve(self, store: BlockStore, identity: StoreIdentity) -> ServedStore:
        """Serve the blocks of a store until it is closed. Raises ``ConfigError``."""
        address = tcp_address(self.options.address, self._secret)
        transport = self._open_transport()
        try:
            server = BlockServer(store, identity, address, transport=transport)
        except BaseException:
            _close(transport)
            raise
        logger.info("KV blocks are served to other engines at %s", server.address)
        return ServedStore(store, server, transport)

    def open(self, identity: StoreIdentity) -> ConnectedStore:
        """The store of blocks that other engines have. Raises ``ConfigError``."""
        seconds = self.options.timeout
        # A read of the blocks that are copied at once must end before nothing waits for it any
        # longer (``engine.kv_transfer.store_thread``).
        limits = PeerLimits(pace=Pace(grace_seconds=seconds), join_seconds=seconds)
        self._store = ConnectedStore(
            identity,
            secret=self._secret,
            shares_memory=self.options.shares_memory,
            transport=self._open_transport(),
            limits=limits,
        )
        return self._store

    def announce(self, host: str, port: int, keys: Sequence[bytes]) -> None:
        """Expect these blocks there."""
        if self._store is not None and keys:
            self._store.announce(peer_address(host, port), keys, self.options.timeout)

    def _open_transport(self) -> Transport | None:
        options = self.options
        if options.transport != "mooncake":
            return None
        return MooncakeTransport(options.host, protocol=options.protocol, device=options.device)


class ConnectedStore(PeerStore):
    """A ``PeerStore`` that closes its transport."""

    def close(self) -> None:
        super().close()
        _close(self._offer.transport)


class ServedStore:
    """A ``BlockStore`` whose blocks other engines read."""

    def __init__(self, store: BlockStore, server: BlockServer, transport: Transport | None) -> None:
        self.name = store.name
        self._store = store
        self._server = server
        self._transport = transport

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.contains(keys)

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        return self._store.read(keys, rows)

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        written = self._store.write(keys, rows)
        self._server.wake()  # consumers may wait for them
        return written

    def forget(self, keys: Sequence[bytes]) -> None:
        self._store.forget(keys)

    def clear(self) -> None:
        self._store.clear()

    def counts(self) -> Mapping[str, int]:
        """The counts of the store, and the server's as ``served.counter``."""
        served = {f"served.{name}": count for name, count in self._server.counts().items()}
        return {**self._store.counts(), **served}

    def close(self) -> None:
        self._server.close()
        _close(self._transport)
        self._store.close()


def _close(transport: Transport | None) -> None:
    if transport is not None:
        transport.close()
