"""GroupCopies: the copies of KV blocks of all ranks of a model, as those of one worker.

Each rank has its own part of every block, in stores of its own, and carries out the orders of each
plan as rank 0 does. Their stores differ in what they have, and in how soon:

    a block is there ──> the stores of all ranks have their parts
    a load has ended ──> on all ranks; a block is filled if it is filled on all of them

The other ranks are called between two steps, only for blocks that rank 0 has, and for loads that
have ended there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine.kv_transfer.tiers import NOWHERE, Outside
from engine.messages.kv_orders import Loaded
from engine.messages.stats import StoreUse

if TYPE_CHECKING:
    from engine.kv_transfer.opening import PlannedStores

# Methods of the workers of further ranks.
OPEN, ANNOUNCE = "open_kv_stores", "announce_kv_blocks"
FIND, ENDED = "find_kv_blocks", "take_ended_kv_loads"
COUNTS, USES = "kv_store_counts", "kv_store_uses"


class RankCopies(Outside, Protocol):
    """The copies of one rank."""

    def take_reports(self) -> Sequence[Loaded]:
        """The loads that have ended since the last call. Called before each step."""

    def step_ended(self) -> None:
        """Called after each step."""

    def uses(self) -> Mapping[str, StoreUse]:
        """What each store has, by name."""


class Copies(RankCopies, Protocol):
    """The copies of one rank, or of several. ``planned``: the stores."""

    @property
    def planned(self) -> PlannedStores: ...

    def uses(self) -> dict[str, StoreUse]: ...

    def open(self, num_blocks: int, namespace: str) -> None:
        """Open the stores for blocks of this namespace, after all memory of the pool's
        ``num_blocks`` blocks is allocated. Raises ``ConfigError``."""

    def announce(self, host: str, port: int, keys: Sequence[bytes]) -> None:
        """Expect blocks at the engine whose rank 0 serves its own at this address."""


@runtime_checkable
class OtherWorkers(Protocol):
    """A group of workers; see ``engine.core.group.WorkerGroup``."""

    def notify_others(self, name: str, *args: Any) -> None:
        """Let the workers of all ranks but rank 0 run a method, without waiting for it."""

    def call_others(self, name: str, *args: Any) -> list[Any]:
        """Run a method of these workers. Returns their values."""

    def begin_others(self, name: str, *args: Any) -> Callable[[], None]:
        """Begin to run a method of these workers during a start. Returns a function that waits for
        the end."""


def methods_of(copies: RankCopies) -> dict[str, Callable[..., Any]]:
    """What the core may call of the copies of a further rank, by name."""
    return {
        FIND: copies.find,
        ENDED: copies.take_reports,
        COUNTS: lambda: dict(copies.counts()),
        USES: copies.uses,
    }


class MergedCopies:
    """The copies of rank 0 and those of further ranks. ``call``: calls a method of each of these,
    and returns their values."""

    def __init__(self, own: RankCopies, call: Callable[..., list[Any]]) -> None:
        self._own = own
        self._call = call
        self._ended: dict[int, Loaded] = {}  # on rank 0 and not on all others, by number
        self._others: dict[int, list[Loaded]] = {}  # that have ended on other ranks, by number

    @property
    def names(self) -> Sequence[str]:
        """The names of the stores."""
        return self._own.names

    @property
    def kept(self) -> dict[int, object]:
        """What is kept of loads that have ended on some ranks, by number."""
        return {**self._others, **self._ended}

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the fastest store that has each block, of the rank where this is slowest;
        ``NOWHERE`` if a rank has no part of it."""
        found = self._own.find(keys)
        places = [place for place, store in enumerate(found) if store != NOWHERE]
        if not places:
            return found
        for stores in self._call(FIND, [keys[place] for place in places]):
            for place, store in zip(places, stores, strict=True):
                is_there = NOWHERE not in (store, found[place])
                found[place] = max(store, found[place]) if is_there else NOWHERE
        return found

    def take_reports(self) -> list[Loaded]:
        """The loads that have ended on all ranks since the last call. Called before each step."""
        self._ended |= {report.number: report for report in self._own.take_reports()}
        if not self._ended:
            return []
        num_others = 0
        for reports in self._call(ENDED):
            num_others += 1
            for each in reports:
                report = Loaded(*each)
                self._others.setdefault(report.number, []).append(report)
        whole = [n for n in self._ended if len(self._others.get(n, ())) == num_others]
        return [merged([self._ended.pop(n), *self._others.pop(n, ())]) for n in whole]

    def step_ended(self) -> None:
        """Called after each step."""
        self._own.step_ended()

    def counts(self) -> dict[str, int]:
        """Counters of all stores; a key is ``store.counter``. Each is that of the rank with most:
        all ranks store the same blocks, and one that fails is seen."""
        counted = dict(self._own.counts())
        for counts in self._call(COUNTS):
            for name, count in counts.items():
                counted[name] = max(count, counted.get(name, 0))
        return counted

    def uses(self) -> dict[str, StoreUse]:
        """What each store has of whole blocks at most, and its bytes in all ranks, by name."""
        used = dict(self._own.uses())
        for uses in self._call(USES):
            for name, (num_blocks, num_bytes, num_cores, _) in uses.items():
                mine = used[name]
                used[name] = StoreUse(
                    min(mine.num_blocks, num_blocks),
                    mine.num_bytes + num_bytes,
                    min(mine.num_cores, num_cores),
                    mine.is_common,
                )
        return used


class GroupCopies(MergedCopies):
    """The copies of all ranks of a group of workers."""

    def __init__(self, own: Copies, workers: OtherWorkers) -> None:
        super().__init__(own, workers.call_others)
        self.planned = own.planned
        self._of_rank_0 = own
        self._begin = workers.begin_others
        self._notify = workers.notify_others

    def open(self, num_blocks: int, namespace: str) -> None:
        """Open the stores of all ranks. Raises ``ConfigError``."""
        end = self._begin(OPEN, num_blocks, namespace)
        self._of_rank_0.open(num_blocks, namespace)
        end()

    def announce(self, host: str, port: int, keys: Sequence[bytes]) -> None:
        """Expect blocks of each rank at the same rank of another engine."""
        self._of_rank_0.announce(host, port, keys)
        self._notify(ANNOUNCE, host, port, list(keys))


def merged(reports: Sequence[Loaded]) -> Loaded:
    """The end of a load on all ranks, of its ends on each."""
    is_good = bytes(map(min, zip(*(report.is_good for report in reports), strict=True)))
    return Loaded(reports[0].number, is_good, max(report.seconds for report in reports))
