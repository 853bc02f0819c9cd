"""Which snapshots of recurrent states requests have used or made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv.prefix_index import PrefixIndex
from engine.kv.snapshots import Snapshot, Snapshots, StateMarks
from engine.kv.tables import Allocation, KVRequest, PrefixHit


class RequestStates:
    """Gives requests the snapshots of their prefix hits, and publishes those that they make.

    ``allocation_of`` returns a request's allocation. A number of tokens after which a snapshot is
    taken is a multiple of the block size."""

    def __init__(
        self,
        snapshots: Snapshots,
        index: PrefixIndex,
        allocation_of: Callable[[KVRequest], Allocation],
    ) -> None:
        self.snapshots = snapshots
        self._index = index
        self._allocation_of = allocation_of

    def adopt(self, allocation: Allocation, hit: PrefixHit) -> None:
        """Record the prefix hit with which a request gets its blocks."""
        marks = allocation.states = StateMarks(hit.snapshot, hit.num_beyond)
        if hit.num_tokens:
            marks.hashes[hit.num_tokens] = allocation.chain[len(hit.blocks) - 1]

    def release(self, allocation: Allocation) -> None:
        """Keep the snapshots of a request that loses its blocks longer than these blocks, which
        could not be used without them."""
        if allocation.states is not None:
            self.snapshots.touch(allocation.states.deepest_first())

    def to_load(self, req: KVRequest) -> Sequence[int]:
        """The blocks of the snapshot at the end of the prefix hit with which a request has just
        started; () if it starts without one. The step being planned must load it: later steps may
        overwrite the blocks."""
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
