"""Block tables of requests, which list the KV cache blocks of their tokens.

A group is a set of layers that share a block table, so a request has one table per group, all of
the same length. With a sliding window, blocks that no later query reads are freed, and their table
entries become the null block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.config.kv_groups import NULL_BLOCK, Group
from engine.kv.block_pool import BlockPool, live_blocks
from engine.kv.snapshots import StateMarks
from engine.messages.requests import MediaItem


class KVRequest(Protocol):
    """The fields of a request that the KV cache manager reads. ``row``: index in the scheduler's
    table, reused after the request ends; ``arrival``: a number that no other request has."""

    row: int
    arrival: int
    tokens: array[int]  # prompt and output
    reads_cache: bool
    cache_salt: str | None

    @property
    def request_id(self) -> str: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def media(self) -> Sequence[MediaItem]: ...

    @property
    def num_computed(self) -> int: ...


class PrefixEnd(NamedTuple):
    """Why a cached prefix is not longer. ``reason`` is empty if every full block was found;
    ``age``: seconds since the first missing block was evicted, None if it was not evicted."""

    reason: str = ""
    age: float | None = None


WHOLE = PrefixEnd()


class Tail(NamedTuple):
    """The last, partly filled block of a preempted request: how many of the request's tokens end
    with it, and its key in each group of layers."""

    num_tokens: int
    keys: list[bytes]


@dataclass(slots=True)
class PrefixHit:
    """The longest cached prefix of a request: ``num_tokens`` tokens, and a block table per group.

    ``tail``: the blocks of its tail, one per group, that follow those in the tables.
    ``snapshot``: blocks with the model's states after these tokens, if it has states.
    ``num_beyond``: later tokens whose KV is cached, but after which no snapshot is.
    """

    num_tokens: int
    tables: list[list[int]]
    snapshot: Sequence[int] = ()
    num_beyond: int = 0
    tail: Sequence[int] = ()

    @property
    def blocks(self) -> list[int]:
        """The full cached blocks of the first group."""
        return self.tables[0]


@dataclass(slots=True)
class Allocation:
    """The KV cache blocks of one request.

    ``tables``: one block table per group, all of the same length.
    """

    tables: list[list[int]]
    arrival: int  # identifies the request: its row may have been reused since
    chain: list[bytes] = field(default_factory=list)  # hash of each full block of known tokens
    num_adopted: int = 0  # leading entries that came from the cache
    num_ready: int = 0  # leading tokens with valid KV when the blocks were allocated
    num_sent: int = 0  # leading entries that have been sent to the worker
    num_found: int = 0  # entries that came from the cache when it last got blocks
    prefix_end: PrefixEnd | None = WHOLE  # why no more were found; None: not explained yet
    unsent_nulls: list[tuple[int, int]] = field(default_factory=list)  # (group, index) of entries
    states: StateMarks | None = None  # snapshots of its states, if the model has states
    tail: Tail | None = None  # what it had in its last block when it was preempted
    hit: PrefixHit | None = None  # result of the last lookup
    hit_known: int = -1  # number of tokens of the request at that lookup
    hit_version: int = -1  # ``PrefixCache.version`` at that lookup
    hit_losses: int = -1  # ``PrefixCache.num_losses`` at that lookup

    @property
    def blocks(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0]

    def clear(self) -> None:
        """Empty the request's block tables, after their blocks were returned to the pool."""
        self.tables = [[] for _ in self.tables]
        self.num_adopted = self.num_ready = self.num_sent = 0
        self.states = self.hit = None


class Deltas(NamedTuple):
    """Changed block table entries: in the table of the request in row ``rows[i]`` and of group
    ``groups[i]``, entry ``indices[i]`` is now ``blocks[i]``. Empty ``groups``: one group."""

    rows: array[int]
    indices: array[int]
    blocks: array[int]
    groups: array[int]


def no_deltas() -> Deltas:
    return Deltas(array("i"), array("i"), array("i"), array("i"))


class BlockTables:
    """Adds and frees blocks in requests' block tables, and records these changes for the worker."""

    def __init__(self, pool: BlockPool, groups: Sequence[Group], block_size: int) -> None:
        self.num_groups = len(groups)
        self.windows = [(g, group) for g, group in enumerate(groups) if group.window]
        self._num_used = [0] * len(groups)  # not counted for a single group
        self._pool = pool
        self._block_size = block_size
        self._deltas = no_deltas()
        self._trimmed: list[tuple[int, Allocation]] = []  # with ``unsent_nulls``, by row
        self._ascending = array("i")  # 0, 1, 2, ...; grows to the longest table

    @property
    def num_used(self) -> list[int]:
        """Blocks in use in each group. A block that several requests share counts once."""
        pool = self._pool
        return [*self._num_used] if self.num_groups > 1 else [pool.num_blocks - 1 - pool.num_free]

    def adopt(self, allocation: Allocation, tables: Sequence[Sequence[int]]) -> None:
        """Start a request's block tables with cached blocks. ``tables``: block ids per group."""
        self.hold([[block for block in table if block != NULL_BLOCK] for table in tables])
        allocation.tables = [list(table) for table in tables]

    def take_over(self, allocation: Allocation, tail: Sequence[int]) -> None:
        """Append a tail to a request's tables, one block to each. The request writes on into these
        blocks, so they leave the cache."""
        self.hold([[block] for block in tail])
        for table, block in zip(allocation.tables, tail, strict=True):
            table.append(block)
            self._pool.cache.rename(block, None)

    def hold(self, blocks: Sequence[Sequence[int]]) -> None:
        """Hold cached blocks, given for each group."""
        for g, each in enumerate(blocks):
            num_free = self._pool.num_free
            self._pool.adopt(each)
            self._num_used[g] += num_free - self._pool.num_free

    def let_go(self, blocks: Sequence[Sequence[int]]) -> None:
        """Give back blocks that ``hold`` was given."""
        for g, each in enumerate(blocks):
            self._release(g, each)

    def extend(self, allocation: Allocation, num_entries: int) -> None:
        """Append ``num_entries`` new blocks to each table. The pool must have enough of them."""
        taken = self._pool.take(num_entries * self.num_groups)
        for g, table in enumerate(allocation.tables):
            table += taken[g * num_entries : (g + 1) * num_entries]
            self._num_used[g] += num_entries

    def release(self, allocation: Allocation) -> None:
        """Give back all blocks in the request's tables."""
        if self.num_groups > 1:
            refs = self._pool.num_refs
            for g, table in enumerate(allocation.tables):
                self._num_used[g] -= [refs[block] for block in table].count(1)
        self._pool.release(live_blocks(allocation.tables))
        allocation.unsent_nulls = []

    def extend_each(self, rows: Sequence[int], allocations: Sequence[Allocation]) -> None:
        """Append a new block to each request's tables, and record these changes for the worker."""
        blocks = self._pool.take(len(rows) * self.num_groups)
        taken = iter(blocks)
        if self.num_groups == 1:  # most models: the hot path of decodes
            self._deltas.rows.fromlist(list(rows))
            self._deltas.indices.fromlist([len(allocation.tables[0]) for allocation in allocations])
            self._deltas.blocks.fromlist(blocks)
            for allocation, block in zip(allocations, taken, strict=True):
                allocation.tables[0].append(block)
                allocation.num_sent += 1
            return
        for row, allocation in zip(rows, allocations, strict=True):
            for table in allocation.tables:
                table.append(next(taken))
            self.queue_new(row, allocation)
        self._num_used = [num + len(rows) for num in self._num_used]

    def queue_new(self, row: int, allocation: Allocation) -> None:
        """Record for the worker a request's table entries that the worker has not received."""
        sent = allocation.num_sent
        for g, table in enumerate(allocation.tables):
            self._add(row, self._places(sent, len(table)), table[sent:], g)
        allocation.num_sent = len(allocation.blocks)

    def drain(self, *, is_launched: bool = True) -> Deltas:
        """Take the recorded changes of block tables, to send them to the worker. ``is_launched``:
        False for a plan of an idle step, which is not sent."""
        while is_launched and self._trimmed:
            row, allocation = self._trimmed.pop()
            self._queue_nulls(row, allocation)
        deltas = self._deltas
        if deltas.rows:
            self._deltas = no_deltas()
        return deltas

    def num_outside(self, allocation: Allocation, position: int) -> int:
        """Number of blocks that ``trim`` to this position would return to the pool."""
        refs = self._pool.num_refs
        return sum(
            refs[allocation.tables[g][index]] == 1
            for g, group in self.windows
            for index in group.outside(allocation.tables[g], position, self._block_size)
        )

    def num_kept(self, tables: Sequence[Sequence[int]], position: int) -> int:
        """Blocks in ``tables`` that requests use and queries from ``position`` on may read."""
        refs = self._pool.num_refs
        kept = sum(refs[block] > 0 for table in tables for block in table if block)
        return kept - sum(
            len(group.outside(tables[g], position, self._block_size)) for g, group in self.windows
        )

    def trim(self, row: int, allocation: Allocation, position: int) -> None:
        """Release the request's blocks that no query at ``position`` or later reads."""
        self._release_outside(allocation, position)
        self._queue_nulls(row, allocation)

    def trim_between_plans(self, row: int, allocation: Allocation, position: int) -> None:
        """``trim`` for a request that may lose all its blocks before the next plan, which then must
        not report its changed entries."""
        self._release_outside(allocation, position)
        self._trimmed.append((row, allocation))

    def num_exclusive(
        self, allocations: Sequence[Allocation], keep: Sequence[Sequence[int]]
    ) -> int:
        """Number of blocks that only these requests use, not counting those in ``keep``."""
        lost: dict[int, int] = {}
        for allocation in allocations:
            for block in live_blocks(allocation.tables):
                lost[block] = lost.get(block, 0) + 1
        refs = self._pool.num_refs
        kept = sum(lost.get(block) == refs[block] for table in keep for block in table)
        return sum(refs[block] == count for block, count in lost.items()) - kept

    def _release_outside(self, allocation: Allocation, position: int) -> None:
        """Release blocks as ``trim`` does, without recording changes for the worker."""
        for g, group in self.windows:
            table = allocation.tables[g]
            outside = group.outside(table, position, self._block_size)
            self._release(g, [table[index] for index in outside])
            for index in outside:
                table[index] = NULL_BLOCK
                if index < allocation.num_sent:
                    allocation.unsent_nulls.append((g, index))

    def _release(self, group: int, blocks: Sequence[int]) -> None:
        """Give back blocks of one group."""
        num_free = self._pool.num_free
        self._pool.release(blocks)
        self._num_used[group] -= self._pool.num_free - num_free

    def _queue_nulls(self, row: int, allocation: Allocation) -> None:
        """Record for the worker the request's entries that became null."""
        for g, index in allocation.unsent_nulls:
            self._add(row, self._places(index, index + 1), [NULL_BLOCK], g)
        allocation.unsent_nulls = []

    def _places(self, start: int, upto: int) -> array[int]:
        """The integers from ``start`` to ``upto`` - 1."""
        if len(self._ascending) < upto:
            self._ascending.extend(range(len(self._ascending), 2 * upto))
        return self._ascending[start:upto]

    def _add(self, row: int, places: array[int], blocks: list[int], group: int) -> None:
        deltas = self._deltas
        deltas.rows.extend(array("i", (row,)) * len(blocks))
        deltas.indices.extend(places)
        deltas.blocks.fromlist(blocks)
        if self.num_groups > 1:
            deltas.groups.extend(array("i", (group,)) * len(blocks))


def peak_blocks(num_tokens: Sequence[int], remaining: Sequence[int], block_size: int) -> int:
    """Estimate the most KV cache blocks that running requests will use at once, as in Past-Future
    (Gong et al. 2025).

    ``num_tokens``: present tokens of each request. ``remaining``: output tokens that each request
    will still generate. A shared block counts once per request.
    """
    # The peak is just before some request ends. With requests sorted by remaining tokens, most
    # first, requests 0..i run in the last step of request i.
    if not num_tokens:
        return 0
    known = np.asarray(num_tokens, dtype=np.int64)
    left = np.maximum(np.asarray(remaining, dtype=np.int64), 1)
    order = np.argsort(-left, kind="stable")
    known, more = known[order], left[order] - 1
    residues = np.arange(block_size)
    there = np.cumsum(known[:, None] % block_size == residues, axis=0)  # [n, block_size]
    ends = (residues + more[:, None] + block_size - 1) // block_size  # [n, block_size]
    return int((np.cumsum(known // block_size) + (there * ends).sum(axis=1)).max())
