"""What other ranks keep of adapters is what rank 0 keeps, whatever happens to readings."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from support.simulate import make_request

from engine.errors import ConfigError
from engine.lora.kept import KeptAdapters
from engine.lora.library import AdapterLibrary, Version
from engine.lora.loading import FutureReading, Order
from engine.lora.store import AdapterStore
from engine.messages.adapters import AdapterSource
from engine.worker.rank import CALL, NOTIFY, Rank, RankReport
from policylab.verify.fake import CountingWorker

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
NAMES = "xyzuv"
NUM_RUNS = 40


@dataclass(frozen=True)
class Part:
    """A rank's part of an adapter."""

    digest: str
    num_bytes: int
    share: float
    rank: int = 4


class Disk:
    """A reader of one rank: a test decides when a reading ends, and what it has found."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.readings: list[tuple[Order, FutureReading]] = []

    def submit(self, order: Order) -> FutureReading:
        self.readings.append((order, FutureReading()))
        return self.readings[-1][1]

    def end(self, place: int, found: str | Exception) -> None:
        _, reading = self.readings.pop(place)
        if isinstance(found, Exception):
            reading.future.set_exception(found)
        else:
            reading.future.set_result(Part(found, 10 + self.number, 0.1 * (1 + self.number)))

    def shutdown(self) -> None:
        pass


class Worker(CountingWorker):
    """The worker of a further rank, which has the feature of adapters."""

    def __init__(self, feature: KeptAdapters) -> None:
        super().__init__()
        self._feature = feature

    def call(self, name: str, *args: Any) -> Any:
        return self._feature.methods[name](*args)


class Group:
    """A library and further ranks of one process, which carry out what is sent to them."""

    def __init__(self, size: int = 3, **options: Any) -> None:
        self.disks = [Disk(number) for number in range(size)]
        self.stores: list[AdapterStore[Any]] = [AdapterStore() for _ in range(size - 1)]
        self.kept = [KeptAdapters(*each) for each in zip(self.disks[1:], self.stores, strict=True)]
        self.reports: list[dict[int, RankReport]] = [{} for _ in self.kept]
        self.ranks = []
        for feature, reports in zip(self.kept, self.reports, strict=True):

            def report(one: RankReport, reports: dict[int, RankReport] = reports) -> None:
                reports[one.number] = one

            self.ranks.append(Rank(Worker(feature), lambda index, value: None, report))
        self.num_calls = 0
        self.store: AdapterStore[Any] = AdapterStore(**options)
        self.library = AdapterLibrary(self.disks[0], self.store, most_pinned=1)
        self.library.share(self)

    def notify_others(self, name: str, *args: Any) -> None:
        self._send(NOTIFY, name, *args)

    def start_call_on_others(self, name: str, *args: Any) -> Answered:
        self._send(CALL, "call", name, *args)
        self.num_calls += 1
        return Answered(self.reports, self.num_calls - 1)

    def _send(self, kind: bytes, name: str, *args: Any) -> None:
        for rank in self.ranks:
            rank.carry_out(kind + msgspec.msgpack.encode([name, args]))

    def check(self) -> None:
        """Each rank keeps what rank 0 keeps."""
        for store in self.stores:
            assert sorted(vars(store)["_copies"]) == sorted(vars(self.store)["_copies"])


class Answered:
    def __init__(self, reports: Sequence[dict[int, RankReport]], number: int) -> None:
        self._reports, self._number = reports, number

    @property
    def are_there(self) -> bool:
        return all(self._number in each for each in self._reports)

    def wait(self) -> list[RankReport]:
        return [each.pop(self._number) for each in self._reports]


def arrive(group: Group, request_id: str, name: str, path: str) -> Version:
    """A request that needs an adapter comes, as ``AdapterSlots`` treats it."""
    request = make_request(request_id, [1], adapter=name, adapter_source=AdapterSource(path))
    group.library.resolved(request)
    version = group.library.arrived(request_id)
    assert version is not None
    group.library.want(version)
    return version


def test_an_adapter_is_there_when_all_ranks_have_it() -> None:
    group = Group()
    version = arrive(group, "0", "x", "a")
    for disk in (group.disks[1], group.disks[0], group.disks[2]):
        assert not group.store
        disk.end(0, "A")
        group.library.sweep()
    assert group.store.copy_of("A") == Part("A", 33, pytest.approx(0.3))
    group.check()
    assert group.stores[0].copy_of("A") == Part("A", 11, 0.2)
    assert version.digest == "A"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_read_an_adapter_fails_it_for_all(rank: int) -> None:
    group = Group()
    version = arrive(group, "0", "x", "a")
    for number, disk in enumerate(group.disks):
        assert not version.fault
        disk.end(0, ConfigError("adapter 'x' is damaged") if number == rank else "A")
        group.library.sweep()
    if rank == 0:
        assert version.fault == "adapter 'x' is damaged"
    else:
        assert f"by rank 0, but not by rank {rank} (adapter 'x' is damaged)" in version.fault
    assert not group.store and not any(group.reports)
    group.check()


def test_ranks_that_read_different_files_do_not_keep_them() -> None:
    group = Group()
    version = arrive(group, "0", "x", "a")
    for disk, found in zip(group.disks, "ABA", strict=True):
        disk.end(0, found)
    group.library.sweep()
    assert "rank 1 has read other files of adapter 'x' than rank 0" in version.fault
    group.check()


class RandomRun:
    """Random events, after each of which all ranks keep the same."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.group = Group(max_adapters=2)
        self.held: list[Version] = []
        self.num = 0
        self.actions = (self.come, self.come, *[self.end] * 4, self.go, self.go, self.hurry)

    def event(self) -> None:
        self.rng.choice(self.actions)()
        if self.rng.random() < 0.1:
            self.group.library.remove(self.rng.choice(NAMES))
        self.group.library.sweep()
        self.group.check()

    def come(self) -> None:
        name, self.num = self.rng.choice(NAMES), self.num + 1
        self.held.append(arrive(self.group, str(self.num), name, name))

    def end(self) -> None:
        disks = [disk for disk in self.group.disks if disk.readings]
        if disks:
            disk = self.rng.choice(disks)
            place = self.rng.randrange(len(disk.readings))
            content = disk.readings[place][0].path + self.rng.choice("aaaaaaaab")
            disk.end(place, ConfigError("damaged") if self.rng.random() < 0.1 else content)

    def go(self) -> None:
        if self.held:
            self.group.library.let_go(self.held.pop(self.rng.randrange(len(self.held))))

    def hurry(self) -> None:
        self.group.library.hurry(is_alone=self.rng.random() < 0.5)


def test_ranks_keep_the_same_whatever_happens() -> None:
    num_read = num_dropped = 0
    for seed in range(SEED, SEED + NUM_RUNS):
        print(f"METRONOME_SEED={seed}")
        run = RandomRun(seed)
        group = run.group
        for _ in range(150):
            run.event()
        while run.held or any(disk.readings for disk in group.disks):
            run.go()
            for disk in group.disks:
                while disk.readings:
                    disk.end(0, disk.readings[0][0].path + "a")
            group.library.sweep()
            group.check()
        assert not any(group.reports), "an answer was not read"
        assert not any(vars(feature)["_readings"] for feature in group.kept)
        num_read += group.library.num_read
        num_dropped += group.library.num_dropped
    assert num_read > NUM_RUNS and num_dropped > NUM_RUNS / 4
