"""KVManager: which request holds which blocks, and which of them others may share.

block_pool     which block holds which content; free list, reference counts
tables         what each request holds; grows, trims and tells the worker
prefix_index   hashes sequences; finds, publishes and withdraws content
transfers      loads and loans, if there is a source of KV from elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.kv.block_pool import BlockPool, CacheCounts, live_blocks
from engine.kv.connector import KVSource
from engine.kv.events import EventLog
from engine.kv.prefix_index import BlockHasher, PrefixIndex, Sha256Hasher
from engine.kv.prefix_watch import PrefixWatch
from engine.kv.tables import (
    FULL,
    BlockTables,
    Deltas,
    Group,
    Holder,
    PrefixHit,
    RequestBlocks,
    peak_blocks,
)
from engine.kv.transfers import Loan, Transfers


class KVManager:
    """The only writer of block tables and reference counts.

    Positions are absolute: ``upto`` means the positions [0, upto). Questions (``lookup``, ``fits``,
    ``missing``) change nothing; ``reserve`` gets everything or nothing. Blocks are counted over all
    groups; one table entry takes a block in each.
    ``num_held`` and ``num_published`` (entries per row) are columns for the scheduler's vectors.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        groups: Sequence[Group] = (FULL,),
        source: KVSource | None = None,
        events: EventLog | None = None,
    ) -> None:
        windows = [group.window for group in groups]
        if source is not None and windows != [0]:
            raise ConfigError(
                f"a KV source needs full attention (windows [0]), this model has {windows}"
            )
        self.block_size = block_size
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)  # blocks that one more table entry takes
        self.caching = enable_prefix_caching
        self.counts = CacheCounts()
        self.pool = BlockPool(num_blocks)
        self.cache = self.pool.cache
        self.tables = BlockTables(self.pool, groups, block_size)
        self.transfers = None if source is None else Transfers(self.pool, source)
        self.num_held: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self.num_published: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self._prefix_index = PrefixIndex(
            self.cache, groups, hasher or Sha256Hasher(), block_size, events
        )
        self._holdings: dict[int, RequestBlocks] = {}

    # -- questions

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now; some may hold cached content."""
        return self.pool.num_free

    @property
    def num_usable(self) -> int:
        """Blocks that one request can have if it runs alone."""
        return self.pool.num_blocks - 1

    @property
    def source(self) -> KVSource | None:
        """Where KV can be had from that other engines computed."""
        return None if self.transfers is None else self.transfers.source

    @property
    def lent(self) -> Mapping[str, Loan]:
        """By request id, blocks of ended requests that transfers still use."""
        return {} if self.transfers is None else self.transfers.lent

    @property
    def usage(self) -> float:
        """Share of the pool held by requests and transfers, 0 to 1."""
        return 1.0 - self.pool.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks a request of this many tokens has at once."""
        return sum(group.bound(self._entries(num_tokens)) for group in self.groups)

    def held(self, req: Holder, group: int = 0) -> list[int]:
        """The request's table in one group, in order; entries out of its window are 0."""
        return holding.tables[group] if (holding := self._found(req)) else []

    def num_adopted(self, req: Holder) -> int:
        """Leading table entries of the request that came from the cache."""
        return holding.num_adopted if (holding := self._found(req)) else 0

    def is_loading(self, req: Holder) -> bool:
        """Does a transfer write into the request's blocks? Then they cannot be taken from it."""
        return (holding := self._found(req)) is not None and holding.loading

    def load_error(self, req: Holder) -> str:
        """The source's error instead of starting to load the request's KV; empty without one."""
        return holding.load_error if (holding := self._found(req)) else ""

    def lookup(self, req: Holder) -> PrefixHit:
        """The longest cached prefix; at most all but the last token, which must be computed."""
        return self._hit(req, self._holding(req))

    def cached_prefix(self, req: Holder) -> int:
        """Tokens of the request that are in the cache now, whether it holds blocks or not."""
        return self.lookup(req).num_tokens

    def cached_prefixes(
        self,
        rows: NDArray[np.intp],
        arrivals: NDArray[np.int64],
        known: NDArray[np.int64],
        requests: Callable[[NDArray[np.intp]], Sequence[Holder]],
    ) -> NDArray[np.int64]:
        """``cached_prefix`` of the requests in these rows, which have these numbers of arrival and
        this many tokens. Only those whose answer may have changed are looked up."""
        if self.groups != (FULL,) or self.transfers is not None or not self.caching:
            return np.array([self.cached_prefix(req) for req in requests(rows)], dtype=np.int64)
        watch = self.cache.watch
        if watch is None:
            watch = self.cache.watch = PrefixWatch()
        for req in requests(rows[watch.stale(rows, arrivals, known)]):
            hit, num_known = self.lookup(req), len(req.tokens)
            watch.note(req.row, req.arrival, num_known, hit.num_tokens)
            if req.reads_cache:
                num_blocks = (num_known - 1) // self.block_size
                chain = self._holding(req).chain[:num_blocks]
                watch.rest_on(req.row, chain, hit.num_tokens // self.block_size)
        return watch.tokens[rows]

    def ready(self, req: Holder) -> int:
        """Leading tokens whose KV the request need not compute when it is granted tokens next.

        Without blocks: its prefix hit, and what can be loaded within a step. Waiting with blocks:
        what it adopted or what was loaded.
        """
        holding = self._holding(req)
        if holding.blocks:
            return holding.num_ready
        hit = self._hit(req, holding)
        return hit.num_tokens + (0 if hit.asynchronous else hit.num_remote)

    def missing(self, req: Holder, upto: int) -> int:
        """Free blocks it would take to bring the request to positions [0, upto), step by step.

        Blocks that leave a window on the way are reused, so ``reserve`` in one go may take more.
        """
        wanted = self._wanted(req, upto)
        if not self.tables.windows:
            return wanted
        holding = self._holding(req)
        tables = holding.tables if holding.blocks else self.lookup(req).tables
        kept = self.tables.num_kept(tables, _first_query(req))
        return min(wanted, max(0, self.blocks_for(upto) - kept))

    def fits(
        self, req: Holder, upto: int, freeing: Sequence[Holder] = (), *, spared: int = 0
    ) -> bool:
        """Would ``reserve`` succeed once these were released, and leave this many blocks free?"""
        free = self.pool.num_free - spared
        if freeing:
            keep = [] if self.held(req) else self.lookup(req).tables
            free += self.tables.num_exclusive([self._holding(other) for other in freeing], keep)
        return self._wanted(req, upto) <= free

    def room(self, req: Holder) -> int:
        """The most positions [0, room) that a request with blocks can have now."""
        holding, free = self._holding(req), self.pool.num_free
        if self.tables.windows:
            free += self.tables.num_outside(holding, _first_query(req))
        return (len(holding.blocks) + free // self.num_groups) * self.block_size

    def peak(self, reqs: Sequence[Holder], remaining: Callable[[Any], int]) -> int:
        """Blocks these requests will hold at most if each gets this many more output tokens."""
        lengths = [len(req.tokens) for req in reqs]
        entries = peak_blocks(lengths, [remaining(req) for req in reqs], self.block_size)
        return sum(
            min(entries, group.max_blocks * len(reqs)) if group.max_blocks else entries
            for group in self.groups
        )

    # -- acts

    def reserve(self, req: Holder, upto: int) -> bool:
        """Own slots for the positions [0, upto); a request without blocks adopts its prefix hit.

        For a request that has, or now gets, a seat: the worker is notified of its blocks.
        """
        if not self.hold(req, upto):
            return False
        self.tables.tell(req.row, self._holdings[req.row])
        return True

    def reserve_next(self, rows: Sequence[int]) -> None:
        """One more entry for each of these rows, which decode after their last one.

        The caller has checked that enough blocks are free.
        """
        holdings = [self._holdings[row] for row in rows]
        if self.tables.windows:
            for row, holding in zip(rows, holdings, strict=True):
                self.tables.trim(row, holding, len(holding.blocks) * self.block_size)
        self.tables.extend_each(rows, holdings)
        self.num_held[rows] += 1

    def hold(self, req: Holder, upto: int) -> bool:
        """``reserve`` for a request that will wait: the worker is notified when it gets a seat.

        False, and it holds nothing, if a load within the step could not start. Then more tokens
        must be computed than the caller requested; ``ready`` gives the new start.
        """
        if self._wanted(req, upto) > self.pool.num_free:
            return False
        holding = self._holding(req)
        load_now = False
        if not holding.blocks:
            load_now = self._adopt(req, holding, upto)
        elif self.tables.windows:
            self.tables.trim(req.row, holding, _first_query(req))
        wanted = self._entries(upto) - len(holding.blocks)
        if wanted > 0:
            self.tables.extend(holding, wanted)
        self.num_held[req.row] = len(holding.blocks)
        if load_now:
            assert self.transfers is not None
            if not self.transfers.start(req, holding, self._blocks_to_load(req, holding)):
                self.release(req)
                return False
            holding.num_ready += holding.num_remote
        return True

    def start_load(self, req: Holder) -> None:
        """Fill what the request holds after its hit from elsewhere, as soon as no step in flight
        writes those blocks; ``loaded`` says it is done, ``take_failed_loads`` that it cannot be
        started."""
        assert self.transfers is not None
        holding = self._holdings[req.row]
        self.transfers.load(req, holding, self._blocks_to_load(req, holding))

    def loaded(self, req: Holder, upto: int) -> None:
        """The load is over and the positions before ``upto`` are filled; others may share them.

        If it has failed, only positions before ``upto`` are valid, and the rest will be computed.
        """
        holding = self._holdings[req.row]
        holding.loading = False
        holding.num_ready = min(upto, len(req.tokens) - 1)
        self.commit(req, holding.num_ready)

    def take_failed_loads(self) -> list[Holder]:
        """Requests whose load the source could not start, since the last call. They keep their
        blocks, and their ``ready`` is the local prefix hit."""
        return [] if self.transfers is None else self.transfers.take_failed()

    def step_planned(self) -> None:
        """A step that writes blocks is about to be launched (see ``Fences``)."""
        if self.transfers is not None:
            self.transfers.fences.planned()

    def step_settled(self) -> None:
        """The oldest of those steps is settled and writes no more."""
        if self.transfers is not None:
            self.transfers.fences.settled()

    def sent(self, request_id: str) -> bool:
        """A transfer from or to an ended request's blocks is over; False if none is known."""
        return self.transfers is not None and self.transfers.sent(request_id)

    def commit(self, req: Holder, upto: int) -> None:
        """The tokens before ``upto`` are known and written: their full blocks may be shared."""
        full = upto // self.block_size
        row = req.row
        first = int(self.num_published[row])
        if full <= first:
            return
        self.num_published[row] = full
        if self.caching:
            self._prefix_index.publish(req, self._holdings[row], first, full)

    def commit_next(self, reqs: Sequence[Holder]) -> None:
        """``commit`` of one more block for each of these."""
        rows = [req.row for req in reqs]
        nth = self.num_published[rows].tolist()
        self.num_published[rows] += 1
        if self.caching:
            self._prefix_index.publish_next(reqs, [self._holdings[row] for row in rows], nth)

    def revoke(self, req: Holder, start: int, others: Iterable[Holder]) -> list[int]:
        """Remove from the prefix cache what ``req`` wrote from position ``start`` on, and all that
        was computed from it. Returns the rows among ``others`` that adopted some of it, or may
        have done so before they gave their blocks back.

        Blocks are found by the hash of their content, as their writer may not hold them any more.
        """
        first = start // self.block_size
        if self.held(req):
            first = min(first, self.num_adopted(req))
        bad = self._hashes(req)[first : first + 1]
        adopted = []
        for other in others:
            hashes = self._hashes(other)
            if not bad or hashes[first : first + 1] != bad:
                continue
            self._prefix_index.withdraw(hashes[first:])
            if self.num_adopted(other) > first or not self.held(other):
                adopted.append(other.row)
        return adopted

    def release(self, req: Holder) -> None:
        """Give back all blocks; hashes of known tokens stay remembered until ``finish``."""
        holding = self._found(req)
        if holding is None:
            return
        assert not holding.loading, f"{req}: a transfer writes into its blocks"
        self._give_back(live_blocks(holding.tables))
        holding.clear()
        self.num_held[req.row] = self.num_published[req.row] = 0

    def finish(self, req: Holder) -> dict[str, Any] | None:
        """The request has ended: forget it, except for blocks that a transfer still uses.

        Returns the KV transfer parameters for its output, if any.
        """
        holding = self._holdings.pop(req.row, None) or self._empty(req)
        self.num_held[req.row] = self.num_published[req.row] = 0
        if self.transfers is not None:
            return self.transfers.end(req, holding)
        self._give_back(live_blocks(holding.tables))
        return None

    def count_lookup(self, num_tokens: int, num_hit: int, *, preempted: bool) -> None:
        """Statistics of one admission."""
        if self.caching:
            self.counts.add(num_tokens, num_hit, preempted=preempted)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Refused (False) while any block is held or lent."""
        if self.pool.num_free != self.num_usable:
            return False
        self._prefix_index.clear()
        self.counts.num_resets += 1
        return True

    def drain(self) -> Deltas:
        """Block-table entries since the last call: (row, index, block), and the group if there are
        several. Cache events since then go to the listener."""
        if self._prefix_index.events is not None:
            self._prefix_index.events.flush()
        return self.tables.drain()

    def ensure_rows(self, num_rows: int) -> None:
        """Columns for this many rows."""
        if missing := max(0, num_rows - len(self.num_held)):
            more = np.zeros(missing, dtype=np.int32)
            self.num_held = np.concatenate([self.num_held, more])
            self.num_published = np.concatenate([self.num_published, more])

    def shutdown(self) -> None:
        """Close the listener for cache events and the KV source."""
        if self._prefix_index.events is not None:
            self._prefix_index.events.close()
        if self.source is not None:
            self.source.shutdown()

    # -- helpers

    def _entries(self, num_tokens: int) -> int:
        """Table entries for this many tokens."""
        return -(-num_tokens // self.block_size)

    def _give_back(self, blocks: Sequence[int]) -> None:
        if self.transfers is None:
            self.pool.release(blocks)
        else:
            self.transfers.give_back(blocks)

    def _empty(self, req: Holder) -> RequestBlocks:
        return RequestBlocks([[] for _ in self.groups], req.arrival)

    def _found(self, req: Holder) -> RequestBlocks | None:
        """The holding of the request, if there is one."""
        holding = self._holdings.get(req.row)
        return holding if holding is not None and holding.arrival == req.arrival else None

    def _holding(self, req: Holder) -> RequestBlocks:
        """Like `_found`, but made if there is none; a finished request gets one that is not
        kept."""
        holding = self._found(req)
        if holding is None:
            holding = self._empty(req)
            if not self.num_held[req.row]:  # else the row was reused
                self._holdings[req.row] = holding
        return holding

    def _wanted(self, req: Holder, upto: int) -> int:
        """Free blocks that ``reserve`` takes, less those it gives back first."""
        entries = self._entries(upto)
        holding = self._holding(req)
        if holding.blocks:
            wanted = (entries - len(holding.blocks)) * self.num_groups
            if self.tables.windows:
                wanted -= self.tables.num_outside(holding, _first_query(req))
            return max(0, wanted)
        tables = self._hit(req, holding).tables
        refs = self.pool.num_refs
        revived = sum([[refs[block] for block in table if block].count(0) for table in tables])
        return (entries - len(tables[0])) * self.num_groups + revived

    def _hashes(self, req: Holder) -> list[bytes]:
        return self._prefix_index.hashes(req, self._found(req))

    def _hit(self, req: Holder, holding: RequestBlocks) -> PrefixHit:
        """The remembered hit, while it is still valid."""
        hit, known = holding.hit, len(req.tokens)
        if hit is None or holding.hit_version != self.cache.version or holding.hit_known != known:
            hit = holding.hit = self._search(req, holding)
            holding.hit_known = known
            holding.hit_version = self.cache.version
            holding.hit_losses = self.cache.num_losses
        return hit

    def _search(self, req: Holder, holding: RequestBlocks) -> PrefixHit:
        """Searches anew what ``lookup`` returns."""
        if not req.reads_cache:
            return PrefixHit(0, self._empty(req).tables)
        num_blocks = (len(req.tokens) - 1) // self.block_size if self.caching else 0
        tables = self._prefix_index.find(req, holding, num_blocks)
        num_tokens = len(tables[0]) * self.block_size
        old = holding.hit
        if holding.blocks:
            return PrefixHit(num_tokens, tables)
        if old is not None and old.num_tokens == num_tokens:
            return PrefixHit(num_tokens, tables, old.num_remote, old.asynchronous)
        if self.transfers is None:
            return PrefixHit(num_tokens, tables)
        return PrefixHit(num_tokens, tables, *self.transfers.match(req, holding, num_tokens))

    def _adopt(self, req: Holder, holding: RequestBlocks, upto: int) -> bool:
        """Put the request's hit at the start of its tables. True if a load must start now."""
        hit = self._hit(req, holding)
        self.tables.adopt(holding, hit.tables)
        holding.num_adopted = self.num_published[req.row] = len(hit.blocks)
        holding.num_ready = hit.num_tokens
        holding.num_remote = min(hit.num_remote, upto - hit.num_tokens)
        holding.hit = None
        return holding.num_remote > 0 and not hit.asynchronous

    def _blocks_to_load(self, req: Holder, holding: RequestBlocks) -> list[int]:
        """The blocks after the hit that a transfer fills."""
        first = holding.num_adopted
        blocks = holding.blocks[first : first + self._entries(holding.num_remote)]
        assert blocks, f"{req}: nothing to load"
        return blocks


def _first_query(req: Holder) -> int:
    """No query comes before this position: tokens in flight may still be dropped."""
    return min(req.num_computed, len(req.tokens))
