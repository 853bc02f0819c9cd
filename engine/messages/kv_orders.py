"""Messages between the two halves of KV tiers: the scheduler's orders, and reports of loads."""

from __future__ import annotations

from collections.abc import Collection

import msgspec


class LoadOrder(msgspec.Struct, array_like=True):
    """Copy blocks from stores into blocks of the pool.

    ``stores``: index of the store of each key. ``num_states``: how many of the blocks, at the end
    of the lists, get pieces of a snapshot of recurrent states and not KV."""

    number: int
    keys: list[bytes]
    blocks: list[int]
    stores: list[int]
    num_states: int = 0


class KVOrders(msgspec.Struct, array_like=True):
    """What the worker's half does before a step: drop ``clear`` (all) or ``forget`` (these keys),
    copy the blocks to store, begin the loads. In this order, since a load may fill a block that is
    stored."""

    store_keys: list[bytes] = []
    store_blocks: list[int] = []
    loads: list[LoadOrder] = []
    forget: list[bytes] = []
    clear: bool = False

    @property
    def without_keys(self) -> list[object]:
        """What does not depend on tokens, which a replay of a step log may not have."""
        loads = [(load.number, load.blocks, load.stores, load.num_states) for load in self.loads]
        return [self.store_blocks, loads, len(self.forget), self.clear]

    def withdraw(self, keys: Collection[bytes]) -> None:
        """Drop the copies under these keys, and store none under them."""
        pairs = zip(self.store_keys, self.store_blocks, strict=True)
        kept = [(key, block) for key, block in pairs if key not in keys]
        self.store_keys, self.store_blocks = [k for k, _ in kept], [block for _, block in kept]
        self.forget += keys

    def __bool__(self) -> bool:
        return bool(self.store_keys or self.loads or self.forget or self.clear)


class Loaded(msgspec.Struct, array_like=True):
    """The end of a load. ``is_good``: a byte for each key, 1 if its block has been filled.
    ``seconds``: how long it took, without waiting for earlier ones."""

    number: int
    is_good: bytes
    seconds: float
