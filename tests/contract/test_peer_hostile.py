"""Engines that send anything to those that read their KV blocks, and the other way round."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zmq
from support.patience import WAIT_SECONDS
from support.peers import (
    BLOCK_BYTES,
    SECRET,
    Blocks,
    block_of,
    empty_rows,
    eventually,
    identity_of,
    keys_of,
    wrong,
)
from support.served import free_port

from engine.ipc import sockets
from engine.ipc.address import Directory, address_of
from engine.ipc.sealed_files import create, seal
from engine.kv_transfer.peers import peer_store
from engine.kv_transfer.peers.link import LinkError, SharedSlots, Wanted
from engine.kv_transfer.peers.messages import (
    MAX_KEYS,
    SEGMENT,
    Free,
    Join,
    Joined,
    Pace,
    Pull,
    Refused,
    Sent,
)
from engine.kv_transfer.peers.peer_store import Peer, PeerLimits, PeerStore
from engine.kv_transfer.peers.server import BlockServer, ServerLimits

KEYS = keys_of(6)
LIMITS = PeerLimits(
    window_bytes=4 * BLOCK_BYTES,
    pace=Pace(WAIT_SECONDS),
    join_seconds=WAIT_SECONDS,
    pause_seconds=0.0,
)
encode = msgspec.msgpack.encode


# -- hostile producers


@contextmanager
def producer(answer: Callable[[list[Any]], Sequence[Sequence[bytes]]]) -> Iterator[str]:
    """A socket that sends what ``answer`` returns for each message, and its address."""
    directory = Directory.create()
    context: zmq.Context[sockets.Socket] = zmq.Context()
    router = sockets.bind(context, directory.address.data, None)
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            if router.poll(10):
                who, frame = router.recv_multipart()
                for frames in answer(msgspec.msgpack.decode(frame)):
                    with suppress(zmq.ZMQError):  # it has closed the connection
                        router.send_multipart([who, *frames])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield directory.address.data
    finally:
        is_over.set()
        thread.join()
        sockets.close(router)
        context.term()
        directory.remove()


def blocks(first: int = 0, count: int = len(KEYS)) -> bytes:
    return b"".join(block_of(key).tobytes() for key in KEYS[first : first + count])


def sums(first: int = 0, count: int = len(KEYS)) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(block_of(key).tobytes()) for key in KEYS[first : first + count]
    ]


ALL = [True] * len(KEYS)
JOINED = [encode(Joined(4, False))]
BAD_ANSWERS: dict[str, Sequence[Sequence[bytes]]] = {
    "no message": [[b"\xff\xff"]],
    "an empty frame": [[b""]],
    "another type": [JOINED],
    "the number of another pull": [[encode(Sent(7, 0, ALL, sums())), blocks()]],
    "a later block first": [[encode(Sent(1, 1, ALL[1:], sums(1))), blocks(1)]],
    "a negative index": [[encode(Sent(1, -1, ALL, sums())), blocks()]],
    "more blocks than were wanted": [[encode(Sent(1, 0, [*ALL, True], [*sums(), 1])), blocks()]],
    "fewer checksums": [[encode(Sent(1, 0, ALL, sums()[1:])), blocks()]],
    "fewer bytes": [[encode(Sent(1, 0, ALL, sums())), blocks()[1:]]],
    "more bytes": [[encode(Sent(1, 0, ALL, sums())), blocks() + b"x"]],
    "no bytes": [[encode(Sent(1, 0, ALL, sums()))]],
    "a frame too many": [[encode(Sent(1, 0, ALL, sums())), blocks(), b""]],
    "nothing found, in an empty list": [[encode(Sent(1, 0, [], [])), b""]],
    "a frame larger than any block": [[encode(Sent(1, 0, ALL, sums())), bytes(3 << 20)]],
    "a checksum that is no integer": [[encode(["sent", 1, 0, ALL, ["a"] * 6]), blocks()]],
}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_producer_that_sends_nonsense_is_left_alone(bad: str) -> None:
    def answer(message: list[Any]) -> Sequence[Sequence[bytes]]:
        return [JOINED] if message[0] == "join" else BAD_ANSWERS[bad] * (message[0] == "pull")

    store = PeerStore(identity_of(), limits=LIMITS)
    with producer(answer) as address:
        store.announce(address, KEYS)
        assert store.read(KEYS, empty_rows(6)) == [False] * 6
        counts = store.counts()
        assert counts["damaged"] + counts["lost"] == 1
        store.close()


@pytest.mark.parametrize(
    "joined", [Joined(5, False), Joined(3, True), Joined(4, True), Refused("")]
)
def test_a_producer_that_joins_wrongly_is_left_alone(joined: msgspec.Struct) -> None:
    """It takes more slots than were offered, or shares memory that was not offered."""
    store = PeerStore(identity_of(), shares_memory=False, limits=LIMITS)
    with producer(lambda message: [[encode(joined)]]) as address:
        store.announce(address, KEYS)
        assert store.read(KEYS, empty_rows(6)) == [False] * 6
        store.close()


def test_damaged_blocks_are_not_found_and_the_others_are() -> None:
    def answer(message: list[Any]) -> Sequence[Sequence[bytes]]:
        if message[0] != "pull":
            return [JOINED] * (message[0] == "join")
        data = bytearray(blocks())
        data[3 * BLOCK_BYTES + 5] ^= 1
        return [[encode(Sent(1, 0, ALL, sums())), bytes(data)]]

    store = PeerStore(identity_of(), limits=LIMITS)
    with producer(answer) as address:
        store.announce(address, KEYS)
        found = store.read(KEYS, rows := empty_rows(6))
        assert found == [True, True, True, False, True, True]
        assert not wrong(KEYS, rows, found)
        assert store.counts()["damaged"] == 1
        store.close()


def test_random_messages_of_a_producer_give_no_wrong_block(seed: int) -> None:
    rng = random.Random(seed)

    def answer(message: list[Any]) -> Sequence[Sequence[bytes]]:
        if message[0] == "join":
            return [JOINED]
        if message[0] != "pull":
            return []
        number, keys = message[1], message[2]
        first = KEYS.index(keys[0])
        right = [encode(Sent(number, 0, [True] * len(keys), sums(first))), blocks(first)]
        frames = [bytearray(frame) for frame in right]
        for _ in range(rng.randint(0, 3)):
            frame = rng.choice(frames)
            match rng.randrange(3):
                case 0 if frame:
                    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                case 1:
                    del frame[rng.randrange(len(frame) + 1) :]
                case 2:
                    frame += rng.randbytes(rng.randint(1, 30))
        sent = [bytes(frame) for frame in frames]
        # What follows a wrong message ends the transfer, if that has left it incomplete.
        return [sent] if sent == right else [sent, [b""]]

    store = PeerStore(identity_of(), limits=LIMITS)
    num_found = 0
    with producer(answer) as address:
        for _ in range(100):
            keys = KEYS[rng.randrange(6) :]
            store.announce(address, keys)
            found = store.read(keys, rows := empty_rows(len(keys)))
            assert not wrong(keys, rows, found)
            num_found += sum(found)
        store.close()
    assert num_found > 0


def test_an_address_where_no_engine_answers_costs_the_time_to_join_once() -> None:
    """Nobody listens, or something that says nothing or speaks another protocol."""
    limits = LIMITS._replace(join_seconds=0.2, pause_seconds=WAIT_SECONDS)
    store = PeerStore(identity_of(), secret=SECRET, limits=limits)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (free_port(), silent.getsockname()[1]):
            store.announce(f"tcp://127.0.0.1:{port}", KEYS)
            assert store.read(KEYS, empty_rows(6)) == [False] * 6
            store.announce(f"tcp://127.0.0.1:{port}", KEYS)
            assert store.contains(KEYS) == [False] * 6
        store.close()
    counts = store.counts()
    assert counts["lost"] + counts["late"] == 2


def test_many_silent_addresses_take_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients can announce each block of a prompt at another address. The steps of the engine leave
    a store out whose reads take too long."""
    clock = [100.0]
    monkeypatch.setattr(peer_store.time, "monotonic", lambda: clock[0])

    def pull(peer: Peer, wanted: Wanted, wait_until: float, deadline: float) -> int:
        clock[0] = deadline
        raise LinkError("late", "it did not answer in time")

    monkeypatch.setattr(Peer, "pull", pull)
    store = PeerStore(identity_of(), secret=SECRET, limits=LIMITS._replace(pace=Pace(1.0)))
    for port, key in enumerate(KEYS, 2000):
        store.announce(f"tcp://127.0.0.1:{port}", [key], wait_seconds=1.0)
    assert store.read(KEYS, empty_rows(len(KEYS))) == [False] * len(KEYS)
    store.close()
    assert clock[0] - 100.0 < 2.1


def test_ever_new_addresses_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_store.time, "monotonic", lambda: 100.0)

    def pull(peer: Peer, wanted: Wanted, wait_until: float, deadline: float) -> int:
        raise LinkError("lost", "the connection was refused or lost")

    monkeypatch.setattr(Peer, "pull", pull)
    store = PeerStore(identity_of(), secret=SECRET, limits=LIMITS)
    for port in range(2000, 2100):
        store.announce(f"tcp://127.0.0.1:{port}", KEYS)
        assert store.read(KEYS, empty_rows(len(KEYS))) == [False] * len(KEYS)
    store.close()
    assert caplog.text.count("requests compute it") == 1
    assert store.counts()["lost"] == 100


# -- hostile consumers


class Raw:
    """A connection to a server on which a test sends what it likes."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[sockets.Socket] = zmq.Context()
        self.address = address_of(address, SECRET)
        self.socket, self._lost = sockets.connect(
            self._context, self.address.data, self.address.secret
        )

    def ask(self, *messages: object) -> list[Any]:
        """Send messages; returns the header of the next answer."""
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))
        assert self.socket.poll(1000 * WAIT_SECONDS)
        header: list[Any] = msgspec.msgpack.decode(self.socket.recv_multipart()[0])
        return header

    def join(self, num_slots: int = 4, **changed: Any) -> Join:
        return Join(1, self.address.token, identity_of(), num_slots, **changed)

    def close(self) -> None:
        sockets.close(self.socket, self._lost)
        self._context.term()


@pytest.fixture
def server() -> Iterator[BlockServer]:
    made = BlockServer(Blocks(), identity_of(), limits=ServerLimits(sweep_seconds=0.02))
    yield made
    made.close()


@pytest.fixture
def raw(server: BlockServer) -> Iterator[Raw]:
    made = Raw(server.address)
    yield made
    made.close()


def still_serves(server: BlockServer) -> bool:
    store = PeerStore(identity_of(), limits=LIMITS)
    store.announce(server.address, KEYS)
    found = store.read(KEYS, rows := empty_rows(6))
    store.close()
    return all(found) and not wrong(KEYS, rows, found)


WRONG_MESSAGES: dict[str, tuple[str, Sequence[object]]] = {
    "no message": ("not a message", [b"\xc1"]),
    "many keys": ("not a message", [Pull(1, [b"k"] * (MAX_KEYS + 1))]),
    "a long key": ("not a message", [Pull(1, [bytes(1000)])]),
    "an empty key": ("not a message", [Pull(1, [b""])]),
    "no keys": ("not a message", [Pull(1, [])]),
    "no slots": ("not a message", [Free(0)]),
    "many slots": ("not a message", [Free(1 << 40)]),
    "slots that are not taken": ("slots were freed", [Free(1)]),
    "a second pull": ("pulls again", [Pull(1, KEYS), Pull(2, KEYS)]),
}


@pytest.mark.parametrize("case", WRONG_MESSAGES)
def test_a_consumer_that_breaks_the_protocol_is_refused(
    case: str, server: BlockServer, raw: Raw
) -> None:
    reason, messages = WRONG_MESSAGES[case]
    assert raw.ask(raw.join())[:2] == ["joined", 4]
    answer = raw.ask(*messages)
    while answer[0] == "sent":
        answer = raw.ask()
    assert answer[0] == "refused"
    assert reason in answer[1]
    assert server.counts()["num_consumers"] == 0
    assert raw.ask(Pull(1, KEYS))[0] == "refused"  # it has to join again
    assert still_serves(server)


def test_who_does_not_join_rightly_is_refused(server: BlockServer, raw: Raw) -> None:
    join = raw.join()
    for wrongly, reason in (
        (msgspec.structs.replace(join, version=2), "version 2"),
        (msgspec.structs.replace(join, token=b"guess"), "wrong token"),
        (msgspec.structs.replace(join, identity=identity_of("b")), "namespace 'a', not 'b'"),
        (msgspec.structs.replace(join, num_slots=0), "not a message"),
        (Pull(1, KEYS), "joins before"),
    ):
        answer = raw.ask(wrongly)
        assert answer[0] == "refused"
        assert reason in answer[1]
    assert still_serves(server)


def test_shared_memory_that_is_not_what_it_must_be_is_not_written(
    server: BlockServer, raw: Raw
) -> None:
    right = SharedSlots(4, BLOCK_BYTES)
    named_otherwise = create("metronome-other", 4 * BLOCK_BYTES)
    other = seal(named_otherwise, can_be_written=True)
    loose = create(SEGMENT, 4 * BLOCK_BYTES)
    of_loose = right.handle._replace(fd=loose, inode=os.fstat(loose).st_ino)
    try:
        for memory in (
            other,
            of_loose,
            right.handle._replace(inode=1),
            right.handle._replace(fd=-1),
            right.handle._replace(pid=1 << 40),
            right.handle._replace(namespace="another machine"),
        ):
            assert raw.ask(raw.join(memory=memory)) == ["joined", 4, False, None]
    finally:
        os.close(named_otherwise)
        os.close(loose)
    answer = raw.ask(raw.join(num_slots=5, memory=right.handle))
    assert answer[0] == "refused"
    assert not right.rows.any()
    assert raw.ask(raw.join(memory=right.handle)) == ["joined", 4, True, None]
    assert raw.ask(Pull(1, KEYS))[:3] == ["sent", 1, 0]
    assert np.array_equal(right.rows[3], block_of(KEYS[3]))


def test_a_consumer_that_frees_nothing_holds_at_most_its_window_and_is_refused() -> None:
    reader = Blocks()
    limits = ServerLimits(Pace(0.2), window_bytes=3 * BLOCK_BYTES, sweep_seconds=0.02)
    server = BlockServer(reader, identity_of(), limits=limits)
    slow = Raw(server.address)
    assert slow.ask(slow.join(num_slots=1000)) == ["joined", 3, False, None]
    assert slow.ask(Pull(1, keys_of(50)))[0] == "sent"
    answer = slow.ask()
    assert answer[0] == "refused"
    assert "too long" in answer[1]
    assert reader.num_read == 3
    assert server.counts()["slow"] == 1
    assert still_serves(server)
    slow.close()
    server.close()


def test_only_slots_that_were_freed_are_used_again(server: BlockServer, raw: Raw) -> None:
    assert raw.ask(raw.join(4))[0] == "joined"
    assert raw.ask(Pull(1, KEYS))[2:4] == [0, [True] * 4]
    assert raw.ask(Free(1))[2:4] == [4, [True]]
    assert raw.ask(Free(3))[2:4] == [5, [True]]


def test_when_there_are_too_many_consumers_the_idle_ones_go() -> None:
    awaited: set[bytes] = set()
    server = BlockServer(
        Blocks(set()),
        identity_of(),
        coming=lambda key: awaited.add(key) is None,
        limits=ServerLimits(max_consumers=2),
    )
    raws = [Raw(server.address) for _ in range(4)]
    for raw in raws[:3]:
        assert raw.ask(raw.join())[0] == "joined"
    assert raws[0].ask(Pull(1, KEYS))[0] == "refused"
    assert server.counts()["num_consumers"] == 2
    for raw, key in zip(raws[1:3], KEYS, strict=False):
        raw.socket.send(encode(Pull(1, [key], WAIT_SECONDS)))
    assert eventually(lambda: awaited == set(KEYS[:2]))
    assert "limit" in raws[3].ask(raws[3].join())[1]
    for raw in raws:
        raw.close()
    server.close()


DYING = """
import os, signal, sys, time
import zmq
from engine.ipc.address import address_of
from engine.kv_transfer.peers.link import Offer, PeerLink, Wanted
from support.peers import empty_rows, identity_of, keys_of

link = PeerLink(
    zmq.Context(), address_of(sys.argv[1], None), identity_of(),
    Offer(1, sys.argv[2] == "shared", None),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
)
end = time.monotonic() + 300
link.join(end)
link.pull(Wanted(keys_of(9), range(9), empty_rows(9), [False] * 9), float(sys.argv[3]), end)
"""


@pytest.mark.parametrize("kind", ["shared", "frames"])
@pytest.mark.parametrize("phase", ["amid blocks", "waiting"])
def test_nothing_is_left_of_a_consumer_that_is_killed(kind: str, phase: str) -> None:
    """It dies when it has waited for 50 ms: for a block that is read, or for one that may come."""
    has_died = threading.Event()

    def on_read(number: int) -> None:
        if phase == "amid blocks" and number == 5:
            has_died.wait(WAIT_SECONDS)

    reader = Blocks(None if phase == "amid blocks" else set(), on_read=on_read)
    limits = ServerLimits(Pace(0.5), sweep_seconds=0.02)
    server = BlockServer(reader, identity_of(), limits=limits)
    wait_seconds = WAIT_SECONDS if kind == "shared" else 0.4  # by its memory, or by its time
    if phase == "amid blocks":
        wait_seconds = 0.0
    process = subprocess.run(
        [sys.executable, "-c", DYING, server.address, kind, str(wait_seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=WAIT_SECONDS,
    )
    assert process.returncode == -9
    has_died.set()
    assert eventually(lambda: server.counts()["num_consumers"] == 0)
    with open("/proc/self/maps") as lines:
        assert not any(SEGMENT in line for line in lines)
    assert reader.num_read <= 9
    server.close()
