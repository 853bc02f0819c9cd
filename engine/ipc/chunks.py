"""Chunks: which parts of a block of memory are taken."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple


class Chunk(NamedTuple):
    """Bytes [offset, offset + size)."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Chunks:
    """Gives parts of ``size`` bytes out: the smallest free one that suffices, whose rest stays
    free. A part that comes back is merged with its free neighbours.

    Offsets and sizes are multiples of ``unit`` bytes."""

    def __init__(self, size: int, unit: int = 512) -> None:
        if unit < 1 or size < 0:
            raise ValueError(f"{size} bytes in units of {unit} cannot be given out")
        self.size = size - size % unit
        self._unit = unit
        self._taken: dict[int, Chunk] = {}  # by offset
        self._free: dict[int, Chunk] = {}  # by offset
        self._by_end: dict[int, Chunk] = {}  # free ones
        self._by_size: list[tuple[int, int]] = []  # (size, offset) of free ones, in order
        if self.size:
            self._add(Chunk(0, self.size))

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks that are taken, in the order in which they were."""
        return iter(self._taken.values())

    @property
    def num_taken(self) -> int:
        """Bytes that are taken."""
        return sum(chunk.size for chunk in self._taken.values())

    @property
    def free(self) -> list[Chunk]:
        """The free chunks by offset; no two of them are neighbours."""
        return sorted(self._free.values())

    def take(self, num_bytes: int) -> Chunk | None:
        """Take at least ``num_bytes``, which must be positive; ``None`` if no free chunk is as
        large."""
        if num_bytes < 1:
            raise ValueError(f"a chunk of {num_bytes} bytes")
        wanted = -(-num_bytes // self._unit) * self._unit
        place = bisect_left(self._by_size, (wanted, 0))
        if place == len(self._by_size):
            return None
        found = self._free[self._by_size[place][1]]
        self._remove(found)
        if found.size > wanted:
            self._add(Chunk(found.offset + wanted, found.size - wanted))
        taken = self._taken[found.offset] = Chunk(found.offset, wanted)
        return taken

    def give_back(self, chunk: Chunk) -> None:
        """Free a chunk that was taken. Raises ``ValueError`` for any other."""
        if self._taken.get(chunk.offset) != chunk:
            raise ValueError(f"{chunk} is not taken")
        del self._taken[chunk.offset]
        begin, end = chunk.offset, chunk.end
        if (before := self._by_end.get(begin)) is not None:
            self._remove(before)
            begin = before.offset
        if (after := self._free.get(end)) is not None:
            self._remove(after)
            end = after.end
        self._add(Chunk(begin, end - begin))

    # -- helpers

    def _add(self, chunk: Chunk) -> None:
        self._free[chunk.offset] = self._by_end[chunk.end] = chunk
        insort(self._by_size, (chunk.size, chunk.offset))

    def _remove(self, chunk: Chunk) -> None:
        del self._free[chunk.offset], self._by_end[chunk.end]
        del self._by_size[bisect_left(self._by_size, (chunk.size, chunk.offset))]
