"""Physical blocks: free list and reference counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv.prefix_cache import PrefixCache

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks-1; block 0 is the null block, which no request holds.

    The free list is a doubly linked list through two arrays, so that a block in its middle can be
    taken back in O(1) when a prefix hit adopts it. Its head is taken first: blocks without a hash
    are put there, hashed ones go to the tail, so the least recently used content dies first.

    Adopting a block that is free and empty, or releasing one that is not held, raises
    ``RuntimeError`` with its number; blocks not yet processed by the call are unchanged.
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
        """Take blocks from the head of the free list; their cached content is forgotten.

        Raises ``ValueError`` if too few are free.
        """
        if count > self.num_free:
            raise ValueError(f"No free blocks: {count} wanted, {self.num_free} free")
        taken, hashes, num_refs = [], self.cache.hashes, self.num_refs
        block = self._next[0]
        for _ in range(count):
            taken.append(block)
            if hashes[block] is not None:
                self.cache.unpublish(block)
            num_refs[block] = 1
            block = self._next[block]
        self._next[0] = block
        self._prev[block] = 0
        self.num_free -= count
        return taken

    def adopt(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block; a free block must have cached content."""
        num_refs = self.num_refs
        for block in blocks:
            if num_refs[block] == 0:
                if self.cache.hashes[block] is None:
                    raise RuntimeError(f"block {block} cannot be adopted: it is free and empty")
                self._unlink(block)
            num_refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each block; called with a table's blocks in order.

        Freed from the last to the first, so that the tail of a sequence is evicted before its head.
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
            if hashes[block] is not None:  # behind the last one
                after[last], before[block], last = block, last, block
            else:  # before the first one
                first = after[0]
                after[0], before[block], after[block], before[first] = block, 0, first, block
                last = last or block
        after[last], before[0] = 0, last
        self.num_free += num_free

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
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
