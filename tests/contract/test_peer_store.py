"""Blocks of one engine read by another: through shared memory, and as frames."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import WAIT_SECONDS
from support.peers import (
    BLOCK_BYTES,
    SECRET,
    Blocks,
    another_process,
    block_of,
    empty_rows,
    eventually,
    identity_of,
    keys_of,
    wrong,
)
from support.processes import open_files
from support.served import free_port

from engine.errors import ConfigError
from engine.ipc.address import Address, tcp_address
from engine.kv_transfer.disk import open_disk_store
from engine.kv_transfer.peers.messages import CHUNK_BYTES, MAX_BLOCK_BYTES, SEGMENT, Pace
from engine.kv_transfer.peers.peer_store import PeerLimits, PeerStore
from engine.kv_transfer.peers.server import BlockServer, ServerLimits
from engine.kv_transfer.stores import StoreIdentity

PATIENT = PeerLimits(pace=Pace(WAIT_SECONDS), join_seconds=WAIT_SECONDS, pause_seconds=WAIT_SECONDS)
FEW_SLOTS = PATIENT._replace(window_bytes=3 * BLOCK_BYTES)
HASTY = PeerLimits(pace=Pace(0.3), join_seconds=0.3, pause_seconds=WAIT_SECONDS)
KINDS = ("shared", "frames", "tcp")
Opened = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Makes servers and stores that are closed after the test, the last first."""
    with ExitStack() as stack:

        def make(kind: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            made = kind(*arguments, **options)
            stack.callback(made.close)
            return made

        yield make


def own_address(kind: str) -> Address | None:
    return tcp_address(f"tcp://127.0.0.1:{free_port()}", SECRET) if kind == "tcp" else None


def text_of(address: Address | None) -> str:
    return "" if address is None else address.data


def store_of(opened: Opened, kind: str, limits: PeerLimits = PATIENT) -> PeerStore:
    store: PeerStore = opened(
        PeerStore, identity_of(), secret=SECRET, shares_memory=kind == "shared", limits=limits
    )
    return store


def segments() -> int:
    """Number of mappings of shared memory for blocks in this process."""
    with open("/proc/self/maps") as lines:
        return sum(SEGMENT in line for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_gives_its_blocks(kind: str, opened: Opened) -> None:
    keys, rows = keys_of(40), empty_rows(40)
    with another_process(text_of(own_address(kind)), "", "") as (_, address):
        store = store_of(opened, kind, FEW_SLOTS)
        assert store.contains(keys) == [False] * 40
        store.announce(address, keys[:30])
        assert store.contains(keys) == [True] * 30 + [False] * 10
        found = store.read(keys, rows)
        assert found == [True] * 30 + [False] * 10
        assert not wrong(keys, rows, found)
        assert (store.counts()["loaded"], store.counts()["num_blocks"]) == (30, 30)
        if kind == "shared":
            assert segments() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_random_reads_of_many_threads_get_what_is_there(
    kind: str, opened: Opened, seed: int
) -> None:
    rng = random.Random(seed)
    block_bytes = rng.choice([64, 1000, 4096, 70_000])
    limits = PATIENT._replace(window_bytes=rng.choice([1, 5 * block_bytes, 1 << 20]), num_links=3)
    identity = identity_of(block_bytes=block_bytes)
    keys = keys_of(60)
    servers, readers = [], []
    for _ in range(2):
        readers.append(Blocks(set(rng.sample(keys, 40)), block_bytes=block_bytes))
        server_limits = ServerLimits(window_bytes=rng.choice([1, 1 << 20]))
        servers.append(
            opened(
                BlockServer,
                readers[-1],
                identity,
                own_address(kind),
                limits=server_limits,
            )
        )
    store = opened(
        PeerStore, identity, secret=SECRET, shares_memory=kind == "shared", limits=limits
    )
    failures: list[str] = []

    def read(rng: random.Random) -> None:
        for _ in range(6):
            chosen = rng.sample(keys, rng.randint(1, len(keys)))
            for key in chosen:  # either server may have been announced last by another thread
                store.announce(servers[rng.randrange(2)].address, [key])
            rows = empty_rows(len(chosen), block_bytes)
            found = store.read(chosen, rows)
            if wrong(chosen, rows, found):
                failures.append(f"wrong content: {wrong(chosen, rows, found)}")
            sure = [all(key in one.present for one in readers) for key in chosen]
            never = [not any(key in one.present for one in readers) for key in chosen]
            if any(one and hit for one, hit in zip(never, found, strict=True)):
                failures.append("found what nobody has")
            lost.append(sum(one and not hit for one, hit in zip(sure, found, strict=True)))

    lost: list[int] = []
    threads = [threading.Thread(target=read, args=(random.Random(seed + n),)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(lost) == 30
    counts = store.counts()
    assert counts["loaded"] > 0
    assert [counts[name] for name in ("damaged", "lost", "late", "refused")] == [0] * 4


@pytest.mark.parametrize("kind", ("shared", "frames"))
def test_messages_with_a_part_of_the_window_fill_the_right_slots(kind: str, opened: Opened) -> None:
    block_bytes = CHUNK_BYTES // 2
    identity, keys = identity_of(block_bytes=block_bytes), keys_of(12)
    limits = PATIENT._replace(window_bytes=5 * block_bytes)
    server = opened(BlockServer, Blocks(block_bytes=block_bytes), identity)
    store = opened(PeerStore, identity, shares_memory=kind == "shared", limits=limits)
    store.announce(server.address, keys)
    found = store.read(keys, rows := empty_rows(12, block_bytes))
    assert all(found)
    assert not wrong(keys, rows, found)


def test_any_block_store_can_be_served(opened: Opened, tmp_path: Path) -> None:
    keys = keys_of(10)
    disk = opened(open_disk_store, str(tmp_path), 1 << 20, identity_of())
    assert all(disk.write(keys[:8], np.stack([block_of(key) for key in keys[:8]])))
    store = store_of(opened, "shared")
    store.announce(opened(BlockServer, disk, identity_of()).address, keys)
    found = store.read(keys, rows := empty_rows(10))
    assert found == [True] * 8 + [False] * 2
    assert not wrong(keys, rows, found)


def test_a_block_that_is_missing_is_not_announced_any_more(opened: Opened) -> None:
    keys = keys_of(4)
    server = opened(BlockServer, Blocks({keys[0], keys[2]}), identity_of())
    store = store_of(opened, "shared")
    store.announce(server.address, keys)
    assert store.read(keys, empty_rows(4)) == [True, False, True, False]
    assert store.contains(keys) == [True, False, True, False]
    assert store.counts()["missing"] == 2


def test_a_store_keeps_nothing_and_withdraws_what_it_should_forget(opened: Opened) -> None:
    keys = keys_of(3)
    server = opened(BlockServer, Blocks(), identity_of())
    store = store_of(opened, "shared")
    store.announce(server.address, keys)
    assert store.write(keys, empty_rows(3)) == [False] * 3
    store.forget(keys[:1])
    assert store.read(keys, empty_rows(3)) == [False, True, True]
    store.clear()
    assert store.read(keys, empty_rows(3)) == [False] * 3
    assert store.counts()["num_blocks"] == 0


@pytest.mark.parametrize("withdraw", [PeerStore.clear, lambda s: s.forget(keys_of(9)[4:])])
def test_what_is_withdrawn_during_a_transfer_is_not_found(
    withdraw: Callable[[PeerStore], object], opened: Opened
) -> None:
    keys = keys_of(9)
    store = store_of(opened, "shared")
    reader = Blocks(on_read=lambda number: withdraw(store) if number == 6 else None)
    store.announce(opened(BlockServer, reader, identity_of()).address, keys)
    found = store.read(keys, empty_rows(9))
    assert found[4:] == [False] * 5
    assert reader.num_read == 9


@pytest.mark.parametrize("kind", ("shared", "frames"))
def test_blocks_that_are_computed_during_the_wait_arrive(kind: str, opened: Opened) -> None:
    keys, rows = keys_of(8), empty_rows(8)
    reader = Blocks(set(keys[:2]))
    server = opened(BlockServer, reader, identity_of())
    store = store_of(opened, kind, FEW_SLOTS)
    store.announce(server.address, keys, wait_seconds=WAIT_SECONDS)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(store.read(keys, rows)))
    thread.start()
    for key in keys[2:]:
        assert eventually(lambda: reader.num_read >= len(reader.present or ()))
        assert reader.present is not None
        reader.present.add(key)
        server.wake()
    thread.join()
    assert found == [True] * 8
    assert not wrong(keys, rows, found)


def test_a_wait_ends_after_its_time_or_when_the_block_will_not_come(opened: Opened) -> None:
    keys = keys_of(3)
    reader = Blocks({keys[0]})
    store = store_of(opened, "shared")
    waits = opened(BlockServer, reader, identity_of())
    store.announce(waits.address, keys, wait_seconds=0.05)
    assert store.read(keys, empty_rows(3)) == [True, False, False]
    knows = opened(BlockServer, reader, identity_of(), coming=lambda key: False)
    store.announce(knows.address, keys, wait_seconds=WAIT_SECONDS)
    assert store.read(keys, empty_rows(3)) == [True, False, False]


def test_a_reader_that_fails_has_no_blocks(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(3)

    def fail(number: int) -> None:
        if number == 0:
            raise OSError("no such disk")

    server = opened(BlockServer, Blocks(on_read=fail), identity_of())
    store = store_of(opened, "shared")
    store.announce(server.address, keys)
    assert store.read(keys, empty_rows(3)) == [False] * 3
    assert server.counts()["failed"] == 1
    assert "no such disk" in caplog.text


# -- ends of either side


@pytest.mark.parametrize(("kind", "at"), [("shared", 0), ("shared", 5), ("frames", 5), ("tcp", 5)])
def test_blocks_of_an_engine_that_is_killed_are_not_found(
    kind: str, at: int, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    keys, rows = keys_of(12), empty_rows(12)
    with another_process(text_of(own_address(kind)), "SIGKILL", at) as (process, address):
        store = store_of(opened, kind, FEW_SLOTS)
        store.announce(address, keys)
        found = store.read(keys, rows)
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert found == [True] * sum(found) + [False] * (12 - sum(found))
    assert sum(found) <= at
    assert not wrong(keys, rows, found)
    assert store.counts()["lost"] == 1
    assert store.contains(keys) == [False] * 12  # it is left alone for a while
    with caplog.at_level(logging.WARNING):
        assert store.read(keys, rows) == [False] * 12
    assert caplog.text.count("requests compute it") == 1


def test_an_engine_that_hangs_is_given_up_after_the_time_for_the_transfer(opened: Opened) -> None:
    keys = keys_of(12)
    with another_process("", "SIGSTOP", 5) as (_, address):
        store = store_of(opened, "shared", HASTY._replace(window_bytes=3 * BLOCK_BYTES))
        store.announce(address, keys)
        found = store.read(keys, rows := empty_rows(12))
    assert not wrong(keys, rows, found)
    assert not any(found[5:])
    assert store.counts()["late"] == 1
    store.announce(address, keys)
    assert not any(store.contains(keys))


def test_a_restarted_engine_is_read_again(opened: Opened) -> None:
    keys = keys_of(5)
    address = own_address("tcp")
    store = store_of(opened, "shared")
    for _ in range(2):
        server = BlockServer(Blocks(), identity_of(), address)
        store.announce(server.address, keys)
        assert store.read(keys, empty_rows(5)) == [True] * 5
        server.close()
    assert store.counts()["lost"] == 0


@pytest.mark.parametrize(
    "other",
    [
        StoreIdentity("b", BLOCK_BYTES),
        StoreIdentity("a", BLOCK_BYTES * 2),
        StoreIdentity("a", BLOCK_BYTES, 1, 2),
    ],
)
def test_blocks_of_another_model_or_layout_are_refused(
    other: StoreIdentity, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(5)
    address = own_address("tcp")
    store = store_of(opened, "shared")
    server = BlockServer(Blocks(), identity_of(), address)
    store.announce(text_of(address), keys)
    assert all(store.read(keys, empty_rows(5)))
    server.close()
    opened(BlockServer, Blocks(), other, address)
    store.announce(text_of(address), keys)
    assert store.read(keys, empty_rows(5)) == [False] * 5
    name = next(n for n in other._fields if getattr(other, n) != getattr(identity_of(), n))
    assert f"blocks have {name} {getattr(other, name)!r}" in caplog.text
    assert store.counts()["refused"] == 1


def test_repeated_failures_are_counted_and_logged_once(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    server = opened(BlockServer, Blocks(), identity_of("b"))
    store = store_of(opened, "shared", PATIENT._replace(pause_seconds=0.0))
    for _ in range(3):
        store.announce(server.address, keys_of(2))
        assert store.read(keys_of(2), empty_rows(2)) == [False] * 2
    assert store.counts()["refused"] == server.counts()["refused"] == 3
    assert caplog.text.count("requests compute it") == 1


def test_a_wrong_secret_gets_nothing(opened: Opened) -> None:
    keys = keys_of(2)
    server = opened(BlockServer, Blocks(), identity_of(), own_address("tcp"))
    store = opened(PeerStore, identity_of(), secret="another secret of 25 chars", limits=HASTY)
    store.announce(server.address, keys)
    assert store.read(keys, empty_rows(2)) == [False] * 2
    assert server.counts()["num_consumers"] == 0


def test_closing_ends_a_transfer(opened: Opened) -> None:
    keys = keys_of(2)
    server = opened(BlockServer, Blocks(set()), identity_of())
    store = store_of(opened, "shared")
    store.announce(server.address, keys, wait_seconds=WAIT_SECONDS)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(store.read(keys, empty_rows(2))))
    thread.start()
    assert eventually(lambda: server.counts()["num_consumers"] == 1)
    store.close()
    thread.join()
    assert found == [False] * 2
    assert store.read(keys, empty_rows(2)) == [False] * 2


def test_a_server_that_is_closed_leaves_no_file_or_memory(opened: Opened) -> None:
    keys, before = keys_of(2), segments()
    files = open_files()
    server = BlockServer(Blocks(), identity_of())
    store = PeerStore(identity_of())
    store.announce(server.address, keys)
    assert all(store.read(keys, empty_rows(2)))
    assert segments() == before + 2  # one of each side
    server.close()
    store.close()
    assert segments() == before
    assert not os.path.exists(server.address.removeprefix("ipc://"))
    assert eventually(lambda: open_files() <= files)


def test_closing_does_not_wait_for_a_reader_that_hangs(opened: Opened) -> None:
    hangs, may_end = threading.Event(), threading.Event()

    def on_read(number: int) -> None:
        hangs.set()
        may_end.wait(WAIT_SECONDS)

    limits = ServerLimits(close_seconds=0.05)
    server = BlockServer(Blocks(on_read=on_read), identity_of(), limits=limits)
    store = store_of(opened, "shared")
    store.announce(server.address, keys_of(3))
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(store.read(keys_of(3), empty_rows(3))))
    thread.start()
    assert hangs.wait(WAIT_SECONDS)
    server.close()
    may_end.set()
    thread.join()
    assert found in ([True] * 3, [False] * 3)


def test_mistakes_in_addresses_and_sizes_are_named(opened: Opened) -> None:
    store = opened(PeerStore, identity_of(), secret=SECRET, allowed=["tcp://a:1"])
    with pytest.raises(ConfigError, match=r"'tcp://a:2'.*unknown"):
        store.announce("tcp://a:2", keys_of(1))
    anywhere = opened(PeerStore, identity_of(), secret=SECRET)
    with pytest.raises(ConfigError, match="port in 1"):
        anywhere.announce("tcp://a:0", keys_of(1))
    with pytest.raises(ConfigError, match="shared secret"):
        opened(PeerStore, identity_of()).announce("tcp://a:1", keys_of(1))
    with pytest.raises(ConfigError, match="smaller block_size"):
        BlockServer(Blocks(), identity_of(block_bytes=MAX_BLOCK_BYTES + 1))


def test_a_socket_file_that_others_could_have_made_is_not_used(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "core-token").write_bytes(b"secret of somebody")
    tmp_path.chmod(0o755)
    store = store_of(opened, "shared")
    store.announce(f"ipc://{tmp_path}/core", keys_of(1))
    assert store.read(keys_of(1), empty_rows(1)) == [False]
    assert "not a private directory" in caplog.text
