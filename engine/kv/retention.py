"""Retention: the order in which free blocks lose their content, where a cache policy chooses it.

A pinned block is a free block: it counts in ``num_free``, and a request that needs it gets it, if
no other block is free. So pins make no request wait unless a scheduling policy wants that, and
starve none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf
from typing import Any, NamedTuple

from engine.kv.block_pool import BlockPool

Level = tuple[bool, float]  # (is pinned, priority): blocks on lower levels are taken first
ORDINARY: Level = (False, 0.0)
FIRST: Level = (False, -inf)


class Keep(NamedTuple):
    """How free blocks with cached content are kept.

    ``priority``: blocks of a lower one are taken first; of equal ones, those that became free
    first. Blocks that no policy has placed have 0. ``until``: the blocks are pinned until this time
    (seconds, like ``view.now``): they are taken only if no other block is free, by priority.
    ``owner``: whose blocks they are, such as a program, a user or a class. A later ``Keep`` for the
    same blocks replaces this one, but that of another owner shortens no pin. ``most``: the most
    blocks of this owner that keep their place; above it, those that were kept first are taken
    before all others. ``None``: no limit."""

    priority: float = 0.0
    until: float = -inf
    owner: str = ""
    most: int | None = None


@dataclass(slots=True, eq=False)
class Kept:
    """The blocks that one call of ``ShelvedPool.keep`` has placed, in the order of their reuse.
    Blocks that lose their content, or that a later call places, are removed; blocks that a request
    holds meanwhile stay."""

    keep: Keep
    is_pinned: bool
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def level(self) -> Level:
        return (self.is_pinned, self.keep.priority)

    @property
    def is_special(self) -> bool:
        """False if the blocks are in the order of ordinary ones, without a limit."""
        return self.level != ORDINARY or self.keep.most is not None


class ShelvedPool(BlockPool):
    """A pool in which a cache policy chooses the order of the free blocks with cached content.

    Free blocks without content are taken first. The others are on shelves, one for each level,
    lower ones first. The shelf of ordinary blocks is the free list itself, so without any ``keep``
    the order is that of ``BlockPool``.

    ``num_pinned``: the number of free blocks that are pinned; ``most_pinned``: the most that may
    be. The time is that of the last step, in seconds (``cache.evictions.now``)."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_pinned, self.most_pinned = 0, num_blocks
        self._kept: dict[int, Kept] = {}  # by block, if special
        self._pins: dict[Kept, None] = {}
        self._first_end = inf  # no pin ends before this time
        self._limited: dict[str, dict[Kept, None]] = {}  # by owner with a limit, oldest first
        self._num_limited: Counter[str] = Counter()  # blocks of these owners
        self._shelves: dict[Level, OrderedDict[int, None]] = {}  # without the ordinary blocks
        self._levels: list[Level] = []  # of the shelves, sorted
        self._shelf: dict[int, Level] = {}  # by block

    def level_of(self, block: int) -> Level:
        """The level of a free block with content."""
        return self._shelf.get(block, ORDINARY)

    def keep(self, blocks: Sequence[int], keep: Keep) -> None:
        """Keep the blocks that a request has just given back. ``blocks``: in the order of a block
        table, whose end is reused before its start. Blocks without content are left out. Blocks
        that other requests hold are placed when these give them back. If not all may be pinned, the
        first ones are."""
        mine = [block for block in blocks if self._may_place(block, keep)]
        for block in mine:
            self._drop(block)
            if self.num_refs[block] == 0:
                self._move(block, ORDINARY)  # so that it does not count as pinned
        is_pin = keep.until > self.cache.evictions.now
        num_pins = max(0, self.most_pinned - self.num_pinned) if is_pin else 0
        self._place(mine[num_pins:], Kept(keep, is_pinned=False))
        self._place(mine[:num_pins], Kept(keep, is_pinned=True))
        if keep.most is not None:
            self._cut(keep.owner, keep.most)

    def expire(self) -> None:
        """Unpin the blocks of pins that have ended. Called whenever the time is set."""
        now = self.cache.evictions.now
        if now < self._first_end:
            return
        ended = [kept for kept in self._pins if kept.keep.until <= now]
        for kept in sorted(ended, key=lambda kept: kept.keep.until):
            del self._pins[kept]
            kept.is_pinned = False
            for block in [*kept.blocks]:
                if self.num_refs[block] == 0:
                    self._move(block, kept.level)
                if not kept.is_special:
                    self._drop(block)
        self._first_end = min((kept.keep.until for kept in self._pins), default=inf)

    def forget_all(self) -> None:
        """Make all blocks ordinary."""
        for block in [*self._kept]:
            self._drop(block)
        for block in [*self._shelved()]:
            self._move(block, ORDINARY)

    # -- as in BlockPool

    @property
    def evicts(self) -> bool:
        return super().evicts or (not self._next[0] and bool(self._shelf))

    def take(self, count: int) -> list[int]:
        if self._shelf and count <= self.num_free:
            self._bring(count)
        taken = super().take(count)
        for block in taken if self._kept else ():
            self._drop(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        for block in reversed(blocks) if self._kept else ():
            if self.num_refs[block] == 0 and (kept := self._kept.get(block)) is not None:
                is_pinned = kept.is_pinned and self.num_pinned < self.most_pinned
                level = (is_pinned, kept.keep.priority)
                if self.cache.hashes[block] is None:
                    self._drop(block)
                elif level != ORDINARY:
                    self._move(block, level)

    def free_order(self) -> list[int]:
        order, shelved = super().free_order(), [*self._shelved()]
        num_blank, _ = self._blank(len(order))
        num_low = len([*self._shelved(before=ORDINARY)])
        low, high = shelved[:num_low], shelved[num_low:]
        return [*order[:num_blank], *low, *order[num_blank:], *high]

    def _unlink(self, block: int) -> None:
        if block in self._shelf:
            self._unshelve(block)
            self.num_free -= 1
        else:
            super()._unlink(block)

    # -- which blocks are kept how

    def _may_place(self, block: int, keep: Keep) -> bool:
        """True if ``keep`` decides on this block: it has content, and no other owner has pinned it
        for longer."""
        if self.cache.hashes[block] is None:
            return False
        kept = self._kept.get(block)
        if kept is None or not kept.is_pinned or kept.keep.owner == keep.owner:
            return True
        return kept.keep.until <= keep.until

    def _place(self, blocks: Sequence[int], kept: Kept) -> None:
        """Record that these blocks are kept so, and move those that are free to their shelf."""
        keep = kept.keep
        for block in reversed(blocks):
            if self.num_refs[block] == 0:
                self._move(block, kept.level)
            if kept.is_special:
                self._kept[block] = kept
                kept.blocks[block] = None
        if blocks and kept.is_pinned:
            self._pins[kept] = None
            self._first_end = min(self._first_end, keep.until)
        if blocks and keep.most is not None:
            self._limited.setdefault(keep.owner, {})[kept] = None
            self._num_limited[keep.owner] += len(blocks)

    def _cut(self, owner: str, most: int) -> None:
        """Let the blocks of an owner that were kept first go first, until ``most`` are left."""
        while self._num_limited[owner] > most:
            oldest = next(iter(self._limited[owner]))
            block = next(iter(oldest.blocks))
            self._drop(block)
            if self.num_refs[block] == 0:
                self._move(block, FIRST)

    def _drop(self, block: int) -> None:
        """Forget how a block is kept, without moving it."""
        kept = self._kept.pop(block, None)
        if kept is None:
            return
        del kept.blocks[block]
        if not kept.blocks:
            self._pins.pop(kept, None)
        if kept.keep.most is not None:
            owner = kept.keep.owner
            self._num_limited[owner] -= 1
            if not kept.blocks:
                del self._limited[owner][kept]
            if not self._limited[owner]:
                del self._limited[owner], self._num_limited[owner]

    # -- where free blocks are

    def _move(self, block: int, level: Level) -> None:
        """Move a free block to the end of the shelf of this level."""
        self._unlink(block)
        self.num_free += 1
        if level == ORDINARY:
            self._link(block, self._prev[0])
            return
        if level not in self._shelves:
            self._shelves[level] = OrderedDict()
            insort(self._levels, level)
        self._shelves[level][block] = None
        self._shelf[block] = level
        self.num_pinned += level[0]

    def _unshelve(self, block: int) -> None:
        """Take a block from its shelf; it is then in no list."""
        level = self._shelf.pop(block)
        del self._shelves[level][block]
        self.num_pinned -= level[0]
        if not self._shelves[level]:
            del self._shelves[level]
            del self._levels[bisect_left(self._levels, level)]

    def _link(self, block: int, before: int) -> None:
        """Insert a block that is in no list into the free list, after ``before``."""
        after = self._next[before]
        self._next[before], self._prev[block] = block, before
        self._next[block], self._prev[after] = after, block

    def _bring(self, count: int) -> None:
        """Move blocks from shelves to the free list, so that its first ``count`` blocks are those
        to be taken."""
        num_listed = self.num_free - len(self._shelf)
        if self._levels and self._levels[0] < ORDINARY:
            num_blank, last = self._blank(count)
            for block in [*islice(self._shelved(before=ORDINARY), count - num_blank)]:
                self._unshelve(block)
                self._link(block, last)
                last, num_listed = block, num_listed + 1
        for block in [*islice(self._shelved(), max(0, count - num_listed))]:
            self._unshelve(block)
            self._link(block, self._prev[0])

    def _shelved(self, before: Level = (True, inf)) -> Iterator[int]:
        """The free blocks on shelves, in the order in which they are to be taken. ``before``: only
        those on lower levels."""
        for level in takewhile(lambda level: level <= before, self._levels):
            yield from self._shelves[level]

    def _blank(self, most: int) -> tuple[int, int]:
        """Number of blocks at the head of the free list that have no content, up to ``most``, and
        the last of these, or 0."""
        number, last = 0, 0
        while number < most and (block := self._next[last]) and self.cache.hashes[block] is None:
            number, last = number + 1, block
        return number, last


@dataclass(frozen=True)
class Retention:
    """The pool, and the function that chooses how the blocks of a request are kept. ``wish`` is
    called with a request that is about to lose its blocks and whether it has ended (else it is
    preempted); if it returns ``None``, nothing changes."""

    pool: ShelvedPool
    wish: Callable[[Any, bool], Keep | None]
