"""The snapshots of recurrent states that requests start from, and those that they have made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv.prefix_index import PrefixIndex
from engine.kv.snapshots import KeptSnapshot, Snapshot, Snapshots, StateMarks
from engine.kv.tables import Allocation, KVRequest, PrefixHit

MOST_KNOWN = 64  # snapshots within its prefix hit that a request keeps from being evicted


class RequestStates:
    """Gives requests the snapshots of their prefix hits, and publishes those that they make.

    ``allocation_of`` returns a request's allocation. Snapshots are taken after multiples of
    ``block_size`` tokens. ``interval``: after multiples of this many tokens, every request is to
    leave a snapshot that stays until it is evicted; 0: nowhere. It is a multiple of
    ``block_size``."""

    def __init__(
        self,
        snapshots: Snapshots,
        index: PrefixIndex,
        allocation_of: Callable[[KVRequest], Allocation],
        block_size: int,
        interval: int,
    ) -> None:
        self.snapshots = snapshots
        self.interval = interval
        self._index = index
        self._block_size = block_size
        self._allocation_of = allocation_of

    def adopt(self, allocation: Allocation, hit: PrefixHit) -> None:
        """Record the prefix hit with which a request gets its blocks."""
        marks = allocation.states = StateMarks(
            hit.snapshot, hit.num_beyond, branches=self._branches(allocation, hit)
        )
        if hit.num_tokens:
            hashes = allocation.chain[: len(hit.blocks)]
            for number in self.snapshots.among(hashes)[-MOST_KNOWN:]:
                marks.hashes[number * self._block_size] = hashes[number - 1]
            self.snapshots.use(hashes[-1])
            self.snapshots.touch(marks.deepest_first())

    def release(self, allocation: Allocation) -> None:
        """Keep the snapshots of a request that loses its blocks longer than these blocks, which
        could not be used without them."""
        if allocation.states is not None:
            self.snapshots.touch(allocation.states.deepest_first())

    def blocks_of(self, allocation: Allocation) -> list[int]:
        """The blocks of the snapshots that a request knows, those after fewest tokens first."""
        marks = allocation.states
        hashes = [] if marks is None else marks.deepest_first()[::-1]
        return [block for block_hash in hashes for block in self.snapshots.find(block_hash)]

    def known(self, req: KVRequest) -> list[KeptSnapshot]:
        """The cached snapshots that a request with blocks has used or made, and those before them,
        by number of tokens."""
        marks = self._allocation_of(req).states
        deepest_first = [] if marks is None else map(self.snapshots.kept, marks.deepest_first())
        return [kept for kept in deepest_first if kept is not None][::-1]

    def to_load(self, req: KVRequest) -> Sequence[int]:
        """The blocks of the snapshot at the end of the prefix hit with which a request has just
        got its blocks; () if it has no prefix hit. The step that is being planned must load it,
        since later steps may overwrite the blocks."""
        marks = self._allocation_of(req).states
        return () if marks is None else marks.loaded

    def branches(self, req: KVRequest, hit: PrefixHit | None = None) -> list[int]:
        """The numbers of tokens of a request after which its cached prefix divides from those of
        other requests: where KV was cached, but no snapshot, and where that was so before.
        ``hit``: its prefix hit, if it has no blocks yet."""
        allocation = self._allocation_of(req)
        if hit is None:
            return [] if allocation.states is None else allocation.states.branches
        return self._branches(allocation, hit)

    def _branches(self, allocation: Allocation, hit: PrefixHit) -> list[int]:
        size = self._block_size
        found = [size * number for number in self.snapshots.branches(allocation.chain)]
        return [*found, hit.num_tokens + hit.num_beyond] if hit.num_beyond else found

    def has_snapshot(self, req: KVRequest, num_tokens: int) -> bool:
        """True if there is a snapshot after the request's first ``num_tokens`` tokens."""
        block_hash = self._index.hash_at(req, self._allocation_of(req), num_tokens)
        return bool(self.snapshots.find(block_hash))

    def replaces(self, req: KVRequest) -> bool:
        """True if the request's next snapshot replaces its last one."""
        marks = self._allocation_of(req).states
        return marks is not None and marks.newest is not None

    def before(self, req: KVRequest, num_tokens: int) -> int:
        """Tokens of the nearest snapshot that stays and that the request has used or made after
        fewer than ``num_tokens`` tokens; 0 without such a snapshot."""
        marks = self._allocation_of(req).states
        return 0 if marks is None else marks.before(num_tokens)

    def publish(
        self,
        req: KVRequest,
        num_tokens: int,
        written: Snapshot,
        later: Sequence[int] = (),
        *,
        stays: bool,
    ) -> KeptSnapshot | None:
        """Make a snapshot available that was taken after the request's first ``num_tokens`` tokens.
        ``later``: tokens that follow those of ``req.tokens``. ``stays``: False for a snapshot that
        the request's next one replaces. Returns ``None`` if it was lost, or there is another."""
        allocation = self._allocation_of(req)
        marks = allocation.states
        if marks is None:
            self.snapshots.discard(written)
            return None
        kept = KeptSnapshot(
            self._index.hash_at(req, allocation, num_tokens, later),
            num_tokens,
            num_saved=num_tokens - marks.before(num_tokens),
            is_branch=num_tokens in marks.branches,
        )
        published = self.snapshots.publish(written, kept)
        if published is None:
            return None
        self._index.published(req, published.keys, published.blocks)
        former = marks.enter(num_tokens, kept.block_hash, None if stays else published)
        if former is not None:
            self.snapshots.discard(former)
        # The KV before its other snapshots is held, so they should not be evicted either.
        self.snapshots.touch(marks.deepest_first())
        return kept
