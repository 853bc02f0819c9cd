"""What requests hold: block tables, what is known of their content, and the groups of layers.

A group is layers with the same need, and each has a block table of its own. All tables of a request
have the same length, so one number says how much it holds. A layer with a sliding window reads only
the last tokens: table entries that no query reaches any more become the null block, and what was in
them is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.kv.block_pool import NULL_BLOCK, BlockPool, live_blocks
from engine.messages.requests import MediaItem


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that read the same keys.

    ``window``: how many tokens a query sees, itself included; 0 is all of them. ``max_blocks``: the
    most entries a request has at once that are not null; 0 is no bound.
    """

    window: int = 0
    max_blocks: int = 0
    layers: tuple[int, ...] = ()

    def first_needed(self, position: int, block_size: int) -> int:
        """The first entry that queries from this position on read."""
        return max(0, position - self.window + 1) // block_size if self.window else 0

    def outside(self, table: Sequence[int], position: int, block_size: int) -> range:
        """Entries that queries from this position on do not read and that are not null yet."""
        before = first = min(self.first_needed(position, block_size), len(table))
        while first and table[first - 1] != NULL_BLOCK:
            first -= 1
        return range(first, before)

    def bound(self, num_blocks: int) -> int:
        """Blocks that this many entries take at once, at most."""
        return min(num_blocks, self.max_blocks) if self.max_blocks else num_blocks

    def longest(self, cached: Sequence[int | None], limit: int, block_size: int) -> int:
        """The most leading entries, up to ``limit``, that hold all keys of a query after them."""
        reach = -(-(self.window - 1) // block_size) if self.window else limit
        while limit:
            needed = range(max(0, limit - reach), limit)
            lost = next((index for index in reversed(needed) if cached[index] is None), None)
            if lost is None:
                break
            limit = lost
        return limit


FULL = Group()


class Holder(Protocol):
    """What the manager reads of a request. ``row`` is its index in the scheduler's table, which
    later ones have too; ``arrival`` is a number that no other request has."""

    row: int
    arrival: int
    tokens: array[int]  # known ones
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
    """The longest cached beginning of a sequence: ``num_tokens`` of it in ``tables``, one a group.

    ``num_remote`` tokens after it can be had from elsewhere; if ``asynchronous``, by waiting.
    """

    num_tokens: int
    tables: list[list[int]]
    num_remote: int = 0
    asynchronous: bool = False

    @property
    def blocks(self) -> list[int]:
        """The blocks in the first group."""
        return self.tables[0]


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of one request and what is known of their content.

    There is one table for each group, and all have as many entries.
    """

    tables: list[list[int]]
    arrival: int  # its request: the row may have been reused since
    chain: list[bytes] = field(default_factory=list)  # hash of each full block of known tokens
    num_adopted: int = 0  # leading entries that came from the cache
    num_ready: int = 0  # leading tokens whose KV was there when the blocks were got
    num_remote: int = 0  # tokens after the adopted ones that a transfer fills, or has filled
    num_sent: int = 0  # leading entries that the worker knows
    loading: bool = False  # a transfer writes into the blocks, or waits to begin
    load_error: str = ""  # error of the source, which did not start the load; it is kept
    hit: PrefixHit | None = None  # remembered answer of lookup
    hit_known: int = -1  # tokens known when it was found
    hit_version: int = -1  # of the cache at that time
    hit_losses: int = -1

    @property
    def blocks(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0]

    def clear(self) -> None:
        """The blocks were given back; hashes of known tokens stay valid."""
        self.tables = [[] for _ in self.tables]
        self.num_adopted = self.num_ready = self.num_remote = self.num_sent = 0
        self.loading = False
        self.hit = None


class Deltas(NamedTuple):
    """Changed table entries, as columns; ``groups`` is empty if there is one group."""

    rows: array[int]
    indices: array[int]
    blocks: array[int]
    groups: array[int]


def no_deltas() -> Deltas:
    return Deltas(array("i"), array("i"), array("i"), array("i"))


class BlockTables:
    """Moves blocks between the pool and the tables of requests, entry by entry in all groups."""

    def __init__(self, pool: BlockPool, groups: Sequence[Group], block_size: int) -> None:
        self.num_groups = len(groups)
        self.windows = [(g, group) for g, group in enumerate(groups) if group.window]
        self._pool = pool
        self._block_size = block_size
        self._deltas = no_deltas()
        self._ascending = array("i")  # 0, 1, 2, ...; grows to the longest table

    def adopt(self, holding: RequestBlocks, tables: Sequence[Sequence[int]]) -> None:
        """These cached blocks become the beginning of the request's tables."""
        for table in tables:
            self._pool.adopt([block for block in table if block != NULL_BLOCK])
        holding.tables = [list(table) for table in tables]

    def extend(self, holding: RequestBlocks, num_entries: int) -> None:
        """Take blocks for this many entries; the caller has checked that enough are free."""
        taken = self._pool.take(num_entries * self.num_groups)
        for g, table in enumerate(holding.tables):
            table += taken[g * num_entries : (g + 1) * num_entries]

    def extend_each(self, rows: Sequence[int], holdings: Sequence[RequestBlocks]) -> None:
        """One more entry for each of these requests, and the worker is notified."""
        blocks = self._pool.take(len(rows) * self.num_groups)
        taken = iter(blocks)
        if self.num_groups == 1:  # most models: the hot path of decodes
            self._deltas.rows.fromlist(list(rows))
            self._deltas.indices.fromlist([len(holding.tables[0]) for holding in holdings])
            self._deltas.blocks.fromlist(blocks)
            for holding, block in zip(holdings, taken, strict=True):
                holding.tables[0].append(block)
                holding.num_sent += 1
            return
        for row, holding in zip(rows, holdings, strict=True):
            for table in holding.tables:
                table.append(next(taken))
            self.tell(row, holding)

    def tell(self, row: int, holding: RequestBlocks) -> None:
        """Queue the entries that the worker does not know yet."""
        sent = holding.num_sent
        for g, table in enumerate(holding.tables):
            self._add(row, self._places(sent, len(table)), table[sent:], g)
        holding.num_sent = len(holding.blocks)

    def drain(self) -> Deltas:
        """Changed entries that the worker must be sent."""
        deltas = self._deltas
        if deltas.rows:
            self._deltas = no_deltas()
        return deltas

    def num_outside(self, holding: RequestBlocks, position: int) -> int:
        """Blocks that ``trim`` would free."""
        refs = self._pool.num_refs
        return sum(
            refs[holding.tables[g][index]] == 1
            for g, group in self.windows
            for index in group.outside(holding.tables[g], position, self._block_size)
        )

    def num_kept(self, tables: Sequence[Sequence[int]], position: int) -> int:
        """Held blocks that queries from this position on may read."""
        refs = self._pool.num_refs
        kept = sum(refs[block] > 0 for table in tables for block in table if block)
        return kept - sum(
            len(group.outside(tables[g], position, self._block_size)) for g, group in self.windows
        )

    def trim(self, row: int, holding: RequestBlocks, position: int) -> None:
        """Give back what queries from this position on do not read."""
        for g, group in self.windows:
            table = holding.tables[g]
            outside = group.outside(table, position, self._block_size)
            self._pool.release([table[index] for index in outside])
            for index in outside:
                table[index] = NULL_BLOCK
                if index < holding.num_sent:
                    self._add(row, self._places(index, index + 1), [NULL_BLOCK], g)

    def num_exclusive(
        self, holdings: Sequence[RequestBlocks], keep: Sequence[Sequence[int]]
    ) -> int:
        """Blocks held by these requests alone; those in ``keep`` count as held by another."""
        lost: dict[int, int] = {}
        for holding in holdings:
            for block in live_blocks(holding.tables):
                lost[block] = lost.get(block, 0) + 1
        refs = self._pool.num_refs
        kept = sum(lost.get(block) == refs[block] for table in keep for block in table)
        return sum(refs[block] == count for block, count in lost.items()) - kept

    def _places(self, start: int, upto: int) -> array[int]:
        """start, start + 1, ..., upto - 1: copying is quicker than counting."""
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
    """The future peak of Past-Future (Gong et al. 2025), in blocks instead of tokens.

    Memory grows until a request ends, so the peak is at one of the ends. With requests sorted by
    ``remaining`` output tokens, longest first, those up to i are there when i takes its last step,
    and each has its known tokens and ``remaining[i] - 1`` more in the cache. Blocks that are shared
    count for each holder.

    ceil((known + more) / size) depends on ``known`` only through quotient and residue, so it is
    enough to count residues: O(n * block_size) instead of O(n * n).
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
