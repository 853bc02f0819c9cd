"""The pool of KV blocks: free list, reference counts, and the cached content of each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.config.kv_groups import NULL_BLOCK
from engine.kv.evictions import Evictions
from engine.kv.prefix_watch import PrefixWatch


class Follower(Protocol):
    """Called for cache keys that enter and leave a prefix cache."""

    def published(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """These blocks are now cached; some keys may have been before."""

    def lost(self, keys: Iterable[bytes]) -> None:
        """No block has these keys any more."""

    def withdrawn(self, keys: Iterable[bytes]) -> None:
        """What was cached under these keys is wrong. Those that were cached are also ``lost``."""

    def cleared(self) -> None:
        """All blocks have left the cache, since their content is not valid any more."""


class PrefixCache:
    """Maps content hashes to the blocks with that content, and blocks to their hashes.

    Several blocks may have the same content, if different requests wrote them. Each is evicted on
    its own; ``find`` returns the oldest. ``hashes`` (read-only) has the hash of each block,
    ``None`` for blocks that are not cached. ``on_loss`` is called for a hash when its last block
    leaves the cache."""

    def __init__(self, num_blocks: int) -> None:
        self.version = 0  # incremented whenever a hash appears or disappears
        self.num_losses = 0  # incremented whenever a block is no longer cached
        self.on_loss: Callable[[bytes], None] | None = None
        self.watch: PrefixWatch | None = None  # called for every hash that appears or disappears
        self.followers: list[Follower] = []  # called for the same, with the blocks
        self.evictions = Evictions(num_blocks)
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # younger blocks than that in _block, oldest first

    @property
    def num_hashes(self) -> int:
        """Number of different hashes of cached blocks."""
        return len(self._block)

    def keys(self) -> KeysView[bytes]:
        """The different hashes of cached blocks."""
        return self._block.keys()

    def find(self, block_hash: bytes) -> int | None:
        """The oldest block with this hash, or None."""
        return self._block.get(block_hash)

    def find_all(self, block_hash: bytes) -> list[int]:
        """All blocks with this hash, the oldest first."""
        block = self._block.get(block_hash)
        return [] if block is None else [block, *self._twins.get(block_hash, ())]

    def prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of a sequence of hashes, up to the first hash that is not
        cached. Among blocks with equal hash, the oldest is taken."""
        find, blocks = self._block.get, []
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hash_of(self, block: int) -> bytes | None:
        """The hash of a cached block, ``None`` if the block is not cached."""
        return self.hashes[block]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Put a block into the prefix cache under the hash of its content."""
        self.publish_each((block,), (block_hash,))

    def publish_each(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Put each block into the cache under its hash."""
        hashes, find_or_set = self.hashes, self._block.setdefault
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if hashes[block] is not None or block == 0:
                raise RuntimeError(f"block {block} cannot be published: it is cached or null")
            hashes[block] = block_hash
            if find_or_set(block_hash, block) != block:
                self._twins.setdefault(block_hash, []).append(block)
        self.version += 1
        if self.watch is not None:
            self.watch.published(block_hashes)
        for follower in self.followers:
            follower.published(block_hashes, blocks)

    def unpublish(self, block: int) -> None:
        """Remove the block from the cache if it is there. Requests that use the block are not
        affected."""
        block_hash = self.hashes[block]
        if block_hash is None:
            return
        self.num_losses += 1
        if self._forget(block, block_hash):
            self.evictions.add_each((block_hash,))
            if self.on_loss is not None:
                self.on_loss(block_hash)
            if self.watch is not None:
                self.watch.lost(block_hash)
            for follower in self.followers:
                follower.lost((block_hash,))

    def rename(self, block: int, block_hash: bytes | None) -> None:
        """Cache a cached block under another hash, or no longer (``None``). This is not counted as
        an eviction, so the former hash must not be one of a prefix."""
        former = self.hashes[block]
        assert former is not None, f"block {block} is not cached"
        self._forget(block, former)
        if block_hash is not None:
            self.publish(block, block_hash)

    def _forget(self, block: int, block_hash: bytes) -> bool:
        """Remove a block from the maps. Returns True if it was the last one with this hash."""
        self.hashes[block] = None
        self.version += 1
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._block[block_hash]
            return True
        if self._block[block_hash] == block:
            self._block[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]
        return False

    def unpublish_each(self, blocks: Sequence[int]) -> None:
        """Remove each of these blocks from the cache, as ``unpublish`` does."""
        if self._twins or self.on_loss is not None or self.watch is not None:
            for block in blocks:
                self.unpublish(block)
            return
        hashes, by_hash, lost = self.hashes, self._block, []
        for block in blocks:
            if (block_hash := hashes[block]) is not None:
                hashes[block] = None
                del by_hash[block_hash]
                lost.append(block_hash)
        if lost:
            self.evictions.add_each(lost)
            for follower in self.followers:
                follower.lost(lost)
        self.version += 1
        self.num_losses += 1

    def clear(self) -> None:
        """Remove all blocks from the cache without calling ``on_loss``."""
        self.evictions.add_each(list(self._block))
        self.hashes[:] = [None] * len(self.hashes)
        self._block.clear()
        self._twins.clear()
        if self.watch is not None:
            self.watch.cleared()
        for follower in self.followers:
            follower.cleared()
        self.version += 1
        self.num_losses += 1


@dataclass(slots=True)
class CacheCounts:
    """Counts the tokens looked up in the prefix cache, and those found, each time a request is
    admitted."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0  # tokens looked up for requests that had been preempted
    preempted_hits: int = 0
    num_resets: int = 0  # times the cache was emptied on request
    missed: dict[str, int] = field(default_factory=dict)  # tokens by reason (``PrefixEnd``)

    def add(self, num_tokens: int, num_hit: int, *, preempted: bool) -> None:
        """Count the prefix cache lookup of an admitted request: ``num_hit`` of its ``num_tokens``
        tokens were cached. ``preempted``: it is admitted again after a preemption."""
        if preempted:
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hit
        else:
            self.queries += num_tokens
            self.hits += num_hit


class BlockPool:
    """The pool of KV blocks 1..num_blocks-1. Block 0 is the null block, which no request holds.

    Blocks are allocated from the head of the free list. A freed block goes to the head if it has no
    cached content, else to the tail, so the least recently used content is evicted first. The list
    is doubly linked, so that a prefix hit can remove a block from its middle in O(1).

    ``adopt`` of a free block without cached content, and ``release`` of a free block, raise
    ``RuntimeError`` with its number; blocks that the call has not reached are unchanged."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_refs = [0] * num_blocks
        self.cache = PrefixCache(num_blocks)
        # Entry 0 of both arrays is the list's sentinel.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def evicts(self) -> bool:
        """True if the next block that is taken loses its cached content."""
        return self.cache.hashes[self._next[0]] is not None

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free list and drop their cached content.

        Raises ``ValueError`` if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"No free blocks: {count} wanted, {self.num_free} free")
        taken, after, num_refs = [], self._next, self.num_refs
        block = after[0]
        for _ in range(count):
            taken.append(block)
            num_refs[block] = 1
            block = after[block]
        hashes = self.cache.hashes
        if lost := [block for block in taken if hashes[block] is not None]:
            self.cache.unpublish_each(lost)
        self._next[0] = block
        self._prev[block] = 0
        self.num_free -= count
        return taken

    def adopt(self, blocks: Iterable[int]) -> None:
        """Increment each block's reference count; a free block must have cached content."""
        num_refs = self.num_refs
        for block in blocks:
            if num_refs[block] == 0:
                if self.cache.hashes[block] is None:
                    raise RuntimeError(f"block {block} cannot be adopted: it is not cached")
                self._unlink(block)
            num_refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the reference counts of blocks, given in the order of a block table.

        Unused blocks are freed last to first, so a sequence's end is evicted before its start."""
        num_refs, hashes = self.num_refs, self.cache.hashes
        after, before = self._next, self._prev
        last, num_free = before[0], 0
        for block in reversed(blocks):
            refs = num_refs[block]
            if refs == 0:
                raise RuntimeError(f"block {block} released more often than taken")
            num_refs[block] = refs - 1
            if refs > 1:
                continue
            num_free += 1
            if hashes[block] is not None:  # after the last one
                after[last], before[block], last = block, last, block
            else:  # before the first one
                first = after[0]
                after[0], before[block], after[block], before[first] = block, 0, first, block
                last = last or block
        after[last], before[0] = 0, last
        self.num_free += num_free

    def free_order(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        order, block = [], self._next[0]
        while block != 0:
            order.append(block)
            block = self._next[block]
        return order

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1


def live_blocks(tables: Sequence[list[int]]) -> list[int]:
    """All blocks in the block tables of a request, one table per group of layers, without null
    blocks.

    Sorted by table index, then group: blocks for the same tokens are adjacent."""
    first, *others = tables
    if not others and first[:1] != [NULL_BLOCK]:
        return first
    return [block for entry in zip(first, *others, strict=True) for block in entry if block]
