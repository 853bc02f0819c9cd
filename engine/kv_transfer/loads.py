"""Loads in progress: who waits for them, which blocks they bring, and how fast stores are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.kv.promotions import Promotion, Wanted
from engine.sched.request import Request


@dataclass(slots=True)
class Speed:
    """How fast a store is read, in seconds per byte; recent loads weigh most."""

    num_bytes: float
    seconds: float
    pending: int = 0  # bytes of loads in progress

    def add(self, num_bytes: int, seconds: float) -> None:
        """Note a load of this many bytes."""
        self.num_bytes = self.num_bytes / 2 + num_bytes
        self.seconds = self.seconds / 2 + seconds

    def seconds_for(self, num_bytes: int) -> float:
        """Expected seconds until a load of this many bytes ends, after those in progress."""
        return (self.pending + num_bytes) * self.seconds / self.num_bytes


@dataclass(slots=True)
class Load:
    """A load in progress. ``req``: the request that waits for it, ``None`` if none does.
    ``stores``: of each block. ``withdrawn``: keys that must not be published any more. ``others``:
    requests that wait for the same blocks, by arrival number."""

    promotion: Promotion
    req: Request | None
    begun: float
    stores: list[int]
    bytes_by_store: dict[int, int]
    withdrawn: set[bytes] = field(default_factory=set)
    others: dict[int, Request] = field(default_factory=dict)

    @property
    def is_awaited(self) -> bool:
        """True if a request waits for it."""
        return self.req is not None or bool(self.others)


class Loads:
    """The loads that have not ended."""

    def __init__(self, block_bytes: int, speeds: Sequence[float]) -> None:
        """block_bytes: of a block in all ranks. speeds: bytes per second that each store is
        expected to supply, until it was measured."""
        first = 64 * block_bytes
        self.newest = 0  # number of the newest load
        self._block_bytes = block_bytes
        self._speeds = [Speed(first, first / speed) for speed in speeds]
        self._by_number: dict[int, Load] = {}
        self._coming: dict[bytes, Load] = {}  # that loads each key for a request which waits
        self._joined: set[int] = set()  # arrival numbers of those that waited for another's load

    @property
    def num_stores(self) -> int:
        """Number of stores."""
        return len(self._speeds)

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._by_number.values())

    def find(self, number: int) -> Load | None:
        """The load with this number, unless it has ended."""
        return self._by_number.get(number)

    def bytes_by_store(self, stores: Sequence[int]) -> dict[int, int]:
        """Bytes of blocks that come from these stores."""
        return {store: stores.count(store) * self._block_bytes for store in dict.fromkeys(stores)}

    def seconds_for(self, num_bytes: Mapping[int, int]) -> float:
        """Expected seconds until a load of this many bytes from each store ends."""
        return sum(self._speeds[store].seconds_for(part) for store, part in num_bytes.items())

    def begin(self, promotion: Promotion, req: Request, now: float, stores: list[int]) -> int:
        """Note a load for a request, of blocks from these stores. Returns its number."""
        self.newest += 1
        load = Load(promotion, req, now, stores, self.bytes_by_store(stores))
        for store, part in load.bytes_by_store.items():
            self._speeds[store].pending += part
        self._by_number[self.newest] = load
        self._coming |= dict.fromkeys(promotion.wanted.keys, load)
        return self.newest

    def end(self, number: int) -> Load | None:
        """Note the end of a load, and return it; ``None`` if it has ended before."""
        load = self._by_number.pop(number, None)
        for store, part in {} if load is None else load.bytes_by_store.items():
            self._speeds[store].pending -= part
        return load

    def measure(self, load: Load, seconds: float) -> None:
        """Note how long a load took that has brought all its blocks."""
        num_bytes = sum(load.bytes_by_store.values())
        for store, part in load.bytes_by_store.items():
            self._speeds[store].add(part, seconds * part / num_bytes)

    # -- who waits

    def coming_for(self, req: Request, wanted: Wanted) -> Load | None:
        """A load in progress that brings blocks which a request wants. It waits for another's load
        once: what it then lacks is loaded for it alone."""
        coming = {} if req.arrival in self._joined else self._coming
        return next((coming[key] for key in wanted.keys if key in coming), None)

    def join(self, req: Request, load: Load) -> None:
        """Let a request wait for a load that was begun for another."""
        self._joined.add(req.arrival)
        load.others[req.arrival] = req

    def end_wait(self, load: Load) -> tuple[Request | None, list[Request]]:
        """Let nobody wait for a load any longer. Returns the request that it was begun for, and the
        others."""
        waiting = load.req, [*load.others.values()]
        load.req, load.others = None, {}
        for key in load.promotion.wanted.keys:
            if self._coming.get(key) is load:
                del self._coming[key]
        return waiting

    def released(self, req: Request) -> None:
        """Note that a request was preempted or has ended."""
        self._joined.discard(req.arrival)
        if req.is_finished:
            for load in self:
                load.others.pop(req.arrival, None)
                if load.req is req:
                    load.req = None

    # -- what happens in the prefix cache

    def withdraw(self, keys: set[bytes]) -> None:
        """Publish none of these keys."""
        for load in self:
            load.withdrawn |= keys.intersection(load.promotion.wanted.keys)

    def clear(self) -> None:
        """The cache was emptied: nobody finds there what is being loaded."""
        self._coming.clear()

    @property
    def kept(self) -> dict[str, object]:
        """All that is kept of requests and loads, by name; nothing if no load is in progress."""
        return {"loads": self._by_number, "coming": self._coming, "joined": self._joined}
