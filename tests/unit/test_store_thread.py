"""What goes wrong in a store of KV blocks costs its own blocks: loads end, steps go on."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from engine.kv_transfer import store_thread
from engine.kv_transfer.store_thread import MOST_FAULTS, Activity, Load, Loading, StoreThread
from engine.kv_transfer.stores import Rows
from engine.messages.kv_orders import LoadOrder

SIZE = 8
WAIT = 30.0


class Store:
    """Keeps blocks in a dict. ``does[method]`` is called in place of a method."""

    name = "test"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.does: dict[str, Callable[..., Any]] = {}
        self.calls: Counter[str] = Counter()
        self.is_closed = False

    def _instead(self, method: str, *given: Any) -> Any:
        self.calls[method] += 1
        return self.does[method](*given) if method in self.does else NotImplemented

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        answer = self._instead("contains", keys)
        return [key in self.blocks for key in keys] if answer is NotImplemented else answer

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        answer = self._instead("read", keys, rows)
        if answer is not NotImplemented:
            return answer  # type: ignore[no-any-return]
        for row, key in zip(rows, keys, strict=True):
            if key in self.blocks:
                row[:] = memoryview(self.blocks[key])
        return [key in self.blocks for key in keys]

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        answer = self._instead("write", keys, rows)
        if answer is not NotImplemented:
            return answer  # type: ignore[no-any-return]
        self.blocks |= {key: row.tobytes() for key, row in zip(keys, rows, strict=True)}
        return [True] * len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        if self._instead("forget", keys) is NotImplemented:
            for key in keys:
                self.blocks.pop(key, None)

    def clear(self) -> None:
        if self._instead("clear") is NotImplemented:
            self.blocks.clear()

    def counts(self) -> Mapping[str, int]:
        answer = self._instead("counts")
        return {"num_blocks": 1, "evicted": 2} if answer is NotImplemented else answer

    def close(self) -> None:
        self._instead("close")
        self.is_closed = True


class Bench:
    """A thread with a store, and a pool that its loads fill."""

    def __init__(self, store: Store, **roles: Any) -> None:
        self.store = store
        self.pool: dict[int, bytes] = {}
        self.ended: list[int] = []
        self._number = 0
        loading = Loading(SIZE, lambda num: np.empty((num, SIZE), np.uint8), self._fill, self._end)
        self.thread = StoreThread(store, loading, **roles)

    def _fill(self, order: LoadOrder, places: list[int], rows: Rows) -> None:
        self.pool |= {order.blocks[i]: row.tobytes() for i, row in zip(places, rows, strict=True)}

    def _end(self, load: Load, seconds: float) -> None:
        self.ended.append(load.order.number)

    def load(self, *keys: bytes) -> int:
        self._number += 1
        blocks = [self._number * 100 + nth for nth in range(len(keys))]
        order = LoadOrder(self._number, list(keys), blocks, [0] * len(keys))
        self.thread.add_load(Load(order, list(range(len(keys)))))
        return self._number

    def loaded(self, *keys: bytes) -> list[bytes | None]:
        """What the blocks of a load contain when it has ended; ``None`` if it filled one not."""
        number = self.load(*keys)
        self.until(lambda: number in self.ended)
        assert self.ended.count(number) == 1
        return [self.pool.get(number * 100 + nth) for nth in range(len(keys))]

    def write(self, *keys: bytes) -> None:
        rows = np.array([list(key.ljust(SIZE)) for key in keys], dtype=np.uint8)
        self.thread.add_writes(list(keys), lambda: rows)

    def until(self, is_so: Callable[[], object]) -> None:
        until = time.monotonic() + WAIT
        while not is_so():
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        self.thread.begin_close()
        self.thread.end_close(WAIT)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Store())
    bench.store.blocks = {bytes([n]): bytes([n] * SIZE) for n in range(97, 123)}
    yield bench
    bench.close()
    assert bench.store.is_closed


def fails(*_: Any) -> Any:
    raise OSError("the cable is out")


WRONG: dict[str, Callable[..., Any]] = {
    "raises": fails,
    "ends the process": lambda *_: exec("raise SystemExit(1)"),
    "answers None": lambda *_: None,
    "answers too few": lambda *_: [],
    "answers too many": lambda keys, *_: [True] * (len(keys) + 1),
    "answers numbers": lambda keys, *_: [1] * len(keys),
    "answers a string": lambda keys, *_: "y" * len(keys),
    "answers a number": lambda *_: 1,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_read_that_is_wrong_supplies_nothing_and_the_store_is_left_out_in_the_end(
    bench: Bench, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.does["read"] = WRONG[fault]
    with caplog.at_level(logging.WARNING, "engine.kv"):
        for _ in range(MOST_FAULTS):
            assert bench.thread.contains([b"a"]) == [True]
            bench.write(b"new")  # which works all the time
            assert bench.loaded(b"a", b"b") == [None, None]
        assert bench.thread.contains([b"a"]) == [False]
        calls = bench.store.calls["read"]
        assert bench.loaded(b"a") == [None] and bench.store.calls["read"] == calls
    messages = [record.getMessage() for record in caplog.records]
    assert all("test failed: read " in message for message in messages[:-1])
    assert "is not used any more: read has failed 8 times in a row" in messages[-1]
    assert len(messages) == MOST_FAULTS + 1
    assert bench.thread.counters()["errors"] == MOST_FAULTS


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("method", ["contains", "write"])
def test_other_methods_that_are_wrong_cost_no_more(bench: Bench, method: str, fault: str) -> None:
    if (method, fault) == ("contains", "ends the process"):
        pytest.skip("the engine may be ended in its own thread")
    bench.store.does[method] = WRONG[fault]
    for number in range(MOST_FAULTS):
        if method == "contains":
            assert bench.thread.contains([b"a", b"b"]) == [False, False]
        else:
            bench.write(bytes([number]))
    bench.until(lambda: not bench.thread.is_used)
    assert bench.thread.counters()["errors"] == MOST_FAULTS


def test_a_store_may_answer_in_numpy(bench: Bench) -> None:
    bench.store.does["contains"] = lambda keys: np.ones(len(keys), dtype=np.bool_)
    bench.store.does["read"] = lambda keys, rows: [rows.fill(7), *[np.True_] * len(keys)][1:]
    assert bench.thread.contains([b"a", b"b"]) == [True, True]
    assert bench.loaded(b"a", b"b") == [bytes([7] * SIZE)] * 2
    assert "errors" not in bench.thread.counters()


def test_single_faults_are_forgiven(bench: Bench) -> None:
    for _ in range(2 * MOST_FAULTS):
        bench.store.does["read"] = fails
        assert bench.loaded(b"a") == [None]
        del bench.store.does["read"]
        assert bench.loaded(b"a", b"b") == [b"a" * SIZE, b"b" * SIZE]
    assert bench.thread.is_used


def test_a_store_that_promises_what_it_never_supplies_is_left_out(bench: Bench) -> None:
    bench.store.does["contains"] = lambda keys: [True] * len(keys)
    for _ in range(MOST_FAULTS):
        assert bench.thread.is_used
        assert bench.loaded(b"a", b"A") == [b"a" * SIZE, None]
    assert not bench.thread.is_used


def test_blocks_that_were_dropped_meanwhile_are_no_fault(bench: Bench) -> None:
    for _ in range(2 * MOST_FAULTS):
        assert bench.loaded(b"a", b"A") == [b"a" * SIZE, None]
    assert bench.thread.is_used and "errors" not in bench.thread.counters()


def test_loads_in_the_queue_end_when_the_store_is_left_out(bench: Bench) -> None:
    gate = threading.Event()

    def read(keys: Sequence[bytes], rows: Rows) -> Any:
        gate.wait(WAIT)
        raise OSError("gone")

    bench.store.does["read"] = read
    numbers = [bench.load(b"a") for _ in range(3 * MOST_FAULTS)]
    gate.set()
    bench.until(lambda: sorted(bench.ended) == numbers)
    assert bench.store.calls["read"] == MOST_FAULTS and not bench.pool


def test_a_read_that_hangs_ends_all_loads_until_it_returns(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_thread, "MOST_SECONDS", 0.02)
    gate, begun = threading.Event(), threading.Event()

    def read(keys: Sequence[bytes], rows: Rows) -> list[bool]:
        begun.set()
        gate.wait(WAIT)
        rows[:] = 255
        return [True] * len(keys)

    bench.store.does["read"] = read
    hung = [bench.load(b"a"), bench.load(b"b")]
    assert begun.wait(WAIT)
    with caplog.at_level(logging.WARNING, "engine.kv"):
        bench.until(lambda: (bench.thread.check(), len(bench.ended) == 2)[1])
        bench.thread.check()
    assert sorted(bench.ended) == hung and not bench.thread.is_used
    assert [each.getMessage() for each in caplog.records] == [
        "the KV store test failed: read has not returned for 0.02 s; it is not used until that"
    ]
    assert bench.loaded(b"c") == [None] and bench.thread.contains([b"a"]) == [False]
    assert bench.thread.counters() == {"errors": 1}  # the store is not called
    del bench.store.does["read"]
    gate.set()
    bench.until(lambda: bench.thread.is_used)
    assert bench.loaded(b"c") == [b"c" * SIZE]
    assert sorted(bench.ended)[:2] == hung
    assert not {100, 200} & bench.pool.keys()  # blocks that belong to others by then


@pytest.mark.parametrize("method", ["forget", "clear"])
def test_a_store_that_may_supply_withdrawn_blocks_is_left_out(bench: Bench, method: str) -> None:
    bench.store.does[method] = fails
    if method == "forget":
        bench.thread.forget([b"a"])
    else:
        bench.thread.clear()
    assert not bench.thread.is_used and bench.loaded(b"a") == [None]


@pytest.mark.parametrize("withdraw", ["forget", "clear"])
def test_blocks_are_withdrawn_while_they_are_written(bench: Bench, withdraw: str) -> None:
    gate, begun = threading.Event(), threading.Event()

    def write(keys: Sequence[bytes], rows: Rows) -> Any:
        begun.set()
        gate.wait(WAIT)
        bench.store.blocks |= dict.fromkeys(keys, bytes(SIZE))
        return [True] * len(keys)

    bench.store.does["write"] = write
    bench.write(b"wrong", b"right")
    assert begun.wait(WAIT)
    if withdraw == "forget":
        bench.thread.forget([b"wrong"])
    else:
        bench.thread.clear()
    gate.set()
    del bench.store.does["write"]
    bench.write(b"last")
    bench.until(lambda: b"last" in bench.store.blocks)
    assert (b"right" in bench.store.blocks) == (withdraw == "forget")
    assert b"wrong" not in bench.store.blocks


def test_the_end_stores_what_waits_and_loads_nothing_more() -> None:
    bench, gate = Bench(Store()), threading.Event()
    bench.store.does["write"] = lambda *_: gate.wait(WAIT) and NotImplemented
    for n in range(9):
        bench.write(bytes([n]))
    bench.load(b"a")
    bench.thread.begin_close()
    gate.set()
    bench.thread.end_close(WAIT)
    assert len(bench.store.blocks) == 9 and bench.store.is_closed
    assert not bench.store.calls["read"]
    assert bench.loaded(b"a") == [None]  # late calls are harmless
    bench.write(b"late")


def test_the_end_does_not_wait_for_a_store_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    bench, gate = Bench(Store()), threading.Event()
    bench.store.does["write"] = lambda *_: gate.wait(WAIT) and NotImplemented
    for n in range(3):
        bench.write(bytes([n]))
    bench.until(lambda: bench.store.calls["write"])
    bench.thread.begin_close()
    with caplog.at_level(logging.WARNING, "engine.kv"):
        bench.thread.end_close(0.01)
    assert "did not end in time; 2 blocks are not stored" in caplog.text
    gate.set()
    bench.until(lambda: bench.store.is_closed)
    assert bench.store.calls["write"] == 1


@pytest.mark.parametrize("answer", [None, 3, {"evicted": "many"}, {"evicted": None}, "raises"])
def test_wrong_counters_are_left_out(bench: Bench, answer: Any) -> None:
    bench.store.does["counts"] = fails if answer == "raises" else lambda: answer
    assert bench.thread.counters() == {"errors": 1}
    assert bench.thread.use().num_blocks == 0


def test_counters_are_of_what_has_happened(bench: Bench) -> None:
    bench.write(b"x", b"y")
    bench.until(lambda: bench.thread.counters() == {"stored": 2, "evicted": 2})


def test_a_slow_search_is_a_fault(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "MOST_FIND_SECONDS", -1.0)
    for _ in range(MOST_FAULTS):
        assert bench.thread.contains([b"a"]) == [True]
    assert bench.thread.contains([b"a"]) == [False]


def test_writes_leave_the_processor_to_an_engine_that_computes() -> None:
    """The second write waits much longer than the first one took, but not once nothing runs."""
    store = Store()

    def write(keys: Sequence[bytes], rows: Rows) -> list[bool]:
        time.sleep(0.2)
        store.blocks |= dict.fromkeys(keys, b"")
        return [True] * len(keys)

    store.does["write"] = write
    activity = Activity(in_step=True)
    bench = Bench(store, activity=activity)
    bench.write(b"a")
    bench.until(lambda: b"a" in store.blocks)
    bench.write(b"b")
    time.sleep(0.2)
    assert b"b" not in store.blocks
    activity.in_step = False
    bench.until(lambda: b"b" in store.blocks)
    bench.close()


def test_only_as_many_blocks_wait_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first blocks of a large step are stored, and those that the store has take no room."""
    monkeypatch.setattr(store_thread, "MOST_PACED", 3 * SIZE)
    store, gate = Store(), threading.Event()
    store.blocks[b"a"] = bytes(SIZE)
    store.does["write"] = lambda keys, rows: [gate.wait(WAIT)] * len(keys)
    bench = Bench(store, activity=Activity(in_step=True))
    keys = [b"a", b"b", b"c", b"d", b"e"]
    assert bench.thread.lacking(keys) == [1, 2, 3]
    assert bench.thread.counts["skipped"] == 1
    bench.write(b"b", b"c")
    assert bench.thread.lacking(keys[3:]) == [0]
    gate.set()
    bench.close()
