"""Prefix index: finds cached prefixes, publishes full blocks, withdraws invalid ones.

    hash of block i = H(hash of block i - 1, tokens of block i)

Thus equal hashes mean equal sequences up to the end of the block. The hash before the first block
depends on algorithm, adapter and cache salt. The hash of a media item (an image, say) is mixed into
the hash of the block in which the item begins, and so affects all later blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import msgspec

from engine.config.kv_groups import FULL, NULL_BLOCK, Group
from engine.kv.block_pool import PrefixCache
from engine.kv.changes import CacheChanges
from engine.kv.events import EventLog
from engine.kv.snapshots import Snapshots
from engine.kv.tables import Allocation, KVRequest, PrefixHit
from engine.messages.requests import MediaItem


class Content(Protocol):
    """The fields of a request on which its KV depends."""

    @property
    def tokens(self) -> array[int]: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def media(self) -> Sequence[MediaItem]: ...


Withheld = Callable[[Sequence[bytes], Sequence[int]], None]
"""Called with the keys of blocks, and the blocks."""


class PlainContent(NamedTuple):
    """A sequence of tokens, with what else its KV depends on."""

    tokens: array[int]
    cache_salt: str | None = None
    adapter: str | None = None
    media: Sequence[MediaItem] = ()


class BlockHasher(Protocol):
    """A hash function over consecutive blocks. All its digests have the same length in bytes."""

    root: bytes
    secret: bytes
    """What another process needs for the same hashes: empty for SHA-256."""

    def extend(self, parent: bytes, data: bytes, width: int) -> list[bytes]:
        """Hash the consecutive blocks in ``data``, of ``width`` bytes each. ``parent``: hash of the
        block before them."""

    def extend_one(self, parent: bytes, data: bytes) -> bytes:
        """Hash one block with the bytes ``data``. ``parent``: hash of the block before it."""

    def fold(self, parent: bytes, extra: bytes) -> bytes:
        """Mix ``extra`` into a parent hash."""


class Sha256Hasher:
    """Hashes blocks with SHA-256: equal in every process, and nobody can construct collisions."""

    root = hashlib.sha256(b"metronome prefix cache").digest()
    secret = b""

    def extend(self, parent: bytes, data: bytes, width: int) -> list[bytes]:
        sha256 = hashlib.sha256
        if len(data) == width:  # one block: the usual case of a decode
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
    """Computes chains: a chain is the list of a sequence's block hashes."""

    def __init__(self, hasher: BlockHasher, block_size: int) -> None:
        self.hasher = hasher
        self.block_size = block_size

    def root(self, content: Content) -> bytes:
        """The hash before the first block, equal for requests with the same adapter and salt."""
        if content.cache_salt is None and content.adapter is None:
            return self.hasher.root
        extra = msgspec.msgpack.encode((content.cache_salt, content.adapter))
        return self.hasher.fold(self.hasher.root, extra)

    def extend_each(self, chains: Sequence[list[bytes]], contents: Sequence[Content]) -> None:
        """Append the hash of the next full block to each chain; no chain may be empty."""
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
        """Append hashes to ``chain``, until it has one for each full block of ``tokens[:upto]``."""
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
    """Split the blocks [first, before) into ranges, so that media items begin only in the first
    block of a range. Returns (first block, end, key) for each range.

    The key is made of hash, offset and length of the items that begin in the range; b"" if there
    are none. ``media`` must be sorted by offset."""
    inside = [item for item in media if first <= item.offset // block_size < before]
    begins = {
        block: msgspec.msgpack.encode(list(items))
        for block, items in groupby(inside, key=lambda item: item.offset // block_size)
    }
    cuts = sorted({first, before, *begins})
    return [(start, end, begins.get(start, b"")) for start, end in pairwise(cuts)]


def group_keys(hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
    """Make the prefix-cache keys of blocks in one group of layers from their hashes."""
    return hashes if group == 0 else [block_hash + bytes([group]) for block_hash in hashes]


class Finds(Protocol):
    """Finds cached blocks by key."""

    def find(self, block_hash: bytes, /) -> int | None: ...

    def prefix(self, hashes: Sequence[bytes], /) -> list[int]: ...


class FindsDeepest(Protocol):
    """Finds the last snapshot of a prefix, as ``Snapshots.deepest`` does."""

    def deepest(self, hashes: Sequence[bytes], limit: int) -> int: ...


def find_tables(
    groups: Sequence[Group],
    cache: Finds,
    hashes: Sequence[bytes],
    block_size: int,
    snapshots: FindsDeepest | None = None,
) -> list[list[int]]:
    """Block tables of the longest prefix that is cached in all groups and, if ``snapshots`` are
    given, ends with a snapshot. Entries outside a group's window are null blocks."""
    if len(groups) == 1 and not groups[0].window:
        prefix = cache.prefix(hashes)
        return [prefix if snapshots is None else prefix[: snapshots.deepest(hashes, len(prefix))]]
    cached = [[cache.find(key) for key in group_keys(hashes, g)] for g in range(len(groups))]
    limit, agreed = len(hashes), -1
    while limit != agreed:  # a shorter limit may invalidate the hit of another group
        agreed = limit
        for group, blocks in zip(groups, cached, strict=True):
            limit = group.longest(blocks, limit, block_size)
        if snapshots is not None:
            limit = snapshots.deepest(hashes, limit)
    tables = []
    for group, blocks in zip(groups, cached, strict=True):
        first = group.first_needed(limit * block_size, block_size)
        tables.append([NULL_BLOCK] * first + [block or NULL_BLOCK for block in blocks[first:limit]])
    return tables


class PrefixIndex:
    """Hashes the blocks of requests, adds and removes cached blocks, and logs cache events."""

    def __init__(
        self,
        cache: PrefixCache,
        groups: Sequence[Group],
        chains: Chains,
        events: EventLog | None,
    ) -> None:
        self.events = events
        self.snapshots: Snapshots | None = None  # with which prefix hits must end
        self.withheld: dict[int, Withheld] = {}
        """Called for what requests publish, by arrival number."""
        self._cache = cache
        self._groups = tuple(groups)
        self._has_windows = any(group.window for group in groups)
        self._chains = chains
        self._block_size = chains.block_size
        if events is not None:
            cache.on_loss = self._removed

    def find(self, req: KVRequest, allocation: Allocation, num_blocks: int) -> list[list[int]]:
        """The block tables of the longest prefix hit, one table per group, with at most
        ``num_blocks`` entries each."""
        chain, old, cache = allocation.chain, allocation.hit, self._cache
        self._chains.extend(chain, req, num_blocks * self._block_size)
        if old is None or allocation.hit_losses != cache.num_losses or self._groups != (FULL,):
            return find_tables(self._groups, cache, chain[:num_blocks], self._block_size)
        return [old.blocks + cache.prefix(chain[len(old.blocks) : num_blocks])]

    def until_snapshot(self, allocation: Allocation, tables: list[list[int]]) -> PrefixHit:
        """The prefix hit, given the block tables of the longest prefix that is cached: it ends at
        the last snapshot of this prefix."""
        assert self.snapshots is not None
        num_cached, size = len(tables[0]), self._block_size
        hashes = allocation.chain[:num_cached]
        tables = find_tables(self._groups, self._cache, hashes, size, self.snapshots)
        num_blocks = len(tables[0])
        return PrefixHit(
            num_blocks * size,
            tables,
            snapshot=self.snapshots.find(hashes[num_blocks - 1]) if num_blocks else (),
            num_beyond=(num_cached - num_blocks) * size,
        )

    def hash_at(
        self, req: KVRequest, allocation: Allocation, num_tokens: int, later: Sequence[int] = ()
    ) -> bytes:
        """The hash of the request's first ``num_tokens`` tokens, a multiple of the block size.
        ``later``: tokens that follow those of the request."""
        content: Content = req
        if num_tokens > len(req.tokens):
            tokens = req.tokens + array(req.tokens.typecode, later)
            content = PlainContent(tokens, req.cache_salt, req.adapter, req.media)
        self._chains.extend(allocation.chain, content, num_tokens)
        return allocation.chain[num_tokens // self._block_size - 1]

    def publish(self, req: KVRequest, allocation: Allocation, first: int, before: int) -> None:
        """Put the request's blocks [first, before), which are full and written, into the cache. A
        block that a group has freed already, because a step in flight has left its window, is
        skipped."""
        chain = allocation.chain
        self._chains.extend(chain, req, before * self._block_size)
        for g, table in enumerate(allocation.tables):
            begin = first
            while begin < before and table[begin] == NULL_BLOCK:
                begin += 1
            if begin < before:
                keys = group_keys(chain[begin:before], g)
                self._cache.publish_each(table[begin:before], keys)
                self.published(req, keys, table[begin:before])
                if self.events is not None:
                    self._report(self.events, req, chain, range(begin, before), g)

    def published(self, req: KVRequest, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Called when blocks of a request have been put into the cache."""
        if self.withheld and (withheld := self.withheld.get(req.arrival)) is not None:
            withheld(keys, blocks)

    def publish_next(
        self, reqs: Sequence[KVRequest], allocations: Sequence[Allocation], nth: list[int]
    ) -> None:
        """Put one block of each request into the cache: entry ``nth[i]`` of the block table of
        ``reqs[i]``."""
        if self.events is not None or self.withheld or len(self._groups) > 1 or 0 in nth:
            for req, allocation, index in zip(reqs, allocations, nth, strict=True):
                self.publish(req, allocation, index, index + 1)
            return
        chains = [allocation.chain for allocation in allocations]
        late = [i for i, chain in enumerate(chains) if len(chain) == nth[i]]
        if late:  # the other chains were extended when their requests were looked up
            self._chains.extend_each([chains[i] for i in late], [reqs[i] for i in late])
        blocks = [each.tables[0][index] for each, index in zip(allocations, nth, strict=True)]
        hashes = [chain[index] for chain, index in zip(chains, nth, strict=True)]
        if self._has_windows and NULL_BLOCK in blocks:  # as in ``publish``
            hashes = [each for each, block in zip(hashes, blocks, strict=True) if block]
            blocks = [block for block in blocks if block]
        self._cache.publish_each(blocks, hashes)

    def hashes(self, req: KVRequest, allocation: Allocation | None) -> list[bytes]:
        """Hashes of all full blocks of the request, reusing the hashes in its allocation."""
        chain = [] if allocation is None else allocation.chain
        self._chains.extend(chain, req, len(req.tokens))
        return chain

    def follow(self) -> CacheChanges:
        """Begin to collect what enters and leaves the cache, in a group with full attention if
        there is one."""
        full = next((g for g, group in enumerate(self._groups) if not group.window), 0)
        hasher = self._chains.hasher
        changes = CacheChanges(self._cache, len(hasher.root), secret=hasher.secret, group=full)
        self._cache.followers.append(changes)
        return changes

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """Remove all blocks with these hashes from the cache, whichever requests wrote them."""
        keys = [key for g in range(len(self._groups)) for key in group_keys(hashes, g)]
        if self.snapshots is not None:
            keys += [key for each in hashes for key in self.snapshots.keys_of(each)]
        for key in keys:
            for block in self._cache.find_all(key):
                self._cache.unpublish(block)
        for follower in self._cache.followers:
            follower.withdrawn(keys)

    def clear(self) -> None:
        """Empty the cache."""
        self._cache.clear()
        if self.events is not None:
            self.events.cleared()

    def _removed(self, key: bytes) -> None:
        """Report that no block has this key any more, unless it is a key of a snapshot."""
        assert self.events is not None
        if self.snapshots is None or len(key) - len(self._chains.hasher.root) in (
            0,
            1,
        ):  # a hash, perhaps with a group
            self.events.removed(key)

    def _report(
        self, events: EventLog, req: KVRequest, chain: Sequence[bytes], nth: range, group: int
    ) -> None:
        size = self._block_size
        tokens: array[int] = req.tokens[nth.start * size : nth.stop * size]
        parent = chain[nth.start - 1] if nth.start else None
        media = [(item.offset - nth.start * size, item.hash) for item in req.media]
        events.stored(
            chain[nth.start : nth.stop],
            parent,
            tokens,
            group,
            adapter=req.adapter,
            salt=req.cache_salt,
            media=[(offset, name) for offset, name in media if 0 <= offset < len(tokens)],
        )
