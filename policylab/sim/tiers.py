"""KV tiers in simulations: stores of blocks outside the pool, with loads on a virtual clock.

The engine's own resource decides what is loaded. Here a store is a number of blocks and the time
to copy one; loads from the same store take place one after another. Several cores may share a
store, such as the one that prefill cores fill and decode cores read over a link."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from engine.errors import ConfigError
from engine.kv_transfer.tiers import NOWHERE, Tiers
from engine.messages.kv_orders import KVOrders, Loaded
from policylab.sim.named import call, check_number, check_options, split

EXAMPLE = "host(blocks=20000, load=2e-5)"
EXAMPLE_OF_LINK = "tcp(load=2e-4, latency=1e-3)"
BLOCK_BYTES = 1 << 20  # so that speeds are in blocks; only their ratio to a block counts


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A store of KV blocks outside the pool, or a link to one."""

    name: str = "host"
    blocks: int = 20_000
    """Blocks that it keeps; the least recently used go first."""
    load: float = 2e-5
    """Seconds to load a block."""
    latency: float = 1e-4
    """Seconds of a load in addition to its blocks'."""
    store: float = 0.0
    """Seconds that a step takes longer for each block to store."""

    def __post_init__(self) -> None:
        check_number("blocks", self.blocks, 1)
        for name in ("load", "latency", "store"):
            check_number(name, getattr(self, name), 0.0)

    def __str__(self) -> str:
        return (
            f"{self.name} of {self.blocks:,} blocks, {1e6 * self.load:g} us to load one and "
            f"{1e6 * self.latency:g} us a load"
        )


LINK = Tier(name="link")


def read_tiers(text: str) -> tuple[Tier, ...]:
    """Parse tiers as on the command line, the fastest first. Raises ``ConfigError``."""
    tiers = tuple(_read(each, "--kv-tiers", EXAMPLE) for each in split(text))
    if not tiers:
        raise ConfigError(f"--kv-tiers is {text!r}, must have a tier such as {EXAMPLE}")
    return tiers


def read_link(text: str) -> Tier:
    """Parse a link as on the command line. Raises ``ConfigError``."""
    return _read(text, "--kv-link", EXAMPLE_OF_LINK)


def _read(text: str, flag: str, example: str) -> Tier:
    name, options = call(text, flag, example)
    check_options(f"KV tier {name}", options, ("blocks", "load", "latency", "store"))
    return Tier(name=name, **options)


class Shelf:
    """The blocks that a tier keeps, and the loads from it. Cores that share it may have different
    times on their clocks: a block is there from the time on at which it was stored."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._kept: OrderedDict[bytes, float] = OrderedDict()  # and since when, in seconds
        self._free_at = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, key: bytes, now: float) -> bool:
        """True if a block is there at this time, in seconds."""
        return self._kept.get(key, inf) <= now

    def store(self, keys: Sequence[bytes], now: float) -> int:
        """Keep these blocks from now on. Returns how many of them are new."""
        kept, num_before = self._kept, len(self._kept)
        for key in keys:
            kept[key] = min(kept.get(key, inf), now)
            kept.move_to_end(key)
        num_new = len(kept) - num_before
        while len(kept) > self.tier.blocks:
            kept.popitem(last=False)
        return num_new

    def forget(self, keys: Iterable[bytes]) -> None:
        """Keep these blocks no more."""
        for key in keys:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()

    def read(self, key: bytes, now: float) -> bool:
        """Use a block that is loaded. Returns whether it was there."""
        is_there = self.has(key, now)
        if is_there:
            self._kept.move_to_end(key)
        return is_there

    def load(self, num_blocks: int, now: float) -> tuple[float, float]:
        """Load this many blocks after the loads in progress. Returns when that ends, and how long
        it takes by itself, in seconds."""
        seconds = self.tier.latency + self.tier.load * num_blocks
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at, seconds


class LinkedShelf(Shelf):
    """What prefill cores have stored, and the link over which it is loaded. The latency of a
    transfer does not delay the next one."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.num_moved = 0
        """Blocks that were loaded."""

    def load(self, num_blocks: int, now: float) -> tuple[float, float]:
        self.num_moved += num_blocks
        seconds = self.tier.load * num_blocks
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at + self.tier.latency, seconds + self.tier.latency


class SimulatedTiers:
    """The stores of a simulated core, and what its worker does with them. ``resource``: the
    scheduler's half."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        clock: Callable[[], float],
        link: LinkedShelf | None = None,
        *,
        fills_link: bool = False,
    ) -> None:
        """link: a store that it shares with other cores, the last one. fills_link: whether it also
        stores blocks there."""
        self._own = [Shelf(tier) for tier in tiers]
        shared = [] if link is None else [link]
        self._shelves = [*self._own, *shared]
        self._filled = [*self._own, *(shared if fills_link else [])]
        self.names = [shelf.tier.name for shelf in self._shelves]
        self._clock = clock
        self._running: list[tuple[float, Loaded]] = []  # by the time of their end
        speeds = [BLOCK_BYTES / max(shelf.tier.load, 1e-9) for shelf in self._shelves]
        self.resource = Tiers(self, BLOCK_BYTES, speeds=speeds)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the first tier that has each block, or ``NOWHERE``."""
        shelves, now = list(enumerate(self._shelves)), self._clock()
        return [next((nth for nth, own in shelves if own.has(key, now)), NOWHERE) for key in keys]

    def counts(self) -> Mapping[str, int]:
        """How many blocks each tier of this core keeps."""
        return {f"{shelf.tier.name}.num_blocks": len(shelf) for shelf in self._own}

    @property
    def next_time(self) -> float:
        """When the next load ends, in seconds on the clock; infinity for none."""
        return min((ends_at for ends_at, _ in self._running), default=inf)

    def take_reports(self) -> list[Loaded]:
        """The loads that have ended since the last call, in order."""
        now = self._clock()
        ended = sorted((each for each in self._running if each[0] <= now), key=lambda one: one[0])
        self._running = [each for each in self._running if each[0] > now]
        return [report for _, report in ended]

    def carry_out(self, orders: KVOrders) -> float:
        """Do what a plan orders; returns by how many seconds its step takes longer."""
        for shelf in self._filled:
            if orders.clear:
                shelf.clear()
            shelf.forget(orders.forget)
        for order in orders.loads:
            self._load(order.number, order.keys, order.stores)
        now = self._clock()
        return sum(shelf.tier.store * shelf.store(orders.store_keys, now) for shelf in self._filled)

    def _load(self, number: int, keys: Sequence[bytes], stores: Sequence[int]) -> None:
        is_good, now, longest = bytearray(len(keys)), self._clock(), 0.0
        last = now
        for nth, shelf in enumerate(self._shelves):
            places = [place for place, store in enumerate(stores) if store == nth]
            if not places:
                continue
            ends_at, seconds = shelf.load(len(places), now)
            last, longest = max(last, ends_at), max(longest, seconds)
            for place in places:
                is_good[place] = shelf.read(keys[place], now)
        self._running.append((last, Loaded(number, bytes(is_good), longest)))


def described(tiers: Sequence[Tier]) -> list[Mapping[str, Any]]:
    """The tiers as plain data, for the head of a run."""
    return [vars(tier) for tier in tiers]
