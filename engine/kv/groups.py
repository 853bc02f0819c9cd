"""Groups: layers with the same need. Each group has a block table of its own.

All tables of a request have the same length, so one number says how much it holds. A layer with a
sliding window reads only the last tokens: table entries that no query reaches any more become the
null block, and what was in them is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.block_pool import NULL_BLOCK
from engine.kv.prefix_cache import PrefixCache


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
        """The most leading entries, up to ``limit``, that hold all keys of a query behind them."""
        reach = -(-(self.window - 1) // block_size) if self.window else limit
        while limit:
            needed = range(max(0, limit - reach), limit)
            lost = next((index for index in reversed(needed) if cached[index] is None), None)
            if lost is None:
                break
            limit = lost
        return limit


FULL = Group()


def group_keys(hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
    """Keys of this group for the hashes: one hash stands for one block in each group."""
    return hashes if group == 0 else [block_hash + bytes([group]) for block_hash in hashes]


def split_key(key: bytes) -> tuple[bytes, int]:
    """The hash and the group of a key. Hashes have an even length, so an odd one has a group."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)


def find_tables(
    groups: Sequence[Group], cache: PrefixCache, hashes: Sequence[bytes], block_size: int
) -> list[list[int]]:
    """The longest hit common to all groups, as tables; entries out of a window are null."""
    if len(groups) == 1 and not groups[0].window:
        return [cache.prefix(hashes)]
    cached = [[cache.find(key) for key in group_keys(hashes, g)] for g in range(len(groups))]
    limit, agreed = len(hashes), -1
    while limit != agreed:  # what shortens the hit of one group may invalidate that of another
        agreed = limit
        for group, blocks in zip(groups, cached, strict=True):
            limit = group.longest(blocks, limit, block_size)
    tables = []
    for group, blocks in zip(groups, cached, strict=True):
        first = group.first_needed(limit * block_size, block_size)
        tables.append([NULL_BLOCK] * first + [block or NULL_BLOCK for block in blocks[first:limit]])
    return tables
