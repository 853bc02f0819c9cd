"""KV blocks by a transport: one inside this process, and Mooncake's transfer engine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from support.patience import WAIT_SECONDS
from support.peers import (
    BLOCK_BYTES,
    SECRET,
    Blocks,
    another_process,
    empty_rows,
    identity_of,
    keys_of,
    wrong,
)

from engine.errors import ConfigError
from engine.kv_transfer.peers.messages import CHUNK_BYTES, Pace
from engine.kv_transfer.peers.mooncake import MooncakeTransport
from engine.kv_transfer.peers.peer_store import PeerLimits, PeerStore
from engine.kv_transfer.peers.server import BlockServer, ServerLimits
from engine.kv_transfer.peers.transports import Lent, Transport

PATIENT = PeerLimits(
    window_bytes=3 * BLOCK_BYTES,
    pace=Pace(WAIT_SECONDS),
    join_seconds=WAIT_SECONDS,
    pause_seconds=WAIT_SECONDS,
)


class Copies:
    """A transport between objects of this process. ``fault``: what its reads do instead."""

    name = "copies"
    session = "here"

    def __init__(self, fault: str = "", *, memory: dict[int, NDArray[np.uint8]]) -> None:
        self._fault = fault
        self._memory = memory
        self.num_reads = 0

    def lend(self, num_bytes: int) -> Lent:
        if self._fault == "no memory":
            raise OSError("no memory can be registered")
        lent = Lent(np.zeros(num_bytes, np.uint8), (len(self._memory) + 1) << 40)
        self._memory[lent.address] = lent.data
        return lent

    def read(
        self, session: str, address: int, into: NDArray[np.uint8], is_over: Callable[[], bool]
    ) -> bool:
        assert session == "here"
        self.num_reads += 1
        if self._fault == "hangs":
            while not is_over():
                pass
        if self._fault in ("hangs", "fails"):
            return False
        begin = max(start for start in self._memory if start <= address)
        into[:] = self._memory[begin][address - begin :][: len(into)]
        if self._fault == "damages":
            into[-1] ^= 1
        return True

    def close(self) -> None:
        pass


def store_with(transport: Transport | None, limits: PeerLimits = PATIENT) -> PeerStore:
    return PeerStore(
        identity_of(), secret=SECRET, shares_memory=False, transport=transport, limits=limits
    )


@pytest.fixture
def memory() -> dict[int, NDArray[np.uint8]]:
    return {}


@pytest.fixture
def server(memory: dict[int, NDArray[np.uint8]]) -> Iterator[BlockServer]:
    limits = ServerLimits(window_bytes=4 * BLOCK_BYTES, max_consumers=2)
    keys = set(keys_of(20)) - {keys_of(20)[4]}
    made = BlockServer(Blocks(keys), identity_of(), transport=Copies(memory=memory), limits=limits)
    yield made
    made.close()


def test_blocks_are_read_from_slots_that_the_server_lends(
    server: BlockServer, memory: dict[int, NDArray[np.uint8]]
) -> None:
    keys = keys_of(20)
    for _ in range(3):  # slots of a consumer that has left are used for the next one
        transport = Copies(memory=memory)
        store = store_with(transport)
        store.announce(server.address, keys)
        found = store.read(keys, rows := empty_rows(20))
        assert found == [place != 4 for place in range(20)]
        assert not wrong(keys, rows, found)
        assert transport.num_reads >= 5
        store.close()
    assert len(memory) <= 2 + 3


def test_messages_with_a_part_of_the_window_fill_the_right_slots(
    memory: dict[int, NDArray[np.uint8]],
) -> None:
    block_bytes = CHUNK_BYTES // 2
    identity, keys = identity_of(block_bytes=block_bytes), keys_of(12)
    reader = Blocks(block_bytes=block_bytes)
    server = BlockServer(reader, identity, transport=Copies(memory=memory))
    limits = PATIENT._replace(window_bytes=5 * block_bytes)
    store = PeerStore(identity, shares_memory=False, transport=Copies(memory=memory), limits=limits)
    store.announce(server.address, keys)
    found = store.read(keys, rows := empty_rows(12, block_bytes))
    assert all(found)
    assert not wrong(keys, rows, found)
    store.close()
    server.close()


@pytest.mark.parametrize(
    ("fault", "counter"),
    [("fails", "lost"), ("hangs", "late"), ("damages", "damaged"), ("no memory", "lost")],
)
def test_blocks_that_a_transport_does_not_deliver_are_not_found(
    fault: str, counter: str, server: BlockServer, memory: dict[int, NDArray[np.uint8]]
) -> None:
    keys = keys_of(4)
    limits = PATIENT._replace(pace=Pace(0.1)) if fault == "hangs" else PATIENT
    store = store_with(Copies(fault, memory=memory), limits)
    store.announce(server.address, keys)
    found = store.read(keys, rows := empty_rows(4))
    assert not all(found)
    assert not wrong(keys, rows, found)
    assert store.counts()[counter] >= 1
    store.close()


def test_without_a_common_transport_blocks_come_in_messages(
    server: BlockServer, memory: dict[int, NDArray[np.uint8]]
) -> None:
    keys = keys_of(4)
    without = BlockServer(Blocks(), identity_of())
    no_memory = BlockServer(Blocks(), identity_of(), transport=Copies("no memory", memory=memory))
    for address, transport in (
        (server.address, None),
        (without.address, Copies(memory=memory)),
        (no_memory.address, Copies(memory=memory)),
    ):
        store = store_with(transport)
        store.announce(address, keys)
        found = store.read(keys, rows := empty_rows(4))
        assert all(found)
        assert not wrong(keys, rows, found)
        assert transport is None or transport.num_reads == 0
        store.close()
    without.close()
    no_memory.close()


# -- Mooncake, which is optional


@pytest.fixture
def mooncake() -> Iterator[MooncakeTransport]:
    try:
        made = MooncakeTransport("127.0.0.1")
    except ConfigError as error:
        pytest.skip(f"Mooncake is not installed: {error}")
    yield made
    made.close()


def test_without_mooncake_its_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine-non-cuda"):
        MooncakeTransport("127.0.0.1")


def test_mooncake_brings_blocks_of_another_process(mooncake: MooncakeTransport) -> None:
    keys = keys_of(40)
    with another_process("", "", "", "mooncake") as (_, address):
        store = store_with(mooncake)
        for _ in range(3):
            store.announce(address, keys)
            found = store.read(keys, rows := empty_rows(40))
            assert all(found)
            assert not wrong(keys, rows, found)
        store.close()


def test_mooncake_brings_no_wrong_block_of_a_process_that_is_killed(
    mooncake: MooncakeTransport,
) -> None:
    keys = keys_of(40)
    with another_process("", "SIGKILL", 15, "mooncake") as (process, address):
        store = store_with(mooncake)
        store.announce(address, keys)
        found = store.read(keys, rows := empty_rows(40))
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        assert not any(found[15:])
        assert not wrong(keys, rows, found)
        assert store.counts()["lost"] == 1
        store.close()


def test_a_mooncake_process_that_hangs_is_given_up(mooncake: MooncakeTransport) -> None:
    keys = keys_of(40)
    with another_process("", "SIGSTOP", 15, "mooncake") as (_, address):
        store = store_with(mooncake, PATIENT._replace(pace=Pace(1.0)))
        store.announce(address, keys)
        found = store.read(keys, rows := empty_rows(40))
        assert not all(found)
        assert not wrong(keys, rows, found)
        store.close()
