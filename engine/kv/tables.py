"""Block tables of requests, the state of their content, and groups of layers.

A group is a set of layers that need the same blocks, and a request has one block table per group.
All tables of a request have the same length. A layer with a sliding window reads only the last
tokens: table entries that no query reaches any more are set to the null block, and their blocks
are freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.config.kv_groups import NULL_BLOCK, Group
from engine.kv.block_pool import BlockPool, live_blocks
from engine.messages.requests import MediaItem


class KVRequest(Protocol):
    """The fields of a request that the KV manager reads. ``row`` is its index in the scheduler's
    table, which is reused after it ends; ``arrival`` is a number that no other request has."""

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


@dataclass(slots=True)
class PrefixHit:
    """The longest cached prefix of a sequence: ``num_tokens`` tokens in ``tables``, one per group.

    A KV source can load ``num_remote`` further tokens; if ``asynchronous``, the request must wait.
    """

    num_tokens: int
    tables: list[list[int]]
    num_remote: int = 0
    asynchronous: bool = False

    @property
    def blocks(self) -> list[int]:
        """The cached blocks of the first group."""
        return self.tables[0]


@dataclass(slots=True)
class Allocation:
    """The blocks of one request and the state of their content.

    ``tables`` has one block table per group, all of the same length.
    """

    tables: list[list[int]]
    arrival: int  # identifies the request: its row may have been reused since
    chain: list[bytes] = field(default_factory=list)  # hash of each full block of known tokens
    num_adopted: int = 0  # leading entries that came from the cache
    num_ready: int = 0  # leading tokens with valid KV when the blocks were allocated
    num_remote: int = 0  # tokens after the adopted ones that a transfer loads or has loaded
    num_sent: int = 0  # leading entries that have been sent to the worker
    loading: bool = False  # a transfer writes into the blocks, or waits to start
    load_error: str = ""  # why the source could not start the load; never cleared
    hit: PrefixHit | None = None  # result of the last lookup
    hit_known: int = -1  # number of tokens of the request at that lookup
    hit_version: int = -1  # ``PrefixCache.version`` at that lookup
    hit_losses: int = -1  # ``PrefixCache.num_losses`` at that lookup

    @property
    def blocks(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0]

    def clear(self) -> None:
        """Reset everything but the block hashes, after the blocks were given back."""
        self.tables = [[] for _ in self.tables]
        self.num_adopted = self.num_ready = self.num_remote = self.num_sent = 0
        self.loading = False
        self.hit = None


class Deltas(NamedTuple):
    """Changed entries of block tables, one per index of these columns: the request's row, the index
    in its table, the new block, the group. ``groups`` is empty if there is only one group."""

    rows: array[int]
    indices: array[int]
    blocks: array[int]
    groups: array[int]


def no_deltas() -> Deltas:
    return Deltas(array("i"), array("i"), array("i"), array("i"))


class BlockTables:
    """Moves blocks between the pool and the tables of requests. An entry always changes in the
    tables of all groups."""

    def __init__(self, pool: BlockPool, groups: Sequence[Group], block_size: int) -> None:
        self.num_groups = len(groups)
        self.windows = [(g, group) for g, group in enumerate(groups) if group.window]
        self._pool = pool
        self._block_size = block_size
        self._deltas = no_deltas()
        self._ascending = array("i")  # 0, 1, 2, ...; grows to the longest table

    def adopt(self, allocation: Allocation, tables: Sequence[Sequence[int]]) -> None:
        """Start the request's tables with these cached blocks."""
        for table in tables:
            self._pool.adopt([block for block in table if block != NULL_BLOCK])
        allocation.tables = [list(table) for table in tables]

    def extend(self, allocation: Allocation, num_entries: int) -> None:
        """Add ``num_entries`` entries; the caller has checked that enough blocks are free."""
        taken = self._pool.take(num_entries * self.num_groups)
        for g, table in enumerate(allocation.tables):
            table += taken[g * num_entries : (g + 1) * num_entries]

    def extend_each(self, rows: Sequence[int], allocations: Sequence[Allocation]) -> None:
        """Add one entry to the table of each row, and queue it for the worker."""
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

    def queue_new(self, row: int, allocation: Allocation) -> None:
        """Queue the entries that have not been sent to the worker yet."""
        sent = allocation.num_sent
        for g, table in enumerate(allocation.tables):
            self._add(row, self._places(sent, len(table)), table[sent:], g)
        allocation.num_sent = len(allocation.blocks)

    def drain(self) -> Deltas:
        """Take the changed entries, to be sent to the worker."""
        deltas = self._deltas
        if deltas.rows:
            self._deltas = no_deltas()
        return deltas

    def num_outside(self, allocation: Allocation, position: int) -> int:
        """Number of blocks that ``trim`` would free."""
        refs = self._pool.num_refs
        return sum(
            refs[allocation.tables[g][index]] == 1
            for g, group in self.windows
            for index in group.outside(allocation.tables[g], position, self._block_size)
        )

    def num_kept(self, tables: Sequence[Sequence[int]], position: int) -> int:
        """Number of held blocks in ``tables`` that queries at ``position`` or later may read."""
        refs = self._pool.num_refs
        kept = sum(refs[block] > 0 for table in tables for block in table if block)
        return kept - sum(
            len(group.outside(tables[g], position, self._block_size)) for g, group in self.windows
        )

    def trim(self, row: int, allocation: Allocation, position: int) -> None:
        """Give back the blocks that no query at ``position`` or later reads."""
        for g, group in self.windows:
            table = allocation.tables[g]
            outside = group.outside(table, position, self._block_size)
            self._pool.release([table[index] for index in outside])
            for index in outside:
                table[index] = NULL_BLOCK
                if index < allocation.num_sent:
                    self._add(row, self._places(index, index + 1), [NULL_BLOCK], g)

    def num_exclusive(
        self, allocations: Sequence[Allocation], keep: Sequence[Sequence[int]]
    ) -> int:
        """Number of blocks that only these requests hold. Blocks in ``keep`` are not counted."""
        lost: dict[int, int] = {}
        for allocation in allocations:
            for block in live_blocks(allocation.tables):
                lost[block] = lost.get(block, 0) + 1
        refs = self._pool.num_refs
        kept = sum(lost.get(block) == refs[block] for table in keep for block in table)
        return sum(refs[block] == count for block, count in lost.items()) - kept

    def _places(self, start: int, upto: int) -> array[int]:
        """The numbers from ``start`` to ``upto`` - 1. They are copied from a longer array, which is
        faster than counting."""
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
    """The peak of future memory, computed as in Past-Future (Gong et al. 2025), but in blocks
    instead of tokens.

    Memory grows until a request ends, so the peak is just before some request ends. With requests
    sorted by ``remaining`` output tokens, most first, requests 0..i are still running in the last
    step of request i, and each has its present tokens and ``remaining[i] - 1`` more in the cache. A
    shared block is counted once for each request that holds it.

    ceil((known + more) / size) depends only on quotient and residue of ``known`` modulo size, so
    counting residues is enough: O(n * block_size) instead of O(n * n).
    """
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
