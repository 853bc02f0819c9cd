"""Groups of layers with the same attention window, and how many KV blocks requests take in them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

NULL_BLOCK = 0
"""The block that stands in a table where nothing is held; it is never written or read."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of layers that have the same attention window and share a block table."""

    window: int = 0
    """Tokens that a query sees at most, itself included; 0: all tokens."""
    is_chunked: bool = False
    """True if a query sees only tokens of its own chunk: positions are divided into chunks of
    ``window`` tokens. False: it sees the last ``window`` tokens."""
    max_blocks: int = 0
    """Most table entries of a request that are not null at the same time; 0: no bound."""

    def first_needed(self, position: int, block_size: int) -> int:
        """Index of the first block table entry that a query at ``position`` or later reads."""
        if not self.window:
            return 0
        if self.is_chunked:
            return position // self.window * self.window // block_size
        return max(0, position - self.window + 1) // block_size

    def outside(self, table: Sequence[int], position: int, block_size: int) -> range:
        """Range of table indices whose blocks can be freed, since no query at ``position`` or later
        reads them."""
        before = first = min(self.first_needed(position, block_size), len(table))
        while first and table[first - 1] != NULL_BLOCK:
            first -= 1
        return range(first, before)

    def bound(self, num_blocks: int) -> int:
        """The most blocks in a block table of ``num_blocks`` entries, not counting null blocks."""
        return min(num_blocks, self.max_blocks) if self.max_blocks else num_blocks

    def longest(self, cached: Sequence[int | None], limit: int, block_size: int) -> int:
        """The largest usable length of a prefix cache hit, in block table entries and at most
        ``limit``: all keys that the next token attends to must be cached. ``cached``: the cached
        block of each table entry, or ``None``."""
        while limit:
            needed = range(self.first_needed(limit * block_size, block_size), limit)
            lost = next((index for index in reversed(needed) if cached[index] is None), None)
            if lost is None:
                break
            limit = lost
        return limit

    @property
    def kind(self) -> str:
        """The kind of attention, and the size of its windows or chunks, in words."""
        if not self.window:
            return "full attention"
        kind = "chunks" if self.is_chunked else "sliding windows"
        return f"attention in {kind} of {self.window} tokens"


FULL = Group()


def kinds_of(groups: Iterable[Group]) -> str:
    """The kinds of attention of these groups, each with its number of groups, as text."""
    return ", ".join(f"{kind}: {num}" for kind, num in Counter(g.kind for g in groups).items())


def window_blocks(window: int, max_num_batched_tokens: int, block_size: int) -> int:
    """The most blocks that a request holds at once in layers with a sliding window of ``window``
    tokens."""
    return -(-(window - 1 + max_num_batched_tokens) // block_size) + 1


def sized(
    groups: Iterable[Group], max_num_batched_tokens: int, block_size: int
) -> tuple[Group, ...]:
    """The groups with ``max_blocks`` for steps in which a request computes up to this many
    tokens."""
    return tuple(
        replace(group, max_blocks=window_blocks(group.window, max_num_batched_tokens, block_size))
        if group.window
        else group
        for group in groups
    )


def request_blocks(groups: Sequence[Group], block_size: int, num_tokens: int) -> int:
    """The most blocks, over all groups, that a request of this many tokens holds at once."""
    entries = -(-num_tokens // block_size)
    return sum(group.bound(entries) for group in groups)


def max_concurrency(
    num_usable_blocks: int, groups: Sequence[Group], block_size: int, max_model_len: int
) -> float:
    """How many requests of ``max_model_len`` tokens the KV pool holds at once."""
    return num_usable_blocks / request_blocks(groups, block_size, max_model_len)


def longest_request(num_usable_blocks: int, groups: Sequence[Group], block_size: int) -> int | None:
    """The most tokens of one request whose keys and values fit into the KV pool; ``None`` if there
    is no limit, because all layers have windows."""
    bounded = sum(group.max_blocks for group in groups)
    num_full = sum(not group.max_blocks for group in groups)
    if num_full == 0 and bounded <= num_usable_blocks:
        return None
    fits = range(num_usable_blocks + 1)
    most = bisect_right(
        fits, num_usable_blocks, key=lambda n: sum(group.bound(n) for group in groups)
    )
    return (most - 1) * block_size
