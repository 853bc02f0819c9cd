"""The cached prefixes of requests that wait, kept up to date instead of looked up again.

Whoever orders a long queue by them asks for all in each step, while a step publishes and evicts few
blocks. So each answer is remembered until the content that it rests on changes: a block of the hit
is lost, or the first block after it appears.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
Whole = NDArray[np.int64]


class Hit:
    """A cached block that ends the hit of some rows, or lies within the hits of others."""

    __slots__ = ("children", "parent", "rows")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.children: set[bytes] = set()
        self.rows: set[int] = set()  # whose hit ends here


class PrefixWatch:
    """Answers by row, and which of them still hold. The cache tells it what comes and goes."""

    def __init__(self) -> None:
        self.tokens: Whole = np.zeros(0, dtype=np.int64)
        self._arrival: Whole = np.zeros(0, dtype=np.int64)  # of the request that was looked up
        self._known: Whole = np.zeros(0, dtype=np.int64)  # how many tokens it had then; -1: look up
        self._hits: dict[bytes, Hit] = {}
        self._awaited: dict[bytes, set[int]] = {}  # rows, by the hash that would lengthen their hit
        self._where: dict[int, tuple[bytes | None, bytes | None]] = {}  # row -> end, awaited

    def stale(self, rows: Rows, arrivals: Whole, known: Whole) -> NDArray[np.bool_]:
        """Which of these rows, with requests of these numbers of arrival and this many tokens, must
        be looked up."""
        if rows.size and (missing := int(rows.max()) + 1 - len(self.tokens)) > 0:
            missing += len(self.tokens)
            self.tokens = np.concatenate([self.tokens, np.zeros(missing, dtype=np.int64)])
            self._arrival = np.concatenate([self._arrival, np.full(missing, -1, dtype=np.int64)])
            self._known = np.concatenate([self._known, np.full(missing, -1, dtype=np.int64)])
        is_stale: NDArray[np.bool_] = self._known[rows] != known
        is_stale |= self._arrival[rows] != arrivals
        return is_stale

    def note(self, row: int, arrival: int, known: int, num_tokens: int) -> None:
        """A row was looked up: this many tokens of those known are cached."""
        self.tokens[row], self._arrival[row], self._known[row] = num_tokens, arrival, known

    def rest_on(self, row: int, hashes: Sequence[bytes], num_hit: int) -> None:
        """The answer for this row holds while the first ``num_hit`` of these blocks are cached and
        the next one, if there is one, is not."""
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

    def published(self, hashes: Sequence[bytes]) -> None:
        """Blocks can be found under these from now on."""
        awaited = self._awaited
        if not awaited.keys().isdisjoint(hashes):
            for block_hash in hashes:
                self._void(awaited.pop(block_hash, ()))

    def lost(self, block_hash: bytes) -> None:
        """No block can be found under this any more."""
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
        """Nothing is cached any more."""
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
