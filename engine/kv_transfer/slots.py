"""What is in the slots of an arena's regions: ``OwnSlots`` of this process's region, in the order
of their last use, and ``OthersSlots`` of a region that another process writes.

``OthersSlots`` follows the changes that the owner logs. If it is late, a block is not found, or its
slot has another label when it is read: nothing wrong is served. ``row`` is this process's row of
the tables ``withdrawn``."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from engine.kv_transfer.regions import (
    BLOCK_BYTES,
    NUM_CHANGES,
    Region,
    Words,
    fence,
    labels_of,
)


class OwnSlots:
    """The slots of this process's region. ``slots`` maps keys to them. The least recently used
    block is evicted first; uses by other processes count, too. Any block may be in any slot: sets
    of 16 slots would lose single blocks within chains, and with them a quarter of what is reused.

    The blocks of ``space`` that a previous process of the region has left are kept."""

    def __init__(self, region: Region, row: int, space: bytes) -> None:
        self.region = region
        self.num_evicted = 0
        self._row = row
        region.take_over(row)
        self.slots = dict(region.find(_every(region), space))
        self._keys: list[bytes | None] = [None] * region.num_slots
        for key, slot in self.slots.items():
            self._keys[slot] = key
        # At most one entry for each slot, whose stamp may be older than the slot's.
        self._oldest = [(int(region.stamps[slot]), slot) for slot in self.slots.values()]
        heapify(self._oldest)
        self._is_queued = [key is not None for key in self._keys]
        free = [slot for slot, key in enumerate(self._keys) if key is None]
        self._free = free[::-1]  # the lowest is taken first

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are in use now. Earlier keys count as more recently used: in a
        chain of blocks they are of use without the later ones."""
        self.region.stamps[_array([self.slots[key] for key in keys])] = _stamps(len(keys))

    def take(self, num: int) -> Words:
        """Take up to ``num`` slots for blocks that are being written, by evicting others if
        necessary. Returns them in ascending order. ``publish`` must follow."""
        taken = [self._free.pop() for _ in range(min(num, len(self._free)))]
        while len(taken) < num and self.slots:
            stamp, slot = heappop(self._oldest)
            if (key := self._keys[slot]) is None:
                self._is_queued[slot] = False
            elif (latest := int(self.region.stamps[slot])) > stamp:
                heappush(self._oldest, (latest, slot))
            else:
                self._is_queued[slot] = False
                self._keys[slot] = None
                del self.slots[key]
                self.num_evicted += 1
                taken.append(slot)
        slots = _array(sorted(taken))
        self.region.sequences[slots] += 1
        return slots

    def publish(self, keys: Sequence[bytes], slots: Words, dropped: Collection[bytes]) -> None:
        """Serve the blocks that were written into these slots, except those of ``dropped`` keys."""
        region, stamp = self.region, time.monotonic_ns()
        free = [slot for key, slot in zip(keys, slots.tolist(), strict=True) if key in dropped]
        region.stamps[slots] = stamp
        region.withdrawn[self._row, free] = region.sequences[free] + 1
        fence()
        region.sequences[slots] += 1
        fence()
        region.log(slots)
        self._free += free
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in dropped:
                continue
            self.slots[key] = slot
            self._keys[slot] = key
            if not self._is_queued[slot]:
                self._is_queued[slot] = True
                heappush(self._oldest, (stamp, slot))

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Never serve these blocks again. Their slots are free."""
        slots = [self.slots.pop(key) for key in keys]
        for slot in slots:
            self._keys[slot] = None
        self.region.withdrawn[self._row, slots] = self.region.sequences[slots]
        self._free += slots

    def drop_withdrawn(self) -> None:
        """Free the slots of blocks that other processes have withdrawn."""
        self.withdraw(_withdrawn(self.region, self.slots))

    def clear(self, _space: bytes) -> None:
        """Never serve any present block again."""
        self.withdraw(list(self.slots))


class OthersSlots:
    """The slots of a region of another process with blocks of ``space``. ``slots`` maps keys to
    them."""

    def __init__(self, region: Region, row: int, space: bytes) -> None:
        self.region = region
        self.slots: dict[bytes, int] = {}
        self._row = row
        self._space = space
        self._keys: dict[int, bytes] = {}  # by slot
        self._num_seen = -1 - region.num_slots  # changes that are accounted for

    def follow(self) -> None:
        """Account for the changes since the last call."""
        region = self.region
        if region.header[BLOCK_BYTES] != region.block_bytes:
            self.clear(self._space)
        elif self._num_seen != (count := int(region.header[NUM_CHANGES])):
            self._update(region.changed(self._num_seen, count))
            self._num_seen = count

    def _update(self, changed: Words) -> None:
        for slot in changed.tolist():
            key = self._keys.pop(slot, None)
            if key is not None and self.slots.get(key) == slot:  # else it is in another slot by now
                del self.slots[key]
        for key, slot in self.region.find(changed, self._space):
            self.slots[key] = slot
            self._keys[slot] = key

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are in use now, for the owner; earlier keys more recently."""
        self.region.stamps[_array([self.slots[key] for key in keys])] = _stamps(len(keys))

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Never serve these blocks again, in any process."""
        region, slots = self.region, self._pop(keys)
        sequences = region.sequences[slots]
        fence()
        has = (region.labels[slots] == labels_of(self._space, keys)).all(axis=1)
        region.withdrawn[self._row, slots[has]] = sequences[has]

    def drop_withdrawn(self) -> None:
        """Forget the blocks that other processes have withdrawn."""
        self._pop(_withdrawn(self.region, self.slots))

    def clear(self, space: bytes) -> None:
        """Forget all blocks. Those that are written from now on are of ``space``."""
        self.slots.clear()
        self._keys.clear()
        self._space = space

    def _pop(self, keys: Sequence[bytes]) -> Words:
        slots = [self.slots.pop(key) for key in keys]
        for slot in slots:
            del self._keys[slot]
        return _array(slots)


def _withdrawn(region: Region, slots: Mapping[bytes, int]) -> list[bytes]:
    """The keys of those blocks in ``slots`` that are not valid any more."""
    keys, where = list(slots), _array(list(slots.values()))
    valid = region.valid(where, region.sequences[where])
    return [keys[index] for index in np.flatnonzero(~valid)]


def _every(region: Region) -> Words:
    return np.arange(region.num_slots)


def _array(slots: list[int]) -> Words:
    return np.array(slots, np.int64)


def _stamps(num: int) -> Words:
    return time.monotonic_ns() - np.arange(num)
