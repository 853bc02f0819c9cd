"""KV blocks over connections that are cut, stall, are slow, or change bytes."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest
from support.patience import WAIT_SECONDS
from support.peers import SECRET, Blocks, empty_rows, eventually, identity_of, keys_of, wrong
from support.served import free_port

from engine.ipc.address import tcp_address
from engine.kv_transfer.peers.messages import Pace
from engine.kv_transfer.peers.peer_store import PeerLimits, PeerStore
from engine.kv_transfer.peers.server import BlockServer, ServerLimits

BLOCK_BYTES = 40_000
KEYS = keys_of(30)
NUM_BYTES = BLOCK_BYTES * len(KEYS)
GIVE_UP = {"cut": WAIT_SECONDS, "changed": WAIT_SECONDS, "stalled": 0.3, "slow": 0.3}
"""Seconds that a transfer may take, by what happens to the connection."""
SECONDS = {"stalled": WAIT_SECONDS, "slow": 0.02}  # for each 4 KiB


class Relay:
    """Passes bytes to a port of this machine and back. ``fault``: what happens to those that come
    back when ``after`` bytes have."""

    def __init__(self, port: int, fault: str, after: int) -> None:
        self._port = port
        self._fault = fault
        self._after = after
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._is_over.set()
        _shut(self._ends)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += near, far
                for work, args in ((self._there, (near, far)), (self._back, (far, near))):
                    self._threads.append(threading.Thread(target=work, args=args))
                    self._threads[-1].start()

    def _there(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
        _shut((source, target))

    def _back(self, source: socket.socket, target: socket.socket) -> None:
        left = self._after
        with suppress(OSError):
            while data := source.recv(4096):
                if left < len(data):
                    data = self._fail(data, left)
                if not data:
                    break
                target.sendall(data)
                left -= len(data)
        _shut((source, target))

    def _fail(self, data: bytes, place: int) -> bytes:
        """What arrives of bytes of which the fault begins at ``place``, if not before them."""
        if self._fault == "cut":
            return data[: max(place, 0)]
        if self._fault == "changed" and place >= 0:
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        if self._fault in SECONDS:
            self._is_over.wait(SECONDS[self._fault])
        return data


def _shut(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(server: BlockServer, fault: str, after: int) -> Iterator[str]:
    """The address of a connection to a server that has a fault."""
    made = Relay(int(server.address.rpartition(":")[2]), fault, after)
    try:
        yield made.address
    finally:
        made.close()


@pytest.fixture
def server() -> Iterator[BlockServer]:
    address = tcp_address(f"tcp://127.0.0.1:{free_port()}", SECRET)
    limits = ServerLimits(Pace(0.3), window_bytes=4 * BLOCK_BYTES, sweep_seconds=0.02)
    reader = Blocks(block_bytes=BLOCK_BYTES)
    made = BlockServer(reader, identity_of(block_bytes=BLOCK_BYTES), address, limits=limits)
    yield made
    made.close()


@pytest.mark.parametrize("fault", GIVE_UP)
def test_what_a_faulty_connection_does_not_bring_is_not_found(
    fault: str, server: BlockServer, seed: int
) -> None:
    rng = random.Random(seed)
    limits = PeerLimits(
        pace=Pace(GIVE_UP[fault], 1e12), join_seconds=WAIT_SECONDS, pause_seconds=0.0
    )
    for _ in range(1 if fault in SECONDS else 5):
        after = rng.randrange(NUM_BYTES // 2)
        print(f"after {after} bytes")
        store = PeerStore(
            identity_of(block_bytes=BLOCK_BYTES),
            secret=SECRET,
            shares_memory=False,
            limits=limits,
        )
        with relay(server, fault, after) as address:
            store.announce(address, KEYS)
            found = store.read(KEYS, rows := empty_rows(len(KEYS), BLOCK_BYTES))
            assert not wrong(KEYS, rows, found)
            assert not all(found)
            counts = store.counts()
            assert counts["lost"] + counts["late"] == 1
            store.close()
    assert eventually(lambda: server.counts()["num_consumers"] == 0)


def test_a_server_serves_others_while_a_connection_stalls(server: BlockServer) -> None:
    limits = PeerLimits(pace=Pace(WAIT_SECONDS), join_seconds=WAIT_SECONDS)
    stores = [
        PeerStore(identity_of(block_bytes=BLOCK_BYTES), secret=SECRET, shares_memory=False,
                  limits=limits)
        for _ in range(2)
    ]  # fmt: skip
    stalled: list[bool] = []
    with relay(server, "stalled", 3 * BLOCK_BYTES) as address:
        stores[0].announce(address, KEYS)
        rows = empty_rows(len(KEYS), BLOCK_BYTES)
        thread = threading.Thread(target=lambda: stalled.extend(stores[0].read(KEYS, rows)))
        thread.start()
        assert eventually(lambda: server.counts()["num_consumers"] == 1)
        stores[1].announce(server.address, KEYS)
        found = stores[1].read(KEYS, other := empty_rows(len(KEYS), BLOCK_BYTES))
        assert all(found)
        assert not wrong(KEYS, other, found)
    thread.join()
    assert not all(stalled)
    assert not wrong(KEYS, rows, stalled)
    for store in stores:
        store.close()
