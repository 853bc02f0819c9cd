"""KV blocks over connections that are cut, stall, are slow, or change bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import relays
from support.patience import WAIT_SECONDS
from support.peers import SECRET, Blocks, empty_rows, eventually, identity_of, keys_of, wrong
from support.relays import SECONDS
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


@contextmanager
def relay(server: BlockServer, fault: str, after: int) -> Iterator[str]:
    """The address of a connection to a server that has a fault."""
    with relays.relay(int(server.address.rpartition(":")[2]), fault, after) as address:
        yield address


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
