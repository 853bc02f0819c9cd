"""Physical blocks: free list, reference counts and the hash under which a block may be found."""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks-1; block 0 is the null block and belongs to nobody.

    The free list is a doubly linked list through two arrays, so that a block in its middle can be
    taken back in O(1) when a prefix hit adopts it. Its head is taken first: blocks without a hash
    are put there, hashed ones go to the tail, so the least recently used content dies first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.version = 0  # raised whenever a hash appears or disappears
        self.num_refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, list[int]] = {}  # twins: several blocks may hold the same content
        # Entry 0 of both arrays is the list's sentinel.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, if there is one."""
        blocks = self._found.get(block_hash)
        return blocks[0] if blocks else None

    def find_all(self, block_hash: bytes) -> list[int]:
        """All blocks with this content."""
        return list(self._found.get(block_hash, ()))

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which the block can be found, ``None`` if it cannot."""
        return self._hash[block]

    def take(self, count: int) -> list[int]:
        """Take blocks from the head of the free list; what was cached in them is forgotten."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = []
        block = self._next[0]
        for _ in range(count):
            taken.append(block)
            if self._hash[block] is not None:
                self.unpublish(block)
            self.num_refs[block] = 1
            block = self._next[block]
        self._next[0] = block
        self._prev[block] = 0
        self.num_free -= count
        return taken

    def adopt(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these."""
        for block in blocks:
            if self.num_refs[block] == 0:
                self._unlink(block)
            self.num_refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each; called with a table's blocks in order.

        Freed from the last to the first, so that the tail of a sequence is evicted before its head.
        """
        for block in reversed(blocks):
            assert self.num_refs[block] > 0, f"block {block} released more often than taken"
            self.num_refs[block] -= 1
            if self.num_refs[block] == 0:
                self._link(block, at_head=self._hash[block] is None)

    def publish(self, block: int, block_hash: bytes) -> None:
        """From now on the block can be found under this hash."""
        assert self._hash[block] is None, f"block {block} is published already"
        self._hash[block] = block_hash
        self._found.setdefault(block_hash, []).append(block)
        self.version += 1

    def unpublish(self, block: int) -> None:
        """The block can no longer be found; holders keep it."""
        block_hash = self._hash[block]
        if block_hash is None:
            return
        twins = self._found[block_hash]
        twins.remove(block)
        if not twins:
            del self._found[block_hash]
        self._hash[block] = None
        self.version += 1

    def unpublish_all(self) -> None:
        """Forget every hash."""
        self._hash = [None] * self.num_blocks
        self._found.clear()
        self.version += 1

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

    def _link(self, block: int, *, at_head: bool) -> None:
        before = 0 if at_head else self._prev[0]
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
