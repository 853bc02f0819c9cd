"""Which block holds which content: hash -> blocks and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class PrefixCache:
    """The hash under which a block may be found, and the blocks found under a hash.

    Twins are blocks with equal content that were written by different requests: each stays until
    it is evicted itself, and the oldest is the one that is found.
    ``hashes`` has the hash of each block, ``None`` for one that cannot be found; for reading.
    ``on_loss`` is called for every hash under which no block can be found any more.
    """

    def __init__(self, num_blocks: int) -> None:
        self.version = 0  # raised whenever a hash appears or disappears
        self.num_losses = 0  # raised whenever a block can no longer be found
        self.on_loss: Callable[[bytes], None] | None = None
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # blocks behind the one in _block, oldest first

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._block.get(block_hash)

    def find_all(self, block_hash: bytes) -> list[int]:
        """All blocks with this content."""
        block = self._block.get(block_hash)
        return [] if block is None else [block, *self._twins.get(block_hash, ())]

    def prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the leading hashes, up to the first that is not cached."""
        find, blocks = self._block.get, []
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which the block can be found, ``None`` if it cannot."""
        return self.hashes[block]

    def publish(self, block: int, block_hash: bytes) -> None:
        """From now on the block can be found under this hash."""
        self.publish_each((block,), (block_hash,))

    def publish_each(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """From now on each of these blocks can be found under its hash."""
        hashes, find_or_set = self.hashes, self._block.setdefault
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if hashes[block] is not None or block == 0:
                raise RuntimeError(f"block {block} cannot be published: it is cached or null")
            hashes[block] = block_hash
            if find_or_set(block_hash, block) != block:
                self._twins.setdefault(block_hash, []).append(block)
        self.version += 1

    def unpublish(self, block: int) -> None:
        """The block can no longer be found; holders keep it. Nothing happens if it could not."""
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
            return
        if self._block[block_hash] == block:
            self._block[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]

    def clear(self) -> None:
        """Forget every hash; ``on_loss`` hears nothing of it."""
        self.hashes[:] = [None] * len(self.hashes)
        self._block.clear()
        self._twins.clear()
        self.version += 1
        self.num_losses += 1


@dataclass(slots=True)
class CacheCounts:
    """Tokens looked up and found, counted when a request is admitted."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0  # lookups of requests that had been preempted
    preempted_hits: int = 0
    num_resets: int = 0  # times the cache was emptied on request

    def add(self, num_tokens: int, num_hit: int, *, preempted: bool) -> None:
        """One admission."""
        if preempted:
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hit
        else:
            self.queries += num_tokens
            self.hits += num_hit
