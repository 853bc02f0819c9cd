"""Physical KV blocks: the content of each, the free list, reference counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.config.kv_groups import NULL_BLOCK
from engine.kv.prefix_watch import PrefixWatch


class PrefixCache:
    """Maps the hash of a block's content to the blocks with that content, and back.

    Twins are blocks with equal content that were written by different requests. Each stays until
    it is evicted itself; ``find`` returns the oldest.
    ``hashes`` (read-only) has the hash of each block, ``None`` for blocks that are not cached.
    ``on_loss`` is called for every hash that no block has any more.
    """

    def __init__(self, num_blocks: int) -> None:
        self.version = 0  # incremented whenever a hash appears or disappears
        self.num_losses = 0  # incremented whenever a block is no longer cached
        self.on_loss: Callable[[bytes], None] | None = None
        self.watch: PrefixWatch | None = None  # called for every hash that appears or disappears
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # younger blocks than that in _block, oldest first

    def find(self, block_hash: bytes) -> int | None:
        """The oldest block with this hash, or None."""
        return self._block.get(block_hash)

    def find_all(self, block_hash: bytes) -> list[int]:
        """All blocks with this hash, the oldest first."""
        block = self._block.get(block_hash)
        return [] if block is None else [block, *self._twins.get(block_hash, ())]

    def prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The oldest cached block of each leading hash, up to the first hash that is not
        cached."""
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
        """Put the block into the cache under this hash."""
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

    def unpublish(self, block: int) -> None:
        """Remove the block from the cache if it is there; requests that hold it keep it."""
        block_hash = self.hashes[block]
        if block_hash is None:
            return
        self.hashes[block] = None
        self.version += 1
        self.num_losses += 1
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._block[block_hash]
            if self.on_loss is not None:
                self.on_loss(block_hash)
            if self.watch is not None:
                self.watch.lost(block_hash)
            return
        if self._block[block_hash] == block:
            self._block[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]

    def unpublish_each(self, blocks: Sequence[int]) -> None:
        """``unpublish`` each of these blocks."""
        if self._twins or self.on_loss is not None or self.watch is not None:
            for block in blocks:
                self.unpublish(block)
            return
        hashes, by_hash = self.hashes, self._block
        for block in blocks:
            if (block_hash := hashes[block]) is not None:
                hashes[block] = None
                del by_hash[block_hash]
        self.version += 1
        self.num_losses += 1

    def clear(self) -> None:
        """Remove all blocks from the cache without calling ``on_loss``."""
        self.hashes[:] = [None] * len(self.hashes)
        self._block.clear()
        self._twins.clear()
        if self.watch is not None:
            self.watch.cleared()
        self.version += 1
        self.num_losses += 1


@dataclass(slots=True)
class CacheCounts:
    """Numbers of tokens looked up in the prefix cache and found there, counted at each admission of
    a request."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0  # tokens looked up for requests that had been preempted
    preempted_hits: int = 0
    num_resets: int = 0  # times the cache was emptied on request

    def add(self, num_tokens: int, num_hit: int, *, preempted: bool) -> None:
        """Count the prefix lookup of one admission, which found ``num_hit`` of ``num_tokens``
        tokens. ``preempted``: the request was preempted before."""
        if preempted:
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hit
        else:
            self.queries += num_tokens
            self.hits += num_hit


class BlockPool:
    """Blocks 1..num_blocks-1; block 0 is the null block, which no request holds.

    The free list is a doubly linked list in two arrays, so that a prefix hit can take a block out
    of its middle in O(1). Blocks are taken from its head: blocks without cached content are
    returned there, cached ones to the tail, so the least recently used content is evicted first.

    Adopting a free block without cached content, or releasing a block that is not held, raises
    ``RuntimeError`` with its number; blocks that the call has not reached are unchanged.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_refs = [0] * num_blocks
        self.cache = PrefixCache(num_blocks)
        # Entry 0 of both arrays is the list's sentinel.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

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
        """Decrement the reference counts of a table's blocks, given in order.

        Blocks are freed last to first, so that the tail of a sequence is evicted before its head.
        """
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
    """All blocks in the tables of a request, in table order, without null blocks.

    The blocks at one index of all tables are adjacent, so that all groups free their tails first.
    """
    first, *others = tables
    if not others and first[:1] != [NULL_BLOCK]:
        return first
    return [block for entry in zip(first, *others, strict=True) for block in entry if block]
