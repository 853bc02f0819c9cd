"""The snapshots of recurrent states that requests start from, and those that they have made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv.prefix_index import PrefixIndex
from engine.kv.snapshots import Snapshot, Snapshots, StateMarks
from engine.kv.tables import Allocation, KVRequest, PrefixHit

MOST_USED = 1 << 16  # snapshots that are remembered because requests have started from them
MOST_BLOCKS = 256  # an earlier snapshot is looked for in this many blocks before a prefix hit


class RequestStates:
    """Gives requests the snapshots of their prefix hits, and publishes those that they make.

    ``allocation_of`` returns a request's allocation. Snapshots are taken after multiples of
    ``block_size`` tokens. ``interval``: after multiples of this many tokens, every request leaves a
    snapshot, which stays until it is evicted; 0: nowhere. It is a multiple of ``block_size``."""

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
        self._used: dict[bytes, None] = {}  # hashes of snapshots from which requests have started
        self._allocation_of = allocation_of

    def adopt(self, allocation: Allocation, hit: PrefixHit) -> None:
        """Record the prefix hit with which a request gets its blocks."""
        allocation.states = StateMarks(hit.snapshot, hit.num_beyond)
        if hit.num_tokens:
            self._use(allocation.chain[: len(hit.blocks)])

    def release(self, allocation: Allocation) -> None:
        """Keep the snapshots of a request that loses its blocks longer than these blocks, which
        could not be used without them."""
        if allocation.states is not None:
            self.snapshots.touch(allocation.states.deepest_first())

    def is_at_interval(self, num_tokens: int) -> bool:
        """True if ``num_tokens`` is a multiple of the interval between snapshots that stay."""
        return self.interval > 0 and num_tokens % self.interval == 0

    def _use(self, hashes: Sequence[bytes]) -> None:
        """Record that a request starts from the snapshot after these blocks. If blocks are evicted
        at present, the nearest one before it is dropped if no request has started from it: most
        likely the request continues an answer to the prompt at whose end that one was taken."""
        self.snapshots.touch(hashes[-1:])
        self._used[hashes[-1]] = None
        if len(self._used) > MOST_USED:
            del self._used[next(iter(self._used))]
        if not self.snapshots.is_pool_full:
            return
        first = max(0, len(hashes) - 1 - MOST_BLOCKS)
        near = first + self.snapshots.deepest(hashes[first:-1], len(hashes) - 1 - first)
        stays = self.is_at_interval(near * self._block_size)
        if near > first and not stays and hashes[near - 1] not in self._used:
            self.snapshots.drop(hashes[near - 1])

    def to_load(self, req: KVRequest) -> Sequence[int]:
        """The blocks of the snapshot at the end of the prefix hit with which a request has just
        got its blocks; () if it has no prefix hit. The step that is being planned must load it,
        since later steps may overwrite the blocks."""
        marks = self._allocation_of(req).states
        return () if marks is None else marks.loaded

    def num_beyond(self, req: KVRequest) -> int:
        """Number of tokens after the prefix hit of a request with blocks whose KV was cached, but
        after which there was no snapshot."""
        marks = self._allocation_of(req).states
        return 0 if marks is None else marks.num_beyond

    def has_snapshot(self, req: KVRequest, num_tokens: int) -> bool:
        """True if there is a snapshot after the request's first ``num_tokens`` tokens."""
        block_hash = self._index.hash_at(req, self._allocation_of(req), num_tokens)
        return bool(self.snapshots.find(block_hash))

    def publish(
        self,
        req: KVRequest,
        num_tokens: int,
        written: Snapshot,
        later: Sequence[int] = (),
        *,
        stays: bool,
    ) -> None:
        """Make a snapshot available that was taken after the request's first ``num_tokens`` tokens.
        ``later``: tokens that follow those of ``req.tokens``. ``stays``: False for a snapshot that
        the request's next one replaces."""
        allocation = self._allocation_of(req)
        block_hash = self._index.hash_at(req, allocation, num_tokens, later)
        published, marks = self.snapshots.publish(written, block_hash), allocation.states
        if published is not None and marks is not None:
            former = marks.enter(num_tokens, block_hash, None if stays else published)
            if former is not None:
                self.snapshots.discard(former)
            # The KV before its other snapshots is held, so they should not be evicted either.
            self.snapshots.touch(marks.deepest_first())
