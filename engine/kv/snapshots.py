"""Snapshots: copies of requests' recurrent states in blocks of the KV pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from engine.kv.block_pool import BlockPool

MARK = b"state"
NUMBER_BYTES = 8
MOST_BRANCHES = 1 << 16
LEAST_KEPT = 1024  # hashes of published snapshots, before those of evicted ones are dropped


class Snapshot(NamedTuple):
    """The blocks of a snapshot, and the keys under which they are cached."""

    blocks: Sequence[int]
    keys: Sequence[bytes]


@dataclass(slots=True, eq=False)
class KeptSnapshot:
    """A snapshot in the prefix cache, as snapshot policies see it.

    ``block_hash``: identifies the tokens before it. ``num_tokens``: how many these are.
    ``num_saved``: those of them after the nearest snapshot before it that its request knew.
    ``is_branch``: it was taken where a prefix hit was shorter than the cached KV. ``num_uses``: how
    many requests have started from it. ``last_used``: when it was taken or used last, in seconds.
    """

    block_hash: bytes
    num_tokens: int
    num_saved: int = 0
    is_branch: bool = False
    num_uses: int = 0
    last_used: float = 0.0


@dataclass(slots=True)
class StateMarks:
    """The snapshots that a running request has used or made, and those before them."""

    loaded: Sequence[int] = ()  # blocks of the snapshot from which it starts
    num_beyond: int = 0  # ``PrefixHit.num_beyond`` when it got its blocks
    branches: list[int] = field(default_factory=list)  # where a snapshot stays, in tokens
    hashes: dict[int, bytes] = field(default_factory=dict)  # by number of tokens
    newest: Snapshot | None = None  # its last one, if the next one replaces it
    newest_tokens: int = 0

    def enter(self, num_tokens: int, block_hash: bytes, own: Snapshot | None) -> Snapshot | None:
        """Add a snapshot of the request after ``num_tokens`` tokens. ``own``: the snapshot, if the
        request's next one replaces it. Returns the one that it replaces."""
        former = self.newest
        if former is not None:
            del self.hashes[self.newest_tokens]
        self.hashes[num_tokens] = block_hash
        self.newest, self.newest_tokens = own, num_tokens
        return former

    def before(self, num_tokens: int) -> int:
        """Tokens of the nearest snapshot that stays and was taken after fewer than ``num_tokens``
        tokens; 0 without such a snapshot."""
        replaced = 0 if self.newest is None else self.newest_tokens
        return max((n for n in self.hashes if n < num_tokens and n != replaced), default=0)

    def deepest_first(self) -> list[bytes]:
        """The hashes of all these snapshots, those after most tokens first."""
        return [self.hashes[num_tokens] for num_tokens in sorted(self.hashes, reverse=True)]


class Snapshots:
    """Finds, reserves and publishes snapshots. A snapshot is a copy of a request's recurrent states
    after a number of tokens that is a multiple of the block size; it takes ``num_blocks`` blocks.

    Each block is cached under a key made of the hash of all these tokens and of its index in the
    snapshot. So it is evicted in the same order as blocks with KV, and a snapshot can be loaded as
    long as all its blocks are cached. No block is held: while a step writes a snapshot, its blocks
    are free ones, cached under keys that no request looks up. If they are taken before the step has
    ended, the snapshot is lost."""

    def __init__(self, pool: BlockPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_published = 0
        self.num_lost = 0
        self._pool = pool
        self._cache = pool.cache
        self._numbers = count()
        self._published: dict[bytes, KeptSnapshot] = {}  # some are no longer cached
        self._branches: dict[bytes, None] = {}  # hashes after which prompts have divided
        self._num_cached = 0  # as counted last

    @property
    def is_pool_full(self) -> bool:
        """True if each further block that is taken evicts another one's content."""
        return self._pool.evicts

    @property
    def pool_fill(self) -> float:
        """Share of the pool's blocks, 0 to 1, that hold cached content."""
        return self._cache.num_hashes / self._pool.num_blocks

    def count_cached(self) -> int:
        """Count the snapshots whose blocks are all cached now."""
        find = self.find
        self._published = {key: kept for key, kept in self._published.items() if find(key)}
        self._num_cached = len(self._published)
        return self._num_cached

    def kept(self, block_hash: bytes) -> KeptSnapshot | None:
        """The snapshot after the tokens with this hash; ``None`` if it is not cached."""
        return self._published.get(block_hash) if self.find(block_hash) else None

    def all_kept(self) -> list[KeptSnapshot]:
        """All snapshots that are cached."""
        self.count_cached()
        return list(self._published.values())

    def find(self, block_hash: bytes) -> list[int]:
        """The blocks of the snapshot after the tokens with this hash; [] if it is not cached."""
        find, blocks = self._cache.find, []
        for key in self.keys_of(block_hash):
            block = find(key)
            if block is None:
                return []
            blocks.append(block)
        return blocks

    def deepest(self, hashes: Sequence[bytes], limit: int) -> int:
        """The largest number of blocks, at most ``limit``, after which there is a snapshot, else 0.
        ``hashes``: of the sequence's blocks, in order."""
        find = self._cache.find
        while limit:
            block_hash = hashes[limit - 1]
            if find(_key(block_hash, 0)) is not None and self.find(block_hash):
                break
            limit -= 1
        return limit

    def among(self, hashes: Sequence[bytes]) -> list[int]:
        """The numbers of blocks after which there are snapshots, ascending. ``hashes``: those of a
        sequence's blocks."""
        find = self._cache.find
        return [
            number
            for number, block_hash in enumerate(hashes, 1)
            if find(_key(block_hash, 0)) is not None and self.find(block_hash)
        ]

    def branches(self, hashes: Sequence[bytes]) -> list[int]:
        """The numbers of blocks, ascending, after which prompts have divided, whether or not there
        is still a snapshot. ``hashes``: those of a sequence's blocks."""
        known = self._branches
        if not known:
            return []
        return [number for number, block_hash in enumerate(hashes, 1) if block_hash in known]

    def reserve(self, most: int) -> list[Snapshot]:
        """Reserve free blocks for up to ``most`` snapshots, which the next step may write."""
        size = self.num_blocks
        taken = self._pool.take(min(most, self._pool.num_free // size) * size)
        keys = [MARK + next(self._numbers).to_bytes(NUMBER_BYTES, "little") for _ in taken]
        self._cache.publish_each(taken, keys)
        self._pool.release(taken)
        starts = range(0, len(taken), size)
        return [Snapshot(taken[i : i + size], keys[i : i + size]) for i in starts]

    def publish(self, written: Snapshot, kept: KeptSnapshot) -> Snapshot | None:
        """Make a reserved snapshot, which a step has written, available as ``kept``. If its blocks
        were taken meanwhile, or if another snapshot has this hash, it is discarded, and ``None``
        returned."""
        block_hash, kept.last_used = kept.block_hash, self._cache.evictions.now
        is_lost = any(map(self._differs, written.blocks, written.keys))
        self.num_lost += is_lost
        if is_lost or self.find(block_hash):
            self.discard(written)
            return None
        keys = self.keys_of(block_hash)
        for block, key in zip(written.blocks, keys, strict=True):
            self._cache.rename(block, key)
        self.num_published += 1
        self._published[block_hash] = kept
        if kept.is_branch:
            self._branches[block_hash] = None
            if len(self._branches) > MOST_BRANCHES:
                del self._branches[next(iter(self._branches))]
        if len(self._published) > 2 * self._num_cached + LEAST_KEPT:
            self.count_cached()  # drops the hashes of those that were evicted
        return Snapshot(written.blocks, keys)

    def restore(self, kept: KeptSnapshot) -> None:
        """Note a snapshot whose blocks have been cached without a step that wrote them."""
        if self.find(kept.block_hash):
            kept.last_used = self._cache.evictions.now
            self._published[kept.block_hash] = kept  # one that was evicted may still be noted

    def discard(self, snapshot: Snapshot) -> None:
        """Empty the blocks of a snapshot that still belong to it; they are the next to be taken."""
        blocks = [
            block
            for block, key in zip(snapshot.blocks, snapshot.keys, strict=True)
            if not self._differs(block, key)
        ]
        self._pool.adopt(blocks)
        for block in blocks:
            self._cache.rename(block, None)
        self._pool.release(blocks)

    def drop(self, block_hash: bytes) -> None:
        """Empty the blocks of the snapshot with this hash; they are the next to be taken."""
        if blocks := self.find(block_hash):
            self.discard(Snapshot(blocks, self.keys_of(block_hash)))
            del self._published[block_hash]

    def use(self, block_hash: bytes) -> None:
        """Record that a request starts from the snapshot with this hash."""
        if (kept := self._published.get(block_hash)) is not None:
            kept.num_uses += 1
            kept.last_used = self._cache.evictions.now

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Make the snapshots with these hashes the last ones to be evicted; of two snapshots, the
        one given later is evicted later."""
        for block_hash in block_hashes:
            blocks = self.find(block_hash)
            self._pool.adopt(blocks)
            self._pool.release(blocks)

    def _differs(self, block: int, key: bytes) -> bool:
        return self._cache.hash_of(block) != key

    def keys_of(self, block_hash: bytes) -> list[bytes]:
        """The keys of the pieces of the snapshot after the tokens with this hash."""
        return [_key(block_hash, index) for index in range(self.num_blocks)]


def _key(block_hash: bytes, index: int) -> bytes:
    return block_hash + MARK + index.to_bytes(4, "little")


def is_reserved(key: bytes) -> bool:
    """True for the key of a block that is reserved for a snapshot, which a step is to write."""
    return key.startswith(MARK) and len(key) == len(MARK) + NUMBER_BYTES
