"""Promotions: blocks of the pool into which copies from outside the pool are loaded.

    the keys that a request could use ──> free blocks are taken; its prefix hit is held as well
    loaded ──> the blocks are published under their keys and freed: the request's prefix hit has
               become longer

No request holds these blocks, so a request that ends meanwhile changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from engine.config.kv_groups import NULL_BLOCK, Group
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import find_tables, group_keys
from engine.kv.snapshots import KeptSnapshot, Snapshots
from engine.kv.tables import BlockTables, Tail

OUTSIDE = -1  # in a block table: the block is not in the pool, but a copy of it is elsewhere


class Wanted(NamedTuple):
    """What a request could load. ``num_tokens``: its prefix hit after that. ``keys``: of the blocks
    to load. ``held``: blocks of the pool that the hit also needs, in each group; ``pieces``: those
    of its snapshot. ``snapshot``: the snapshot at its end, if pieces of it are among the keys."""

    num_tokens: int
    keys: list[bytes]
    groups: list[int]
    """Group of layers of each key, but not of the last ones, of pieces of the snapshot."""
    held: list[list[int]]
    pieces: Sequence[int] = ()
    snapshot: KeptSnapshot | None = None
    num_snapshot_keys: int = 0
    """How many of the keys, the last ones, are of pieces of the snapshot."""


@dataclass(slots=True, eq=False)
class Promotion:
    """A load that is in progress, and the blocks that it keeps from being taken. ``is_void``: the
    cache was emptied meanwhile, so what is loaded is not published."""

    wanted: Wanted
    blocks: list[int]  # that are being filled; [] after that
    held: list[list[int]]  # cached blocks in each group
    pieces: list[int]  # cached blocks of its snapshot
    is_void: bool = False

    @property
    def all_held(self) -> list[int]:
        """The blocks that it holds besides those that it fills."""
        return [*chain.from_iterable(self.held), *self.pieces]


class Union:
    """The prefix cache, and the keys of blocks with copies outside the pool, as one cache."""

    def __init__(self, find: Callable[[bytes], int | None], outside: Container[bytes]) -> None:
        self._find = find
        self._outside = outside

    def find(self, key: bytes) -> int | None:
        """The block with this key; ``OUTSIDE`` if only a copy exists."""
        block = self._find(key)
        return OUTSIDE if block is None and key in self._outside else block

    def prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of a sequence of hashes, up to the first that is nowhere."""
        blocks: list[int] = []
        for each in hashes:
            if (block := self.find(each)) is None:
                break
            blocks.append(block)
        return blocks


class Promotions:
    """Finds what could be loaded for a request, and owns the blocks of loads in progress."""

    def __init__(
        self, pool: BlockPool, tables: BlockTables, groups: Sequence[Group], block_size: int
    ) -> None:
        self.num_blocks = 0  # that loads in progress fill
        self.begun: list[Promotion] = []  # those in progress
        self._pool = pool
        self._tables = tables
        self._groups = tuple(groups)
        self._block_size = block_size

    def keys_of(
        self, hashes: Sequence[bytes], first: int, snapshots: Snapshots | None
    ) -> list[bytes]:
        """All keys outside the pool that a request with these block hashes could use, if its prefix
        hit has ``first`` blocks."""
        find = self._pool.cache.find
        return [key for key in self._all_keys(hashes[first:], snapshots) if find(key) is None]

    def cached(
        self, hashes: Sequence[bytes], snapshots: Snapshots | None
    ) -> tuple[list[bytes], list[int]]:
        """The keys and blocks of all that the pool has of these block hashes."""
        keys = self._all_keys(hashes, snapshots)
        found = [(key, block) for key in keys if (block := self._pool.cache.find(key)) is not None]
        return [key for key, _ in found], [block for _, block in found]

    def _all_keys(self, hashes: Sequence[bytes], snapshots: Snapshots | None) -> list[bytes]:
        keys = [key for g in range(len(self._groups)) for key in group_keys(hashes, g)]
        if snapshots is not None:
            keys += [key for each in hashes for key in snapshots.keys_of(each)]
        return keys

    def wanted(
        self,
        hashes: Sequence[bytes],
        outside: Container[bytes],
        snapshots: Snapshots | None,
        tail: Tail | None = None,
    ) -> Wanted:
        """What to load so that the prefix hit is as long as possible. ``hashes``: of the request's
        full blocks; ``outside``: keys of the blocks of which there are copies; ``tail``: with which
        the hit may end, after all full blocks before it."""
        cache = Union(self._pool.cache.find, outside)
        deepest = None if snapshots is None else _Deepest(snapshots, cache)
        tables = find_tables(self._groups, cache, hashes, self._block_size, deepest)
        num_blocks = len(tables[0])
        loaded = [
            (key, g)
            for g, table in enumerate(tables)
            for block, key in zip(table, group_keys(hashes[:num_blocks], g), strict=True)
            if block == OUTSIDE
        ]
        keys, of_groups = [key for key, _ in loaded], [g for _, g in loaded]
        held = [[b for b in table if b not in (OUTSIDE, NULL_BLOCK)] for table in tables]
        num_tokens, kept = num_blocks * self._block_size, None
        if tail is not None and tail.num_tokens // self._block_size == num_blocks:
            ends = [cache.find(key) for key in tail.keys]
            if None not in ends:
                num_tokens = tail.num_tokens
                for g, (key, block) in enumerate(zip(tail.keys, ends, strict=True)):
                    if block == OUTSIDE:
                        keys.append(key)
                        of_groups.append(g)
                    elif block is not None:
                        held[g].append(block)
        if snapshots is not None and num_blocks:
            own = snapshots.keys_of(hashes[num_blocks - 1])
            found = [cache.find(key) for key in own]
            if OUTSIDE in found:
                kept = KeptSnapshot(hashes[num_blocks - 1], num_tokens, num_saved=num_tokens)
            keys += [key for key, block in zip(own, found, strict=True) if block == OUTSIDE]
            pieces = [block for block in found if block is not None and block != OUTSIDE]
            return Wanted(num_tokens, keys, of_groups, held, pieces, kept, found.count(OUTSIDE))
        return Wanted(num_tokens, keys, of_groups, held)

    @property
    def num_held(self) -> int:
        """Number of blocks that loads in progress keep from being taken."""
        held = {block for promotion in self.begun for block in promotion.all_held}
        return self.num_blocks + len(held)

    def void(self) -> None:
        """Publish nothing of the loads in progress."""
        for promotion in self.begun:
            promotion.is_void = True

    def fits(self, wanted: Wanted) -> bool:
        """True if ``begin`` would find enough free blocks."""
        num_held = sum(map(len, wanted.held)) + len(wanted.pieces)
        return len(wanted.keys) + num_held <= self._pool.num_free

    def begin(self, wanted: Wanted) -> Promotion:
        """Take blocks to load into, and hold those that the prefix hit has in the pool."""
        self._tables.hold(wanted.held)
        self._pool.adopt(wanted.pieces)
        blocks = self._pool.take(len(wanted.keys))
        self.num_blocks += len(blocks)
        promotion = Promotion(wanted, blocks, wanted.held, list(wanted.pieces))
        self.begun.append(promotion)
        return promotion

    def publish(
        self, promotion: Promotion, good: Sequence[bool], snapshots: Snapshots | None
    ) -> None:
        """Publish the blocks that have been loaded (``good``), and hold them; free the others."""
        cache, wanted, pool = self._pool.cache, promotion.wanted, self._pool
        blocks, promotion.blocks = promotion.blocks, []
        self.num_blocks -= len(blocks)
        places = [
            place
            for place, key in enumerate(wanted.keys)
            if good[place] and not promotion.is_void and cache.find(key) is None
        ]
        if places:
            cache.publish_each([blocks[i] for i in places], [wanted.keys[i] for i in places])
        # The end of a sequence is evicted before its start, as it is freed in a block table.
        pool.release(blocks)
        num_kv = len(wanted.groups)
        loaded: list[list[int]] = [[] for _ in self._groups]
        for place in places:
            if place < num_kv:
                loaded[wanted.groups[place]].append(blocks[place])
        pieces = [blocks[place] for place in places if place >= num_kv]
        self._tables.hold(loaded)
        pool.adopt(pieces)
        promotion.held = [own + more for own, more in zip(promotion.held, loaded, strict=True)]
        promotion.pieces += pieces
        if snapshots is not None and wanted.snapshot is not None and not promotion.is_void:
            snapshots.restore(wanted.snapshot)

    def end(self, promotion: Promotion) -> None:
        """Free the blocks of a promotion, which stay cached until others need them."""
        self.begun.remove(promotion)
        self._pool.release(promotion.pieces)
        self._tables.let_go(promotion.held)


class _Deepest:
    """Finds the deepest snapshot in a ``Union``."""

    def __init__(self, snapshots: Snapshots, cache: Union) -> None:
        self._snapshots = snapshots
        self._cache = cache

    def deepest(self, hashes: Sequence[bytes], limit: int) -> int:
        find, keys_of = self._cache.find, self._snapshots.keys_of
        while limit and any(find(key) is None for key in keys_of(hashes[limit - 1])):
            limit -= 1
        return limit
