"""Remembers the cached prefix lengths of waiting requests until they may have changed.

A policy that sorts a long queue by cached prefix needs the lengths of all requests in each step,
while a step caches and evicts few blocks. A length stays valid until a block of the hit is evicted
or the first block after it is cached."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
IntArray = NDArray[np.int64]


class Hit:
    """A cached block in prefix hits. ``rows``: rows of the requests whose hit ends with this block;
    ``parent``, ``children``: hashes of the blocks before and after it in the hits."""

    __slots__ = ("children", "parent", "rows")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.children: set[bytes] = set()
        self.rows: set[int] = set()  # rows whose hit ends with this block


class PrefixWatch:
    """The number of cached prefix tokens (``tokens``) of the request in each row. The prefix cache
    reports blocks that it adds or removes; lengths that depend on these become invalid."""

    def __init__(self) -> None:
        self.tokens: IntArray = np.zeros(0, dtype=np.int64)
        self._arrival: IntArray = np.zeros(0, dtype=np.int64)  # of the request that was looked up
        self._known: IntArray = np.zeros(0, dtype=np.int64)  # its token count then; -1: outdated
        self._hits: dict[bytes, Hit] = {}
        self._awaited: dict[bytes, set[int]] = {}  # rows, by the hash that would extend their hit
        self._where: dict[int, tuple[bytes | None, bytes | None]] = {}  # row -> end, awaited

    def stale(self, rows: Rows, arrivals: IntArray, known: IntArray) -> NDArray[np.bool_]:
        """Return a mask of the ``rows`` whose prefix length must be looked up again. ``arrivals``,
        ``known``: arrival number and token count of the request in each row."""
        if rows.size and (missing := int(rows.max()) + 1 - len(self.tokens)) > 0:
            missing += len(self.tokens)
            self.tokens = np.concatenate([self.tokens, np.zeros(missing, dtype=np.int64)])
            self._arrival = np.concatenate([self._arrival, np.full(missing, -1, dtype=np.int64)])
            self._known = np.concatenate([self._known, np.full(missing, -1, dtype=np.int64)])
        is_stale: NDArray[np.bool_] = self._known[rows] != known
        is_stale |= self._arrival[rows] != arrivals
        return is_stale

    def remember(self, row: int, arrival: int, known: int, num_tokens: int) -> None:
        """Store that ``num_tokens`` of a row's request are cached. ``arrival``: arrival number of
        the request; ``known``: its number of tokens."""
        self.tokens[row], self._arrival[row], self._known[row] = num_tokens, arrival, known

    def watch_prefix(self, row: int, hashes: Sequence[bytes], num_hit: int) -> None:
        """Watch a row's prefix hit of ``num_hit`` blocks: its length becomes invalid when one of
        them is evicted or the next block is cached. ``hashes``: of the request's full blocks."""
        self._forget(row)
        end = hashes[num_hit - 1] if num_hit else None
        awaited = hashes[num_hit] if num_hit < len(hashes) else None
        self._where[row] = end, awaited
        if awaited is not None:
            self._awaited.setdefault(awaited, set()).add(row)
        if end is None:
            return
        child: bytes | None = None
        for index in range(num_hit - 1, -1, -1):
            block_hash = hashes[index]
            is_new = block_hash not in self._hits
            if is_new:
                self._hits[block_hash] = Hit(hashes[index - 1] if index else None)
            if child is not None:
                self._hits[block_hash].children.add(child)
            if not is_new:
                break
            child = block_hash
        self._hits[end].rows.add(row)

    def forget(self, row: int) -> None:
        """Invalidate the prefix length of a row whose block hashes have changed."""
        self._forget(row)
        if row < len(self._known):
            self._known[row] = -1

    def published(self, hashes: Sequence[bytes]) -> None:
        """Invalidate the prefix length of rows whose hits these new cached blocks may extend."""
        awaited = self._awaited
        if not awaited.keys().isdisjoint(hashes):
            for block_hash in hashes:
                self._void(awaited.pop(block_hash, ()))

    def lost(self, block_hash: bytes) -> None:
        """Invalidate the rows whose hits contain this block, which is no longer cached."""
        hit = self._hits.get(block_hash)
        if hit is None:
            return
        if hit.parent is not None and (parent := self._hits.get(hit.parent)) is not None:
            parent.children.discard(block_hash)
        left = [block_hash]
        while left:
            hit = self._hits.pop(left.pop())
            self._void(hit.rows)
            left += hit.children

    def cleared(self) -> None:
        """Invalidate all rows, after the cache was emptied."""
        self._hits.clear()
        self._awaited.clear()
        self._where.clear()
        self._known[:] = -1

    def _void(self, rows: set[int] | tuple[()]) -> None:
        if rows:
            self._known[list(rows)] = -1

    def _forget(self, row: int) -> None:
        end, awaited = self._where.pop(row, (None, None))
        if end is not None and (hit := self._hits.get(end)) is not None:
            hit.rows.discard(row)
        if awaited is not None and (rows := self._awaited.get(awaited)) is not None:
            rows.discard(row)
            if not rows:
                del self._awaited[awaited]
