"""Copies of KV blocks in host memory: what is served is right, the least recently used goes first,
cores of one launch find each other's blocks."""

from __future__ import annotations

import os
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.kv_rows import key_of, rows_of
from support.processes import collect_garbage

from engine.config.args import EngineArgs
from engine.errors import ConfigError, WireError
from engine.ipc.arena import NAME, Arena, ArenaFile
from engine.ipc.sealed_files import SealedFile
from engine.kv_transfer.host import HostStore, open_core_store, open_host_store
from engine.kv_transfer.regions import least_bytes
from engine.kv_transfer.stores import StoreIdentity
from engine.rpc.launch import share_of

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(10**6)))
SIZE = 1000  # bytes of a block, in most tests
MODEL = StoreIdentity("aa" * 32, SIZE)


def arena_bytes(num_slots: int, num_regions: int = 1) -> int:
    """A size of an arena whose regions have about this number of slots, or a few more."""
    return least_bytes(SIZE, num_regions) + num_regions * (num_slots - 1) * (SIZE + 150)


Pair = tuple[HostStore, HostStore]


@pytest.fixture
def file() -> Iterator[ArenaFile]:
    """The memory of two cores."""
    file = ArenaFile(arena_bytes(8, 2), 2)
    yield file
    file.close()


@pytest.fixture
def pair(file: ArenaFile) -> Iterator[Pair]:
    """The stores of two cores."""
    stores = open_host_store(0, MODEL, file.handle), open_host_store(0, MODEL, file.handle)
    yield stores
    for each in stores:
        each.close()


def write(store: HostStore, *numbers: int, weights: int = 0) -> list[bool]:
    return store.write([key_of(each) for each in numbers], rows_of(numbers, SIZE, weights))


def has(store: HostStore, *numbers: int, weights: int = 0) -> list[bool]:
    """Which of these it serves. What it serves must be right."""
    keys = [key_of(each) for each in numbers]
    rows = np.zeros((len(keys), SIZE), np.uint8)
    contained, found = store.contains(keys), store.read(keys, rows)
    assert contained == found
    assert (rows[found] == rows_of(numbers, SIZE, weights)[found]).all()
    return found


def fill(store: HostStore) -> int:
    """Write blocks 0, 1, ... until it is full. Returns how many."""
    return write(store, *range(100)).count(True)


# One core


def test_the_least_recently_used_block_is_evicted_first() -> None:
    print(f"METRONOME_SEED={SEED}")
    rng = random.Random(SEED)
    store = open_host_store(arena_bytes(10), MODEL)
    room = fill(store)
    model = OrderedDict.fromkeys(reversed(range(room)))
    for _ in range(400):
        some = rng.sample(range(3 * room), rng.randint(0, room))
        if rng.random() < 0.5:
            assert all(write(store, *some))
            for number in reversed(some):
                model[number] = None
                model.move_to_end(number)
            while len(model) > room:
                model.popitem(last=False)
        else:
            assert has(store, *some) == [number in model for number in some]
            for number in reversed(some):
                if number in model:
                    model.move_to_end(number)
        assert store.counts()["num_blocks"] == len(model)
        assert store.counts()["num_bytes"] == len(model) * SIZE


def test_a_chain_that_does_not_fit_keeps_its_beginning() -> None:
    store = open_host_store(arena_bytes(8), MODEL)
    room = fill(store)
    assert has(store, *range(100)) == [True] * room + [False] * (100 - room)
    assert store.counts()["refused"] == 100 - room
    write(store, 500, 501)
    assert has(store, *range(room)) == [True] * (room - 2) + [False] * 2
    assert store.counts()["evicted"] == 2


def test_keys_of_a_wrong_length_are_not_stored() -> None:
    store = open_host_store(arena_bytes(4), MODEL)
    keys = [b"k" * 48, b"k" * 49, b"k" * 47, b"", b"\0"]
    rows = rows_of(range(5), SIZE)
    assert store.write(keys, rows) == [True, False, True, True, True]
    read = np.zeros_like(rows)
    assert store.read(keys, read) == store.contains(keys) == [True, False, True, True, True]
    assert (read[[0, 2, 3, 4]] == rows[[0, 2, 3, 4]]).all()


@pytest.mark.parametrize("end", ["forget", "clear"])
def test_a_block_that_is_withdrawn_while_it_is_written_is_not_served(end: str) -> None:
    def copy(to: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        to[:] = source
        if end == "forget":
            store.forget([key_of(1)])
        else:
            store.clear()

    store = HostStore(Arena.private(arena_bytes(8)), MODEL, copy=copy)
    write(store, 1)
    assert has(store, 1) == [False]
    assert store.counts()["num_blocks"] == 0


def test_a_write_that_fails_leaves_nothing() -> None:
    store = open_host_store(arena_bytes(4), MODEL)
    with pytest.raises(ValueError, match="broadcast"):
        store.write([key_of(1)], np.zeros((1, SIZE + 1), np.uint8))
    assert has(store, 1) == [False]
    assert fill(store) >= 4


def test_threads_read_only_what_is_right() -> None:
    store = open_host_store(arena_bytes(6), MODEL)
    wrong: list[int] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            some = rng.sample(range(20), 4)
            keys, right = [key_of(each) for each in some], rows_of(some, SIZE)
            rows = np.zeros_like(right)
            found = store.read(keys, rows)
            wrong.extend(np.flatnonzero((rows[found] != right[found]).any(axis=1)))
            store.write(keys, right)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_offloading_size is 1\.\d+e\+09 GiB, but only .* free"
    ):
        open_host_store(1 << 60, MODEL)
    large = MODEL._replace(block_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"one block of 1048576 bytes .* at least 0\.001 "):
        open_host_store(1 << 20, large)
    store = open_host_store(int(0.002 * (1 << 30)), large)
    assert store.write([key_of(1)], np.zeros((1, 1 << 20), np.uint8)) == [True]


# Several cores


def test_a_core_reads_what_another_has_written(pair: Pair) -> None:
    one, other = pair
    write(one, 1, 2, 3)
    assert has(other, 1, 2, 3, 4) == [True, True, True, False]
    assert all(write(other, 1, 2, 3, 4))
    assert other.counts()["num_blocks"] == 1  # the others are not written again
    assert other.counts()["from_others"] == 3


def test_blocks_that_another_core_uses_are_kept(pair: Pair) -> None:
    one, other = pair
    room = fill(one)
    assert has(other, room - 1) == [True]  # the end of a chain, which is evicted first
    write(one, 500)
    assert has(one, *range(room)) == [True] * (room - 2) + [False, True]


def test_what_one_core_forgets_no_core_serves(pair: Pair) -> None:
    one, other = pair
    write(one, 1, 2)
    write(other, 3)
    assert has(other, 1, 2, 3) == has(one, 1, 2, 3) == [True] * 3
    one.forget([key_of(1), key_of(3), key_of(9)])
    assert has(other, 1, 2, 3) == has(one, 1, 2, 3) == [False, True, False]
    assert other.counts()["num_blocks"] == 0
    write(other, 1)  # computed again
    assert has(one, 1) == [True]


def test_after_a_core_has_new_weights_no_blocks_of_others_are_for_it(
    pair: Pair,
) -> None:
    one, other = pair
    write(one, 1)
    write(other, 2)
    one.clear()
    assert has(one, 1, 2) == [False, False]
    assert has(other, 1, 2) == [False, True]  # has the former weights still
    write(one, 1, weights=1)
    assert has(one, 1, weights=1) == [True]
    assert has(other, 1) == [False]


def test_a_slot_that_is_written_while_another_core_reads_it_is_a_miss(file: ArenaFile) -> None:
    writer = open_host_store(0, MODEL, file.handle)
    room = fill(writer)

    def copy(to: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        half = SIZE // 2
        to[:, :half] = source[:, :half]
        write(writer, *range(100, 100 + room))
        to[:, half:] = source[:, half:]

    reader = HostStore(Arena.shared(file.handle), MODEL, copy=copy)
    assert reader.contains([key_of(1)]) == [True]
    assert reader.read([key_of(1)], np.zeros((1, SIZE), np.uint8)) == [False]
    assert reader.counts()["overtaken"] == 1
    reader.close()
    writer.close()


def test_a_core_that_gets_new_weights_while_it_reads_has_nothing(file: ArenaFile) -> None:
    writer = open_host_store(0, MODEL, file.handle)
    write(writer, 1)

    def copy(to: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        to[:] = source
        reader.clear()

    reader = HostStore(Arena.shared(file.handle), MODEL, copy=copy)
    assert reader.contains([key_of(1)]) == [True]
    assert reader.read([key_of(1)], np.zeros((1, SIZE), np.uint8)) == [False]
    reader.close()
    writer.close()


def test_a_key_that_moved_to_another_slot_is_forgotten_there(
    pair: Pair,
) -> None:
    one, other = pair
    write(one, 1)
    write(one, 2)
    assert has(other, 1, 2) == [True, True]
    one.forget([key_of(1)])
    one.forget([key_of(2)])
    write(one, 1)  # where 2 was
    assert has(other, 1, 2) == [True, False]
    other.forget([key_of(1)])
    write(one, 7)
    write(one, 8)  # where 1 was first
    assert has(other, 1, 2, 7, 8) == [False, False, True, True]


def test_a_core_that_starts_again_has_the_blocks_it_had() -> None:
    file = ArenaFile(arena_bytes(8, 1), 1)
    store = open_host_store(0, MODEL, file.handle)
    room = fill(store)
    assert has(store, room - 1) == [True]
    store.close()
    store = open_host_store(0, MODEL, file.handle)
    write(store, 500)  # in place of the least recently used one
    assert has(store, *range(room)) == [True] * (room - 2) + [False, True]
    store.close()
    store = open_host_store(0, MODEL._replace(namespace="bb"), file.handle)
    assert has(store, *range(room)) == [False] * room and fill(store) == room
    store.close()
    file.close()


def test_memory_is_released_and_regions_are_bounded() -> None:
    file = ArenaFile(arena_bytes(4, 1), 1)
    store = open_host_store(0, MODEL, file.handle)
    with pytest.raises(WireError, match="use all 1 regions"):
        Arena.shared(file.handle, claim_seconds=0.0)
    store.close()
    store.close()
    assert store.contains([key_of(1)]) == write(store, 1) == [False]
    open_host_store(0, MODEL, file.handle).close()
    file.close()
    with pytest.raises(WireError):
        open_host_store(0, MODEL, file.handle)
    del store
    collect_garbage()
    with open("/proc/self/maps") as maps:
        assert NAME not in maps.read()
    assert not any(NAME in each for each in os.listdir("/dev/shm"))


class Core:
    """A core with a store, its weights, and the size of its blocks."""

    def __init__(self, file: SealedFile, size: int, version: int) -> None:
        self.size = size
        self.weights = version
        self.store = open_host_store(0, StoreIdentity(f"model {version}", size), file)


def test_random_cores_serve_only_what_is_right() -> None:
    """Cores write, read, forget, get new weights, end and start again, some with other weights or
    another size of blocks."""
    print(f"METRONOME_SEED={SEED}")
    rng = random.Random(SEED)
    file = ArenaFile(arena_bytes(6, 3), 3)
    cores = [Core(file.handle, SIZE, 0) for _ in range(3)]
    written: set[tuple[int, int, int]] = set()  # size, weights, number; less what was forgotten
    new_weights = iter(range(100, 10000))
    num_served = 0
    for _ in range(1500):
        index = rng.randrange(3)
        core = cores[index]
        some = rng.sample(range(24), rng.randint(1, 5))
        keys, right = [key_of(each) for each in some], rows_of(some, core.size, core.weights)
        known = {(core.size, core.weights, each) for each in some}
        match rng.choices(("write", "read", "forget", "clear", "end"), (40, 50, 5, 2, 3))[0]:
            case "write":
                assert all(core.store.write(keys, right)) and all(core.store.contains(keys))
                written |= known
            case "read":
                rows = np.zeros_like(right)
                found = core.store.read(keys, rows)
                assert core.store.contains(keys) == found
                assert (rows[found] == right[found]).all()
                served = {each for each, is_there in zip(some, found, strict=True) if is_there}
                assert {(core.size, core.weights, each) for each in served} <= written
                num_served += len(served)
            case "forget":
                core.store.forget(keys)
                written -= known
            case "clear":
                core.store.clear()
                core.weights = next(new_weights)
            case _:
                core.store.close()
                size, version = rng.choices(((SIZE, 0), (SIZE, 1), (700, 0)), (80, 10, 10))[0]
                cores[index] = Core(file.handle, size, version)
    assert num_served > 100
    for core in cores:
        core.store.close()
    file.close()


# Options


def test_cores_have_their_share_where_they_share_no_memory() -> None:
    options: dict[str, Any] = {"multiprocess": True, "data_parallel_size": 2, "num_threads": 1}
    config = EngineArgs(kv_offloading_size=0.5, **options).create_config()
    assert share_of(config, 2).cache.kv_offloading_size == 0.25


def test_a_core_without_the_arena_of_its_launcher_has_memory_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineArgs(kv_offloading_size=0.001).create_config()
    file = ArenaFile(arena_bytes(4), 1)
    file.close()
    store = open_core_store(replace(config, kv_arena=file.handle), MODEL)
    assert fill(store) == 100
    assert "not shared with other cores" in caplog.text
