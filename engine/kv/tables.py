"""Block tables: growing them, sending changes to the worker, freeing blocks out of the window."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.kv.block_pool import NULL_BLOCK, BlockPool
from engine.kv.groups import Group
from engine.kv.request_blocks import RequestBlocks


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
        """Take blocks for so many entries; the caller has checked that enough are free."""
        taken = self._pool.take(num_entries * self.num_groups)
        for g, table in enumerate(holding.tables):
            table += taken[g * num_entries : (g + 1) * num_entries]

    def extend_each(self, rows: Sequence[int], holdings: Sequence[RequestBlocks]) -> None:
        """One more entry for each of these requests, and the worker is told."""
        blocks = self._pool.take(len(rows) * self.num_groups)
        taken = iter(blocks)
        if self.num_groups == 1:  # most models: the hot path of decodes
            self._deltas.rows.fromlist(list(rows))
            self._deltas.indices.fromlist([len(holding.tables[0]) for holding in holdings])
            self._deltas.blocks.fromlist(blocks)
            for holding, block in zip(holdings, taken, strict=True):
                holding.tables[0].append(block)
                holding.num_told += 1
            return
        for row, holding in zip(rows, holdings, strict=True):
            for table in holding.tables:
                table.append(next(taken))
            self.tell(row, holding)

    def tell(self, row: int, holding: RequestBlocks) -> None:
        """Queue the entries that the worker does not know yet."""
        told = holding.num_told
        for g, table in enumerate(holding.tables):
            self._add(row, self._places(told, len(table)), table[told:], g)
        holding.num_told = len(holding.blocks)

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
                if index < holding.num_told:
                    self._add(row, self._places(index, index + 1), [NULL_BLOCK], g)

    def num_exclusive(
        self, holdings: Sequence[RequestBlocks], keep: Sequence[Sequence[int]]
    ) -> int:
        """Blocks held by these requests alone; those in ``keep`` count as held by another."""
        lost: dict[int, int] = {}
        for holding in holdings:
            for block in live_blocks(holding):
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


def live_blocks(holding: RequestBlocks) -> list[int]:
    """All blocks held, in order; those of one entry side by side, so that tails are freed first."""
    first, *others = holding.tables
    if not others and first[:1] != [NULL_BLOCK]:
        return first
    return [block for entry in zip(first, *others, strict=True) for block in entry if block]


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
