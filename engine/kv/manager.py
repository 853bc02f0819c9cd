"""KVManager: which request holds which blocks, and which of them others may share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kv.block_pool import BlockPool
from engine.kv.hashing import extend_chain, root_hash


class Holder(Protocol):
    """What the manager reads of a request. ``row`` is its index in the scheduler's table."""

    row: int
    tokens: array[int]
    cache_salt: str | None
    reads_cache: bool


@dataclass(slots=True)
class PrefixHit:
    """The longest cached beginning of a sequence: ``num_tokens`` of it in ``blocks``."""

    num_tokens: int
    blocks: list[int]


NO_HIT = PrefixHit(0, [])


@dataclass(slots=True)
class Holding:
    """The blocks of one request and what is known of their content."""

    root: bytes
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # hash of each full block of known tokens
    num_adopted: int = 0  # leading blocks that came from the cache
    hit: PrefixHit | None = None  # remembered answer of lookup
    hit_version: int = -1


@dataclass(slots=True)
class CacheCounts:
    """Tokens looked up and found, counted when a request is admitted."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0  # lookups of requests that had been preempted
    preempted_hits: int = 0


class KVManager:
    """The only writer of block tables and reference counts.

    Positions are absolute: ``upto`` means the positions [0, upto). Questions (``lookup``, ``fits``,
    ``missing``) change nothing; ``reserve`` gets everything or nothing.
    ``num_held`` and ``num_published`` (blocks per row) are columns for the scheduler's vector path.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.counts = CacheCounts()
        self.num_held: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self.num_published: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self._holdings: dict[int, Holding] = {}
        self._grown: list[tuple[int, int, int]] = []  # row, table index, block

    # -- questions

    @property
    def num_usable(self) -> int:
        """Blocks one request could have if it were alone."""
        return self.pool.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the pool held by requests, 0 to 1."""
        return 1.0 - self.pool.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def held(self, req: Holder) -> list[int]:
        """The request's blocks, in order."""
        holding = self._holdings.get(req.row)
        return holding.blocks if holding else []

    def num_adopted(self, req: Holder) -> int:
        """Leading blocks of the request that came from the cache."""
        holding = self._holdings.get(req.row)
        return holding.num_adopted if holding else 0

    def lookup(self, req: Holder) -> PrefixHit:
        """The longest cached prefix; at most all but the last token, which must be computed."""
        if not self.caching or not req.reads_cache:
            return NO_HIT
        holding = self._holding(req)
        if holding.hit is not None and holding.hit_version == self.pool.version:
            return holding.hit
        known = len(req.tokens)
        extend_chain(holding.chain, req.tokens, self.block_size, known, holding.root)
        blocks = []
        for block_hash in holding.chain[: (known - 1) // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        holding.hit = PrefixHit(len(blocks) * self.block_size, blocks)
        holding.hit_version = self.pool.version
        return holding.hit

    def missing(self, req: Holder, upto: int) -> int:
        """Free blocks it would take to give the request positions [0, upto)."""
        held = self.held(req)
        if held:
            return max(0, self.blocks_for(upto) - len(held))
        hit = self.lookup(req).blocks
        refs = self.pool.num_refs
        return self.blocks_for(upto) - len(hit) + sum(refs[block] == 0 for block in hit)

    def fits(self, req: Holder, upto: int, freeing: Sequence[Holder] = ()) -> bool:
        """Would ``reserve`` succeed once these were released?"""
        free = self.pool.num_free
        if freeing:
            free += self._exclusive(freeing, keep=() if self.held(req) else self.lookup(req).blocks)
        return self.missing(req, upto) <= free

    # -- acts

    def reserve(self, req: Holder, upto: int) -> bool:
        """Own slots for the positions [0, upto); a request without blocks adopts its prefix hit."""
        if self.missing(req, upto) > self.pool.num_free:
            return False
        holding = self._holding(req)
        row = req.row
        if not holding.blocks:
            hit = self.lookup(req).blocks
            self.pool.adopt(hit)
            holding.num_adopted = len(hit)
            holding.hit = None
            self._extend(row, holding, hit)
            self.num_published[row] = len(hit)
        wanted = self.blocks_for(upto) - len(holding.blocks)
        if wanted > 0:
            self._extend(row, holding, self.pool.take(wanted))
        return True

    def reserve_next(self, rows: Sequence[int]) -> None:
        """One more block for each of these rows; the caller has seen that there are as many."""
        for row, block in zip(rows, self.pool.take(len(rows)), strict=True):
            self._extend(row, self._holdings[row], [block])

    def commit(self, req: Holder, upto: int) -> None:
        """The tokens before ``upto`` are known and written: their full blocks may be shared."""
        full = upto // self.block_size
        row = req.row
        first = int(self.num_published[row])
        if full <= first:
            return
        self.num_published[row] = full
        if not self.caching:
            return
        holding = self._holdings[row]
        extend_chain(holding.chain, req.tokens, self.block_size, upto, holding.root)
        for index in range(first, full):
            self.pool.publish(holding.blocks[index], holding.chain[index])

    def revoke(self, req: Holder, start: int, others: Iterable[Holder]) -> list[int]:
        """What ``req`` wrote from position ``start`` on, and all that was computed from it, leaves
        the cache. Returns the rows among ``others`` that adopted some of it, or may have before
        they gave their blocks back.

        Blocks are found by what they should hold: their writer may have let go of them since.
        """
        first = start // self.block_size
        if self.held(req):
            first = min(first, self.num_adopted(req))
        bad = self._chain(req)[first : first + 1]
        adopted = []
        for other in others:
            chain = self._chain(other)
            if not bad or chain[first : first + 1] != bad:
                continue
            for block_hash in chain[first:]:
                for block in self.pool.find_all(block_hash):
                    self.pool.unpublish(block)
            if self.num_adopted(other) > first or not self.held(other):
                adopted.append(other.row)
        return adopted

    def release(self, req: Holder) -> None:
        """Give back all blocks; hashes of known tokens stay remembered until ``forget``."""
        holding = self._holdings.get(req.row)
        if holding is None:
            return
        self.pool.release(holding.blocks)
        holding.blocks = []
        holding.num_adopted = 0
        holding.hit = None
        self.num_held[req.row] = self.num_published[req.row] = 0

    def forget(self, req: Holder) -> None:
        """The request has ended: nothing is kept of it."""
        self.release(req)
        self._holdings.pop(req.row, None)

    def count_lookup(self, num_tokens: int, num_hit: int, *, preempted: bool) -> None:
        """Statistics of one admission."""
        if not self.caching:
            return
        if preempted:
            self.counts.preempted_queries += num_tokens
            self.counts.preempted_hits += num_hit
        else:
            self.counts.queries += num_tokens
            self.counts.hits += num_hit

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Refused (False) while any block is held."""
        if self.pool.num_free != self.num_usable:
            return False
        self.pool.unpublish_all()
        return True

    def drain(self) -> list[tuple[int, int, int]]:
        """Block-table entries (row, index, block) since the last call."""
        grown, self._grown = self._grown, []
        return grown

    def ensure_rows(self, num_rows: int) -> None:
        """Columns for this many rows."""
        while len(self.num_held) < num_rows:
            self.num_held = np.concatenate([self.num_held, np.zeros_like(self.num_held)])
            self.num_published = np.concatenate(
                [self.num_published, np.zeros_like(self.num_published)]
            )

    # -- helpers

    def _holding(self, req: Holder) -> Holding:
        holding = self._holdings.get(req.row)
        if holding is None:
            holding = self._holdings[req.row] = Holding(root_hash(req.cache_salt))
        return holding

    def _chain(self, req: Holder) -> list[bytes]:
        """Hashes of all full blocks of known tokens, also of a request that has ended."""
        holding = self._holdings.get(req.row) or Holding(root_hash(req.cache_salt))
        size = self.block_size
        extend_chain(holding.chain, req.tokens, size, len(req.tokens), holding.root)
        return holding.chain

    def _extend(self, row: int, holding: Holding, blocks: list[int]) -> None:
        start = len(holding.blocks)
        holding.blocks.extend(blocks)
        self.num_held[row] = len(holding.blocks)
        self._grown.extend((row, start + i, block) for i, block in enumerate(blocks))

    def _exclusive(self, reqs: Sequence[Holder], keep: Sequence[int]) -> int:
        """Blocks nobody else would hold once these requests let go; ``keep`` counts as held."""
        lost: dict[int, int] = {}
        for req in reqs:
            for block in self.held(req):
                lost[block] = lost.get(block, 0) + 1
        refs = self.pool.num_refs
        return sum(refs[block] == count for block, count in lost.items()) - sum(
            lost.get(block) == refs[block] for block in keep
        )
