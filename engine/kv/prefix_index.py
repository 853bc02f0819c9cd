"""Prefix index: finds cached prefixes, publishes full blocks, withdraws invalid ones.

    hash of block i = H(hash of block i - 1, tokens of block i)

so an equal hash means equal content from the start of the sequence. The root stands for what
conditions every token: algorithm, adapter and salt. A media item enters the chain with the block in
which it begins, so all blocks that hold a part of it depend on it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Protocol

import msgspec

from engine.kv.block_pool import NULL_BLOCK, PrefixCache
from engine.kv.events import EventLog
from engine.kv.tables import FULL, Group, Holder, RequestBlocks
from engine.messages.requests import MediaItem


class Content(Protocol):
    """All that determines the KV of a sequence."""

    @property
    def tokens(self) -> array[int]: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def media(self) -> Sequence[MediaItem]: ...


class BlockHasher(Protocol):
    """A hash function over runs of blocks. Digests of one hasher have one length, in bytes."""

    root: bytes

    def extend(self, parent: bytes, data: bytes, width: int) -> list[bytes]:
        """Hashes of consecutive blocks of ``width`` bytes each after ``parent``."""

    def extend_one(self, parent: bytes, data: bytes) -> bytes:
        """Hash of the block after ``parent`` that holds ``data``."""

    def fold(self, parent: bytes, extra: bytes) -> bytes:
        """A parent that stands for ``extra`` as well."""


class Sha256Hasher:
    """SHA-256: the same in every process, and no way to make two contents collide is known."""

    root = hashlib.sha256(b"metronome prefix cache").digest()

    def extend(self, parent: bytes, data: bytes, width: int) -> list[bytes]:
        sha256 = hashlib.sha256
        if len(data) == width:  # a sequence that decodes
            return [sha256(parent + data).digest()]
        hashes = []
        for start in range(0, len(data), width):
            parent = sha256(parent + data[start : start + width]).digest()
            hashes.append(parent)
        return hashes

    def extend_one(self, parent: bytes, data: bytes) -> bytes:
        return hashlib.sha256(parent + data).digest()

    def fold(self, parent: bytes, extra: bytes) -> bytes:
        return hashlib.sha256(b"extra" + parent + extra).digest()


class Chains:
    """Makes and extends the chains of sequences cut into blocks of one size."""

    def __init__(self, hasher: BlockHasher, block_size: int) -> None:
        self.hasher = hasher
        self.block_size = block_size

    def root(self, content: Content) -> bytes:
        """Parent of the first block: only equal adapters and salts share anything."""
        if content.cache_salt is None and content.adapter is None:
            return self.hasher.root
        extra = msgspec.msgpack.encode((content.cache_salt, content.adapter))
        return self.hasher.fold(self.hasher.root, extra)

    def extend_each(self, chains: Sequence[list[bytes]], contents: Sequence[Content]) -> None:
        """Append the next full block's hash to each of these chains, which are not empty."""
        size, extend_one = self.block_size, self.hasher.extend_one
        for chain, content in zip(chains, contents, strict=True):
            done = len(chain)
            start = done * size
            if content.media and content.media[-1].offset >= start:
                self.extend(chain, content, start + size)
            else:
                data = content.tokens[start : start + size].tobytes()
                chain.append(extend_one(chain[-1], data))

    def extend(self, chain: list[bytes], content: Content, upto: int) -> None:
        """Append the hashes of the full blocks of ``tokens[:upto]`` that ``chain`` lacks."""
        size = self.block_size
        done, full = len(chain), upto // size
        if full <= done:
            return
        tokens = content.tokens
        parent = chain[-1] if done else self.root(content)
        data = tokens[done * size : full * size].tobytes()
        width = size * tokens.itemsize
        if not content.media:
            chain += self.hasher.extend(parent, data, width)
            return
        for start, end, extra in media_runs(content.media, size, done, full):
            if extra:
                parent = self.hasher.fold(parent, extra)
            part = data[(start - done) * width : (end - done) * width]
            chain += self.hasher.extend(parent, part, width)
            parent = chain[-1]


def media_runs(
    media: Sequence[MediaItem], block_size: int, first: int, before: int
) -> list[tuple[int, int, bytes]]:
    """Cut the blocks [first, before) where media items begin: (start, end, key of those items).

    Items are in order of offset. The key holds hash, offset and length of each.
    """
    inside = [item for item in media if first <= item.offset // block_size < before]
    begins = {
        block: msgspec.msgpack.encode(list(items))
        for block, items in groupby(inside, key=lambda item: item.offset // block_size)
    }
    cuts = sorted({first, before, *begins})
    return [(start, end, begins.get(start, b"")) for start, end in pairwise(cuts)]


def group_keys(hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
    """Keys of this group for the hashes: one hash stands for one block in each group."""
    return hashes if group == 0 else [block_hash + bytes([group]) for block_hash in hashes]


def find_tables(
    groups: Sequence[Group], cache: PrefixCache, hashes: Sequence[bytes], block_size: int
) -> list[list[int]]:
    """The longest hit common to all groups, as tables; entries out of a window are null."""
    if len(groups) == 1 and not groups[0].window:
        return [cache.prefix(hashes)]
    cached = [[cache.find(key) for key in group_keys(hashes, g)] for g in range(len(groups))]
    limit, agreed = len(hashes), -1
    while limit != agreed:  # what shortens the hit of one group may invalidate that of another
        agreed = limit
        for group, blocks in zip(groups, cached, strict=True):
            limit = group.longest(blocks, limit, block_size)
    tables = []
    for group, blocks in zip(groups, cached, strict=True):
        first = group.first_needed(limit * block_size, block_size)
        tables.append([NULL_BLOCK] * first + [block or NULL_BLOCK for block in blocks[first:limit]])
    return tables


class PrefixIndex:
    """Hashes the sequences of requests and keeps the cache and its listener in step."""

    def __init__(
        self,
        cache: PrefixCache,
        groups: Sequence[Group],
        hasher: BlockHasher,
        block_size: int,
        events: EventLog | None,
    ) -> None:
        self.events = events
        self._cache = cache
        self._groups = tuple(groups)
        self._chains = Chains(hasher, block_size)
        self._block_size = block_size
        if events is not None:
            cache.on_loss = events.removed

    def find(self, req: Holder, holding: RequestBlocks, num_blocks: int) -> list[list[int]]:
        """The longest hit of at most this many blocks, as one table for each group.

        If no content was evicted since the remembered hit, the search continues after it.
        """
        chain, old, cache = holding.chain, holding.hit, self._cache
        self._chains.extend(chain, req, num_blocks * self._block_size)
        if old is None or holding.hit_losses != cache.num_losses or self._groups != (FULL,):
            return find_tables(self._groups, cache, chain[:num_blocks], self._block_size)
        return [old.blocks + cache.prefix(chain[len(old.blocks) : num_blocks])]

    def publish(self, req: Holder, holding: RequestBlocks, first: int, before: int) -> None:
        """The blocks [first, before) are full and written: others may share them."""
        chain, publish = holding.chain, self._cache.publish_each
        self._chains.extend(chain, req, before * self._block_size)
        publish(holding.tables[0][first:before], chain[first:before])
        for g in range(1, len(self._groups)):
            publish(holding.tables[g][first:before], group_keys(chain[first:before], g))
        if self.events is not None:
            self._report(self.events, req, chain, first, before)

    def publish_next(
        self, reqs: Sequence[Holder], holdings: Sequence[RequestBlocks], nth: list[int]
    ) -> None:
        """``publish`` of one block each: the ``nth`` of each table."""
        if self.events is not None or len(self._groups) > 1 or 0 in nth:
            for req, holding, index in zip(reqs, holdings, nth, strict=True):
                self.publish(req, holding, index, index + 1)
            return
        chains = [holding.chain for holding in holdings]
        late = [i for i, chain in enumerate(chains) if len(chain) == nth[i]]
        if late:  # the others were hashed when they were looked up
            self._chains.extend_each([chains[i] for i in late], [reqs[i] for i in late])
        blocks = [holding.tables[0][index] for holding, index in zip(holdings, nth, strict=True)]
        hashes = [chain[index] for chain, index in zip(chains, nth, strict=True)]
        self._cache.publish_each(blocks, hashes)

    def hashes(self, req: Holder, holding: RequestBlocks | None) -> list[bytes]:
        """Hashes of all full blocks of known tokens, also of a request that has ended."""
        chain = [] if holding is None else holding.chain
        self._chains.extend(chain, req, len(req.tokens))
        return chain

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """Unpublish every block with one of these hashes, whichever request wrote it."""
        for g in range(len(self._groups)):
            for key in group_keys(hashes, g):
                for block in self._cache.find_all(key):
                    self._cache.unpublish(block)

    def clear(self) -> None:
        """Forget all content."""
        self._cache.clear()
        if self.events is not None:
            self.events.cleared()

    def _report(
        self, events: EventLog, req: Holder, chain: Sequence[bytes], first: int, before: int
    ) -> None:
        size = self._block_size
        tokens: array[int] = req.tokens[first * size : before * size]
        parent = chain[first - 1] if first else None
        for g in range(len(self._groups)):
            events.stored(chain[first:before], parent, tokens, req.adapter, g)
