"""The copies of KV blocks of several ranks, as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.kv_transfer.group_copies import MergedCopies, methods_of
from engine.kv_transfer.tiers import NOWHERE
from engine.messages.kv_orders import Loaded
from engine.messages.stats import StoreUse


class Copies:
    """The copies of a rank. ``stores``: the store of each key that it has."""

    names = ("host", "disk")

    def __init__(self, stores: dict[bytes, int]) -> None:
        self.stores = stores
        self.reports: list[Loaded] = []
        self.counted = {"disk.stored": 3}
        self.used = StoreUse(3, 30)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        return [self.stores.get(key, NOWHERE) for key in keys]

    def take_reports(self) -> list[Loaded]:
        reports, self.reports = self.reports, []
        return reports

    def step_ended(self) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return self.counted

    def uses(self) -> dict[str, StoreUse]:
        return {"disk": self.used}


class Group:
    """Ranks whose answers travel as in other processes."""

    def __init__(self, *ranks: dict[bytes, int]) -> None:
        self.ranks = [Copies(stores) for stores in ranks]
        self.called: list[str] = []
        self.merged = MergedCopies(self.ranks[0], self._call)

    def _call(self, name: str, *args: Any) -> list[Any]:
        self.called.append(name)
        values = [methods_of(rank)[name](*args) for rank in self.ranks[1:]]
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(value)) for value in values]


def test_a_block_is_where_all_ranks_have_their_parts() -> None:
    group = Group({b"a": 0, b"b": 0, b"c": 1}, {b"a": 1, b"c": 0, b"d": 0}, {b"a": 0, b"b": 0})
    assert group.merged.find([b"a", b"b", b"c", b"d"]) == [1, NOWHERE, NOWHERE, NOWHERE]
    assert len(group.called) == 1
    assert group.merged.find([b"d", b"e"]) == [NOWHERE] * 2 and len(group.called) == 1


def test_a_load_ends_with_the_last_rank_and_has_what_all_have() -> None:
    group = Group({}, {}, {})
    first, second, third = group.ranks
    second.reports = [Loaded(1, b"\1\1\0", 0.1)]
    assert not group.merged.take_reports() and not group.called
    first.reports = [Loaded(2, b"\1", 0.1), Loaded(1, b"\1\1\1", 0.2)]
    assert not group.merged.take_reports()
    third.reports = [Loaded(1, b"\0\1\1", 0.5)]
    assert group.merged.take_reports() == [Loaded(1, b"\0\1\0", 0.5)]
    second.reports, third.reports = [Loaded(2, b"\1", 0.0)], [Loaded(2, b"\1", 0.0)]
    assert group.merged.take_reports() == [Loaded(2, b"\1", 0.1)]
    assert not group.merged.kept


def test_statistics_show_a_rank_that_fails() -> None:
    group = Group({}, {})
    group.ranks[1].counted = {"disk.stored": 1, "disk.errors": 8}
    group.ranks[1].used = StoreUse(1, 10, num_cores=0)
    assert group.merged.counts() == {"disk.stored": 3, "disk.errors": 8}
    assert group.merged.uses() == {"disk": StoreUse(1, 40, num_cores=0)}
