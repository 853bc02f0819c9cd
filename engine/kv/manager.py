"""KVManager: which request holds which KV blocks, and which blocks requests may share.

block_pool     the content of each block, the free list, reference counts
tables         block tables of requests: grow, trim, report changes to the worker
prefix_index   hashes sequences; finds, publishes and withdraws cached blocks
prefix_ends    explains why prefix hits end where they do
snapshots      copies of recurrent states in blocks, for models that have states
request_states which snapshots requests start from, and which they have made
promotions     blocks into which copies from outside the pool are loaded
tails          the last, partly filled blocks of preempted requests
retention      the order in which free blocks lose their content, if a cache policy chooses it
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.kv_groups import FULL, Group
from engine.kv.block_pool import BlockPool, CacheCounts, live_blocks
from engine.kv.changes import CacheChanges
from engine.kv.events import EventLog
from engine.kv.prefix_ends import CACHING_OFF, NO_SNAPSHOT, NOT_READ, PrefixEnds, is_bare
from engine.kv.prefix_index import BlockHasher, Chains, PrefixIndex, Sha256Hasher, Withheld
from engine.kv.prefix_watch import PrefixWatch
from engine.kv.promotions import Promotion, Promotions, Wanted
from engine.kv.request_states import RequestStates
from engine.kv.retention import Retention
from engine.kv.snapshots import Snapshots, is_reserved
from engine.kv.tables import (
    WHOLE,
    Allocation,
    BlockTables,
    Deltas,
    KVRequest,
    PrefixEnd,
    PrefixHit,
    peak_blocks,
)
from engine.kv.tails import Tails


class KVManager:
    """Allocates KV blocks to requests; only it writes block tables and reference counts.

    ``upto`` means the positions [0, upto) of a sequence. Queries (``lookup``, ``fits``,
    ``missing``) change nothing. A table entry takes one block in each group of layers; numbers of
    blocks are sums over all groups. The blocks are of a new pool with ``num_blocks`` of them, or of
    a given one. ``num_held`` and ``num_published`` count table entries by batch
    row, for vectorised scheduling."""

    def __init__(
        self,
        num_blocks: int | BlockPool,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        groups: Sequence[Group] = (FULL,),
        events: EventLog | None = None,
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)  # a further table entry takes this many blocks
        self.caching = enable_prefix_caching
        self.counts = CacheCounts()
        self.pool = num_blocks if isinstance(num_blocks, BlockPool) else BlockPool(num_blocks)
        self.cache = self.pool.cache
        self.tables = BlockTables(self.pool, groups, block_size)
        self.num_held: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self.num_published: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        chains = Chains(hasher or Sha256Hasher(), block_size)
        self._prefix_index = PrefixIndex(self.cache, groups, chains, events)
        self._prefix_ends = PrefixEnds(self.cache, groups, chains)
        self._promotions = Promotions(self.pool, self.tables, groups, block_size)
        self._tails = Tails(self.cache, chains, self.num_groups)
        self._allocations: dict[int, Allocation] = {}
        self.states: RequestStates | None = None
        """Snapshots of requests' recurrent states; ``None`` for models without states, and without
        prefix caching."""
        self.retention: Retention | None = None  # set before any request

    def keep_states(self, snapshot_blocks: int, interval: int = 0) -> None:
        """Set up the manager for a model with recurrent states, before any request. With prefix
        caching, copies of a request's states are kept in ``snapshot_blocks`` blocks each.
        ``interval``: as in ``RequestStates``."""
        if self.caching:
            snapshots = self._prefix_index.snapshots = Snapshots(self.pool, snapshot_blocks)
            self.states = RequestStates(
                snapshots, self._prefix_index, self._allocation, self.block_size, interval
            )

    def keep_tails(self, certain: Callable[[KVRequest], int]) -> None:
        """From now on, cache the last, partly filled blocks of preempted requests as well.
        ``certain``: returns how many of a request's first tokens have KV that steps in flight do
        not write any more."""
        self._tails.certain = certain if self.caching else None

    # -- queries

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, including the null block."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Number of free blocks; some may have cached content, which is lost when they are
        taken."""
        return self.pool.num_free

    @property
    def num_pinned(self) -> int:
        """Number of free blocks that a cache policy has pinned; they are taken last."""
        return 0 if self.retention is None else self.retention.pool.num_pinned

    @property
    def num_usable(self) -> int:
        """Number of blocks that a request can have if no other request holds any."""
        return self.pool.num_blocks - 1

    @property
    def num_used(self) -> list[int]:
        """Blocks in use in each group of layers. A block that several requests share counts
        once."""
        return self.tables.num_used

    @property
    def usage(self) -> float:
        """Fraction (0 to 1) of the pool's blocks that requests and loads hold."""
        return 1.0 - self.pool.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of ``num_tokens`` tokens holds at any time."""
        return sum(group.bound(self._entries(num_tokens)) for group in self.groups)

    def whole_blocks_for(self, num_tokens: int) -> int:
        """The blocks for all of ``num_tokens`` tokens at once, even outside sliding windows."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def held(self, req: KVRequest, group: int = 0) -> list[int]:
        """The request's block table in one group; entries outside a sliding window are 0."""
        return allocation.tables[group] if (allocation := self._found(req)) else []

    def num_adopted(self, req: KVRequest) -> int:
        """How many of the request's first KV blocks came from the prefix cache."""
        return allocation.num_adopted if (allocation := self._found(req)) else 0

    def prefix_end(self, req: KVRequest) -> PrefixEnd:
        """Why the prefix cache supplied no more of the request's first KV blocks."""
        if (allocation := self._found(req)) is None:
            return WHOLE
        if allocation.prefix_end is None:
            allocation.prefix_end = self._end_of(req, allocation)
        return allocation.prefix_end

    def lookup(self, req: KVRequest) -> PrefixHit:
        """The longest cached prefix of the request, without its last token, which is always
        computed."""
        return self._hit(req, self._allocation(req))

    def cached_prefix(self, req: KVRequest) -> int:
        """Number of the request's leading tokens in full blocks that are in the prefix cache."""
        return len(self.lookup(req).blocks) * self.block_size

    def cached_prefixes(
        self,
        rows: NDArray[np.intp],
        arrivals: NDArray[np.int64],
        known: NDArray[np.int64],
        requests: Callable[[NDArray[np.intp]], Sequence[KVRequest]],
    ) -> NDArray[np.int64]:
        """Numbers of leading tokens in the prefix cache, for requests given by batch row, arrival
        number and number of tokens (``known``). ``requests`` returns the requests of given rows; it
        is called for rows whose result may have changed since the last call."""
        if self.groups != (FULL,) or not self.caching:
            return np.array([self.cached_prefix(req) for req in requests(rows)], dtype=np.int64)
        watch = self.cache.watch
        if watch is None:
            watch = self.cache.watch = PrefixWatch()
        for req in requests(rows[watch.stale(rows, arrivals, known)]):
            hit, num_known = self.cached_prefix(req), len(req.tokens)
            watch.remember(req.row, req.arrival, num_known, hit)
            if req.reads_cache:
                num_blocks = (num_known - 1) // self.block_size
                chain = self._allocation(req).chain[:num_blocks]
                watch.watch_prefix(req.row, chain, hit // self.block_size)
        return watch.tokens[rows]

    def ready(self, req: KVRequest) -> int:
        """Leading tokens that need not be computed when the request is scheduled next: those taken
        from the cache; without blocks yet, its prefix hit."""
        allocation = self._allocation(req)
        if allocation.blocks:
            return allocation.num_ready
        return self._hit(req, allocation).num_tokens

    def missing(self, req: KVRequest, upto: int) -> int:
        """Free blocks that the request needs to compute all positions below ``upto``, in several
        steps if blocks leave a sliding window."""
        wanted = self._wanted(req, upto)
        if not self.tables.windows:
            return wanted
        allocation = self._allocation(req)
        tables = allocation.tables if allocation.blocks else self.lookup(req).tables
        kept = self.tables.num_kept(tables, _first_query(req))
        return min(wanted, max(0, self.blocks_for(upto) - kept))

    def fits(
        self, req: KVRequest, upto: int, freeing: Sequence[KVRequest] = (), *, spared: int = 0
    ) -> bool:
        """True if ``reserve`` would succeed once the requests in ``freeing`` were released, and
        would leave ``spared`` blocks free."""
        free = self.pool.num_free - spared
        if freeing:
            keep = [] if self.held(req) else self.lookup(req).tables
            free += self.tables.num_exclusive([self._allocation(other) for other in freeing], keep)
        return self._wanted(req, upto) <= free

    def room(self, req: KVRequest) -> int:
        """The largest ``upto`` for which ``reserve`` would succeed now, for a request that already
        has blocks."""
        allocation, free = self._allocation(req), self.pool.num_free
        if self.tables.windows:
            free += self.tables.num_outside(allocation, _first_query(req))
        return (len(allocation.blocks) + free // self.num_groups) * self.block_size

    def peak(self, reqs: Sequence[KVRequest], remaining: Callable[[Any], int]) -> int:
        """The most blocks that these requests hold together at any time, if each generates
        ``remaining(req)`` more tokens and then ends."""
        lengths = [len(req.tokens) for req in reqs]
        entries = peak_blocks(lengths, [remaining(req) for req in reqs], self.block_size)
        return sum(
            min(entries, group.max_blocks * len(reqs)) if group.max_blocks else entries
            for group in self.groups
        )

    # -- changes

    def set_time(self, now: float) -> None:
        """Set the time, in seconds, that is recorded for blocks evicted from now on."""
        self.cache.evictions.now = now
        if self.retention is not None:
            self.retention.pool.expire()

    def reserve(self, req: KVRequest, upto: int) -> bool:
        """Allocate KV blocks for positions [0, upto) of a request. If it has none yet, it first
        adopts those of its prefix hit.

        Returns False, and changes nothing, if too few blocks are free."""
        if self._wanted(req, upto) > self.pool.num_free:
            return False
        allocation = self._allocation(req)
        if not allocation.blocks:
            self._adopt(req, allocation)
        elif self.tables.windows:
            self.tables.trim(req.row, allocation, _first_query(req))
        wanted = self._entries(upto) - len(allocation.blocks)
        if wanted > 0:
            self.tables.extend(allocation, wanted)
        self.num_held[req.row] = len(allocation.blocks)
        self.tables.queue_new(req.row, allocation)
        return True

    def reserve_next(self, rows: Sequence[int]) -> None:
        """Allocate the next KV block for each of these batch rows; their requests decode and have
        filled their last block. Enough blocks must be free."""
        allocations = [self._allocations[row] for row in rows]
        if self.tables.windows:
            for row, allocation in zip(rows, allocations, strict=True):
                self.tables.trim(row, allocation, len(allocation.blocks) * self.block_size)
        self.tables.extend_each(rows, allocations)
        self.num_held[rows] += 1

    def trim(self, req: KVRequest) -> None:
        """Release the request's blocks that have left their windows, between two plans. ``reserve``
        does so too, but not before a decoding request needs its next block."""
        if self.tables.windows and (allocation := self._found(req)) is not None:
            self.tables.trim_between_plans(req.row, allocation, _first_query(req))

    def outside_keys(self, req: KVRequest) -> list[bytes]:
        """Keys of blocks that a request without blocks could use if they were in the pool."""
        if not (self.caching and req.reads_cache):
            return []
        hashes, first = self._prefix_of(req), len(self.lookup(req).blocks)
        keys = self._promotions.keys_of(hashes, first, self._prefix_index.snapshots)
        tail = self._tails.wanted(req, self._allocation(req))
        return keys + [key for key in (tail.keys if tail else ()) if self.cache.find(key) is None]

    def cached_blocks(self, req: KVRequest) -> tuple[list[bytes], list[int]]:
        """The keys and blocks of all that the pool has of a request's prefix, as far as this was
        searched before."""
        chain = [] if (allocation := self._found(req)) is None else allocation.chain
        return self._promotions.cached(chain, self._prefix_index.snapshots)

    def wanted(self, req: KVRequest, outside: Container[bytes], upto: int | None = None) -> Wanted:
        """What to load for a request. ``outside``: keys of blocks with copies outside the pool;
        ``upto``: the most tokens that the request's prefix hit may have afterwards."""
        hashes, tail = self._prefix_of(req), self._tails.wanted(req, self._allocation(req))
        if upto is not None:
            hashes = hashes[: upto // self.block_size]
            tail = None if tail is None or tail.num_tokens > upto else tail
        return self._promotions.wanted(hashes, outside, self._prefix_index.snapshots, tail)

    @property
    def promotions(self) -> Sequence[Promotion]:
        """The loads into free blocks that are in progress."""
        return self._promotions.begun

    def can_promote(self, wanted: Wanted) -> bool:
        """True if enough blocks are free for ``promote``."""
        return self._promotions.fits(wanted)

    def promote(self, wanted: Wanted) -> Promotion:
        """Take free blocks to load into, until ``promoted``. No step in flight may write them after
        the next plan's step has begun."""
        return self._promotions.begin(wanted)

    def promoted(self, promotion: Promotion, is_good: Sequence[bool]) -> None:
        """Publish the blocks that have been loaded. They are held until ``end_promotion``."""
        self._promotions.publish(promotion, is_good, self._prefix_index.snapshots)

    def end_promotion(self, promotion: Promotion) -> None:
        """Free the blocks of a promotion; those that were published stay cached."""
        self._promotions.end(promotion)

    def withhold(self, req: KVRequest, withheld: Withheld) -> None:
        """Until the request ends, call ``withheld`` for each key and block that it publishes. These
        are not to be copied outside the pool."""
        self._prefix_index.withheld[req.arrival] = withheld

    def is_content(self, key: bytes) -> bool:
        """False for the key of a block that is reserved for a snapshot."""
        return self._prefix_index.snapshots is None or not is_reserved(key)

    def commit(self, req: KVRequest, upto: int) -> None:
        """Put the request's full blocks below position ``upto`` into the prefix cache. Their KV
        must have been written."""
        full = upto // self.block_size
        row = req.row
        first = int(self.num_published[row])
        if full <= first:
            return
        self.num_published[row] = full
        if self.caching:
            self._prefix_index.publish(req, self._allocations[row], first, full)

    def commit_next(self, reqs: Sequence[KVRequest]) -> None:
        """Put the next full block of each of these requests into the prefix cache."""
        rows = [req.row for req in reqs]
        nth = self.num_published[rows].tolist()
        self.num_published[rows] += 1
        if self.caching:
            self._prefix_index.publish_next(reqs, [self._allocations[row] for row in rows], nth)

    def revoke(self, req: KVRequest, start: int, others: Iterable[KVRequest]) -> list[int]:
        """Remove from the prefix cache all KV that ``req`` wrote from position ``start`` on, and
        all KV computed from it. Returns the batch rows of the ``others`` that may have adopted such
        KV."""
        first = start // self.block_size
        if self.held(req):
            first = min(first, self.num_adopted(req))
        self._tails.drop(self._found(req), start)
        bad = self._hashes(req)[first : first + 1]
        adopted = []
        for other in others:
            hashes = self._hashes(other)
            if not bad or hashes[first : first + 1] != bad:
                continue
            self._prefix_index.withdraw(hashes[first:])
            self._tails.drop(self._found(other))
            if self.num_adopted(other) > first or not self.held(other):
                adopted.append(other.row)
        return adopted

    def release(self, req: KVRequest) -> None:
        """Release all blocks of a request that may run again. Its block hashes are kept until
        ``finish``."""
        allocation = self._found(req)
        if allocation is None:
            return
        if self._keeps_tail_of(req):
            self._tails.publish(req, allocation)
        self._give_back(req, allocation)
        allocation.clear()
        self.num_held[req.row] = self.num_published[req.row] = 0

    def finish(self, req: KVRequest) -> None:
        """Release the blocks of a request that has ended."""
        self._prefix_index.withheld.pop(req.arrival, None)
        allocation = self._allocations.get(req.row) or self._empty(req)
        self._give_back(req, allocation, has_ended=True)
        self._allocations.pop(req.row, None)
        self.num_held[req.row] = self.num_published[req.row] = 0

    def forget_prefix(self, req: KVRequest) -> None:
        """Forget the block hashes of a request that holds no blocks, because its adapter, salt or
        media have changed."""
        assert not self.held(req), f"{req}: its blocks have the hashes"
        self._allocations.pop(req.row, None)
        if self.cache.watch is not None:
            self.cache.watch.forget(req.row)

    def count_lookup(self, req: KVRequest, num_hit: int, *, preempted: bool) -> None:
        """Count the prefix lookup of one admitted request, which found ``num_hit`` tokens.
        ``preempted``: the request is readmitted after a preemption."""
        if not self.caching:
            return
        num_known = len(req.tokens)
        self.counts.add(num_known, num_hit, preempted=preempted)
        if not preempted and (reason := self.prefix_end(req).reason):
            missed = (num_known - 1) // self.block_size * self.block_size - num_hit
            self.counts.missed[reason] = self.counts.missed.get(reason, 0) + missed

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while requests hold blocks.
        Promotions in progress publish nothing."""
        if self.pool.num_free + self._promotions.num_held != self.num_usable:
            return False
        self._promotions.void()
        self._prefix_index.clear()
        if self.retention is not None:
            self.retention.pool.forget_all()
        self.counts.num_resets += 1
        return True

    def follow_cache(self) -> CacheChanges | None:
        """Begin to collect what enters and leaves the prefix cache; ``None`` without caching."""
        return self._prefix_index.follow() if self.caching else None

    def drain(self, *, is_launched: bool = True) -> Deltas:
        """Return the changes of block tables since the last call, and publish new cache events.
        ``is_launched``: as in ``BlockTables.drain``."""
        if self._prefix_index.events is not None:
            self._prefix_index.events.flush()
        return self.tables.drain(is_launched=is_launched)

    def ensure_rows(self, num_rows: int) -> None:
        """Extend the arrays that have an entry per batch row to at least ``num_rows`` entries."""
        if missing := max(0, num_rows - len(self.num_held)):
            more = np.zeros(missing, dtype=np.int32)
            self.num_held = np.concatenate([self.num_held, more])
            self.num_published = np.concatenate([self.num_published, more])

    def shutdown(self) -> None:
        """Close the publisher of cache events."""
        if self._prefix_index.events is not None:
            self._prefix_index.events.close()

    # -- helpers

    def _entries(self, num_tokens: int) -> int:
        """Number of entries in each block table for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def _give_back(
        self, req: KVRequest, allocation: Allocation, *, has_ended: bool = False
    ) -> None:
        """Give back a request's blocks."""
        keep = None
        if self.retention is not None and allocation.blocks:
            keep = self.retention.wish(req, has_ended)
        self.tables.release(allocation)
        if self.states is not None:
            self.states.release(allocation)
        if self.retention is not None and keep is not None:
            snapshots = [] if self.states is None else self.states.blocks_of(allocation)
            # Snapshots first, which are taken last: the blocks could not be used without them.
            self.retention.pool.keep([*snapshots, *live_blocks(allocation.tables)], keep)

    def _keeps_tail_of(self, req: KVRequest) -> bool:
        """False if the request takes no prefix hits, or lets nothing be copied, or could not start
        after its tail for lack of states."""
        is_withheld = req.arrival in self._prefix_index.withheld
        return self.states is None and req.reads_cache and not is_withheld

    def _empty(self, req: KVRequest) -> Allocation:
        return Allocation([[] for _ in self.groups], req.arrival)

    def _found(self, req: KVRequest) -> Allocation | None:
        """The request's allocation; ``None`` if it holds nothing, or if its batch row belongs to
        another request now."""
        allocation = self._allocations.get(req.row)
        return allocation if allocation is not None and allocation.arrival == req.arrival else None

    def _allocation(self, req: KVRequest) -> Allocation:
        """The request's allocation, or a new, empty one. A new one is not stored if another
        request has the batch row now."""
        allocation = self._found(req)
        if allocation is None:
            allocation = self._empty(req)
            if not self.num_held[req.row]:  # else the row was reused
                self._allocations[req.row] = allocation
        return allocation

    def _wanted(self, req: KVRequest, upto: int) -> int:
        """Number of blocks that ``reserve`` takes from the free list, less those that it first
        returns."""
        entries = self._entries(upto)
        allocation = self._allocation(req)
        if allocation.blocks:
            wanted = (entries - len(allocation.blocks)) * self.num_groups
            if self.tables.windows:
                wanted -= self.tables.num_outside(allocation, _first_query(req))
            return max(0, wanted)
        hit, refs = self._hit(req, allocation), self.pool.num_refs
        tables = [*hit.tables, hit.tail]
        revived = sum([[refs[block] for block in table if block].count(0) for table in tables])
        return (entries - len(hit.blocks)) * self.num_groups - len(hit.tail) + revived

    def _prefix_of(self, req: KVRequest) -> list[bytes]:
        """The hashes of the blocks that the request could adopt."""
        num_blocks = (len(req.tokens) - 1) // self.block_size
        self.lookup(req)  # which computes the hashes
        return self._allocation(req).chain[:num_blocks]

    def _hashes(self, req: KVRequest) -> list[bytes]:
        return self._prefix_index.hashes(req, self._found(req))

    def _hit(self, req: KVRequest, allocation: Allocation) -> PrefixHit:
        """The request's prefix hit. Cached until the prefix cache or the request's tokens
        change."""
        hit, known, version = allocation.hit, len(req.tokens), self.cache.version
        if hit is None or allocation.hit_version != version or allocation.hit_known != known:
            hit = allocation.hit = self._search(req, allocation)
            allocation.hit_known = known
            allocation.hit_version = version
            allocation.hit_losses = self.cache.num_losses
        return hit

    def _search(self, req: KVRequest, allocation: Allocation) -> PrefixHit:
        """Search the request's prefix hit in the cache."""
        if not req.reads_cache:
            return PrefixHit(0, self._empty(req).tables)
        num_blocks = (len(req.tokens) - 1) // self.block_size if self.caching else 0
        tables = self._prefix_index.find(req, allocation, num_blocks)
        if self.states is not None:
            return self._prefix_index.until_snapshot(allocation, tables)
        if allocation.tail is not None and (
            tail := self._tails.find(req, allocation, len(tables[0]))
        ):
            return PrefixHit(allocation.tail.num_tokens, tables, tail=tail)
        return PrefixHit(len(tables[0]) * self.block_size, tables)

    def _adopt(self, req: KVRequest, allocation: Allocation) -> None:
        """Begin the request's block tables with the blocks of its prefix hit."""
        hit = self._hit(req, allocation)
        self.tables.adopt(allocation, hit.tables)
        if hit.tail:
            self.tables.take_over(allocation, hit.tail)
        allocation.tail = None
        allocation.num_adopted = self.num_published[req.row] = len(hit.blocks)
        allocation.num_found, allocation.num_ready = allocation.num_adopted, hit.num_tokens
        if self.states is not None:
            self.states.adopt(allocation, hit)
        # Otherwise the explanation is needed at once: the request may evict blocks that it depends
        # on, or its hashes must be remembered for later requests.
        is_lazy = self.num_groups == 1 and is_bare(req)
        allocation.prefix_end = None if is_lazy else self._end_of(req, allocation)
        allocation.hit = None

    def _end_of(self, req: KVRequest, allocation: Allocation) -> PrefixEnd:
        """Why the request's prefix hit is not longer."""
        num_blocks = (len(req.tokens) - 1) // self.block_size
        num_found = allocation.num_found
        if not num_blocks:
            return WHOLE
        if not self.caching:
            return PrefixEnd(CACHING_OFF) if num_found < num_blocks else WHOLE
        if not req.reads_cache:
            return PrefixEnd(NOT_READ)
        if allocation.states is not None and allocation.states.num_beyond:
            return PrefixEnd(NO_SNAPSHOT)
        return self._prefix_ends.explain(req, allocation.chain, num_found, num_blocks)


def _first_query(req: KVRequest) -> int:
    """The lowest position that the request may compute next, even if steps are rolled back."""
    return min(req.num_computed, len(req.tokens))
