"""KV tiers in simulations: stores of blocks outside the pool, with loads on a virtual clock.

The engine's own resource decides what is loaded. Here a store is a number of blocks and the time
to copy one; loads from the same store take place one after another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from engine.errors import ConfigError
from engine.kv_transfer.tiers import NOWHERE, Tiers
from engine.messages.kv_orders import KVOrders, Loaded
from policylab.sim.named import call, check_number, check_options, split

EXAMPLE = "host(blocks=20000, load=2e-5)"
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


def read_tiers(text: str) -> tuple[Tier, ...]:
    """Parse tiers as on the command line, the fastest first. Raises ``ConfigError``."""
    tiers = []
    for each in split(text):
        name, options = call(each, "--kv-tiers", EXAMPLE)
        check_options(f"KV tier {name}", options, ("blocks", "load", "latency", "store"))
        tiers.append(Tier(name=name, **options))
    if not tiers:
        raise ConfigError(f"--kv-tiers is {text!r}, must have a tier such as {EXAMPLE}")
    return tuple(tiers)


class SimulatedTiers:
    """The stores of a simulated engine, and what its worker does with them. ``resource``: the
    scheduler's half."""

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float]) -> None:
        self.names = [tier.name for tier in tiers]
        self._tiers = list(tiers)
        self._clock = clock
        self._kept: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in tiers]
        self._free_at = [0.0] * len(tiers)
        self._running: list[tuple[float, Loaded]] = []  # by the time of their end
        speeds = [BLOCK_BYTES / max(tier.load, 1e-9) for tier in tiers]
        self.resource = Tiers(self, BLOCK_BYTES, speeds=speeds)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the first tier that has each block, or ``NOWHERE``."""
        kept = list(enumerate(self._kept))
        return [next((nth for nth, own in kept if key in own), NOWHERE) for key in keys]

    def counts(self) -> Mapping[str, int]:
        """How many blocks each tier keeps."""
        return {
            f"{name}.num_blocks": len(kept)
            for name, kept in zip(self.names, self._kept, strict=True)
        }

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
        for kept in self._kept:
            if orders.clear:
                kept.clear()
            for key in orders.forget:
                kept.pop(key, None)
        for order in orders.loads:
            self._load(order.number, order.keys, order.stores)
        return sum(self._store(nth, orders.store_keys) for nth in range(len(self._tiers)))

    def _store(self, nth: int, keys: Sequence[bytes]) -> float:
        kept, tier, num_new = self._kept[nth], self._tiers[nth], 0
        for key in keys:
            num_new += key not in kept
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > tier.blocks:
            kept.popitem(last=False)
        return tier.store * num_new

    def _load(self, number: int, keys: Sequence[bytes], stores: Sequence[int]) -> None:
        is_good, begun, ends_at, longest = bytearray(len(keys)), self._clock(), self._clock(), 0.0
        for nth, tier in enumerate(self._tiers):
            places = [place for place, store in enumerate(stores) if store == nth]
            if not places:
                continue
            begins_at = max(self._free_at[nth], begun)
            seconds = tier.latency + tier.load * len(places)
            self._free_at[nth] = begins_at + seconds
            longest = max(longest, seconds)
            ends_at = max(ends_at, self._free_at[nth])
            for place in places:
                if keys[place] in self._kept[nth]:
                    self._kept[nth].move_to_end(keys[place])
                    is_good[place] = 1
        self._running.append((ends_at, Loaded(number, bytes(is_good), longest)))


def described(tiers: Sequence[Tier]) -> list[Mapping[str, Any]]:
    """The tiers as plain data, for the head of a run."""
    return [vars(tier) for tier in tiers]
