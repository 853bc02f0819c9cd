"""HostStore: copies of KV blocks in the host's memory, which the cores of a machine share.

Each core writes into its own region of an ``Arena`` and reads all. A *space* is a part of each
block's label, made from the identity of the store. Processes with other weights or layouts use
other spaces, so they may share an arena and never serve each other's blocks. After ``clear`` a
process uses a new random space, since no other process is known to have the same weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config.engine import EngineConfig
from engine.config.gpu_memory import GIB
from engine.errors import ConfigError, WireError
from engine.ipc.arena import Arena
from engine.ipc.sealed_files import SealedFile
from engine.kv_transfer.regions import (
    MAX_KEY_BYTES,
    NUM_WITHDRAWALS,
    SPACE_BYTES,
    Region,
    Words,
    fence,
    labels_of,
    least_bytes,
)
from engine.kv_transfer.slots import OthersSlots, OwnSlots
from engine.kv_transfer.stores import Rows, StoreIdentity

MOST_AT_ONCE = 32  # blocks that are copied before it is checked that they have not changed

logger = logging.getLogger("engine.core")

Bytes = NDArray[np.uint8]
Copy = Callable[[Bytes, Bytes], object]


def open_host_store(
    size_bytes: int, identity: StoreIdentity, shared: SealedFile | None = None, first: int = 0
) -> HostStore:
    """Open a store in ``size_bytes`` of memory of this process, or in the arena ``shared``, in
    its region number ``first`` if that is free.

    Raises ``ConfigError`` if the machine lacks the memory or no block fits, ``WireError`` if the
    arena cannot be opened or other processes use all its regions."""
    arena = Arena.private(size_bytes) if shared is None else Arena.shared(shared, first)
    try:
        return HostStore(arena, identity)
    except BaseException:
        arena.close()
        raise


def open_core_store(config: EngineConfig, identity: StoreIdentity) -> HostStore:
    """Open the store of a core with ``kv_offloading_size``: in memory that its launcher shares
    between cores, else in memory of its own. Raises ``ConfigError`` as ``open_host_store`` does."""
    assert config.cache.kv_offloading_size is not None
    size_bytes = int(config.cache.kv_offloading_size * GIB) // identity.num_ranks
    if config.kv_arena is not None:
        # Its own blocks are in this region.
        first = config.core_index * identity.num_ranks + identity.rank
        try:
            return open_host_store(size_bytes, identity, SealedFile(*config.kv_arena), first)
        except WireError as error:
            logger.warning("KV blocks in host memory are not shared with other cores: %s", error)
    return open_host_store(size_bytes, identity)


class HostStore:
    """A ``BlockStore`` in an arena. ``copy(to, source)`` copies bytes; it should release the GIL.

    Copies are made without the lock, so ``contains`` does not wait for them."""

    name = "host"

    def __init__(self, arena: Arena, identity: StoreIdentity, *, copy: Copy = np.copyto) -> None:
        num_regions, size = len(arena.regions), identity.block_bytes
        regions = [Region(each, size, num_regions) for each in arena.regions]
        if not regions[0].num_slots:
            owner = "core" if identity.num_ranks == 1 else "rank"
            least = least_bytes(size, num_regions)
            least *= identity.num_ranks if num_regions == 1 else 1
            least_gib = math.ceil(1000 * least / GIB) / 1000
            raise ConfigError(
                f"kv_offloading_size is too small: each {owner}'s share is "
                f"{len(arena.regions[0])} bytes, where not even one block of {size} bytes fits; "
                f"set it to at least {least_gib} (GiB), or leave it out"
            )
        self._arena = arena
        self._identity = identity
        self._copy = copy
        self._space = _space_of(identity)
        own = arena.own
        self._own = OwnSlots(regions[own], own, self._space)
        self._others = [
            OthersSlots(region, own, self._space)
            for index, region in enumerate(regions)
            if index != own
        ]
        self._all: list[OwnSlots | OthersSlots] = [self._own, *self._others]
        self._headers = [region.header for region in regions]
        self._num_withdrawals = 0  # of all processes, when they were last taken into account
        self._writing: dict[bytes, Writing] = {}  # keys that are being written
        self._lock = threading.Lock()  # protects this object; not held while blocks are copied
        self._has_written = threading.Condition(self._lock)
        self._is_closed = False
        self._num_refused = self._num_overtaken = self._num_from_others = 0
        with self._lock:
            self._follow()

    @property
    def memory(self) -> Bytes:
        """The bytes of its arena into which it writes."""
        return self._arena.regions[self._arena.own]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            if self._is_closed:
                return [False] * len(keys)
            self._follow()
            found = list(map(self._own.slots.__contains__, keys))
            for other in self._others:
                if other.slots and not all(found):
                    theirs = map(other.slots.__contains__, keys)
                    found = [one or two for one, two in zip(found, theirs, strict=True)]
        return found

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        found = [False] * len(keys)
        with self._lock:
            if self._is_closed:
                return found
            self._follow()
            parts, space = self._use(keys), self._space
        num_from_others = num_overtaken = 0
        for region, places in parts:
            for begin in range(0, len(places), MOST_AT_ONCE):
                some = places[begin : begin + MOST_AT_ONCE]
                labels = labels_of(space, [keys[index] for index, _ in some])
                read = self._read_some(region, labels, some, rows)
                for index in read:
                    found[index] = True
                num_overtaken += len(some) - len(read)
                num_from_others += len(read) if region is not self._own.region else 0
        with self._lock:
            self._num_overtaken += num_overtaken
            self._num_from_others += num_from_others
            has_same_weights = self._space == space
        return found if has_same_weights else [False] * len(keys)

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        with self._lock:
            if self._is_closed:
                return [False] * len(keys)
            self._follow()
            index_of = {key: index for index, key in enumerate(keys)}
            known = {keys[index] for _, places in self._use(keys) for index, _ in places}
            new = [key for key in index_of if key not in known and key not in self._writing]
            fit = [key for key in new if len(key) <= MAX_KEY_BYTES]
            labels = labels_of(self._space, fit)
            slots = self._own.take(len(fit))
            writing = Writing(fit[: len(slots)])
            refused = set(new).difference(writing.keys)
            self._num_refused += len(refused)
            self._writing.update(dict.fromkeys(writing.keys, writing))
        try:
            self._write_all(
                labels[: len(slots)], slots, [index_of[key] for key in writing.keys], rows
            )
        except BaseException:
            writing.dropped.update(writing.keys)
            raise
        finally:
            with self._lock:
                for key in writing.keys:
                    del self._writing[key]
                self._own.publish(writing.keys, slots, writing.dropped)
                self._use(keys)
                self._has_written.notify_all()
        return [key not in refused for key in keys]

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._follow()
            for key in keys:
                if key in self._writing:
                    self._writing[key].dropped.add(key)
            for slots in self._all:
                slots.withdraw([key for key in dict.fromkeys(keys) if key in slots.slots])
            self._announce_withdrawals()

    def clear(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._space = _space_of(self._identity, os.urandom(16))
            for writing in self._writing.values():
                writing.dropped.update(writing.keys)
            for slots in self._all:
                slots.clear(self._space)
            self._announce_withdrawals()

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            num = len(self._own.slots)
            return {
                "num_blocks": num,
                "num_bytes": num * self._identity.block_bytes,
                "evicted": self._own.num_evicted,
                "refused": self._num_refused,
                "overtaken": self._num_overtaken,
                "from_others": self._num_from_others,
            }

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while self._writing:
                self._has_written.wait()
            self._arena.close()

    # -- with the lock

    def _announce_withdrawals(self) -> None:
        fence()
        self._own.region.header[NUM_WITHDRAWALS] += 1

    def _follow(self) -> None:
        """Take into account what other processes have written and withdrawn."""
        for other in self._others:
            other.follow()
        count = sum(int(header[NUM_WITHDRAWALS]) for header in self._headers)
        if count != self._num_withdrawals:
            self._num_withdrawals = count
            fence()
            for slots in self._all:
                slots.drop_withdrawn()

    def _use(self, keys: Sequence[bytes]) -> list[tuple[Region, list[tuple[int, int]]]]:
        """Find blocks, and note that they are in use now. Returns for each region pairs: the index
        of a key, and the slot where its block is."""
        parts, left = [], list(enumerate(keys))
        for here in self._all:
            slots = here.slots
            if places := [(index, slots[key]) for index, key in left if key in slots]:
                here.touch([keys[index] for index, _ in places])
                parts.append((here.region, places))
                left = [(index, key) for index, key in left if key not in slots]
        return parts

    # -- without the lock

    def _read_some(
        self, region: Region, labels: Words, places: list[tuple[int, int]], rows: Rows
    ) -> list[int]:
        """Copy blocks from the slots ``places`` of a region. Returns the indices of those that had
        these labels and did not change meanwhile."""
        indices, where = zip(*places, strict=True)
        slots = np.array(where)
        sequences = region.sequences[slots]
        fence()
        has = (region.labels[slots] == labels).all(axis=1)
        for mine, theirs in _runs(indices, where):
            self._copy(rows[mine], region.blocks[theirs])
        fence()
        has &= region.valid(slots, sequences)
        return [index for index, is_right in zip(indices, has.tolist(), strict=True) if is_right]

    def _write_all(self, labels: Words, slots: Words, indices: list[int], rows: Rows) -> None:
        """Copy rows into slots, which are marked as being written."""
        region = self._own.region
        fence()
        region.labels[slots] = labels
        for theirs, mine in _runs(slots.tolist(), indices):
            self._copy(region.blocks[theirs], rows[mine])
        fence()


class Writing:
    """Blocks that a thread is writing. ``dropped``: keys that were forgotten meanwhile."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.dropped: set[bytes] = set()


def _runs(to: Sequence[int], source: Sequence[int]) -> list[tuple[slice, slice]]:
    """Pairs of rows as pairs of slices, one for each run of consecutive rows on both sides."""
    runs, begin = [], 0
    for end in range(1, len(to) + 1):
        if end == len(to) or (to[end] - to[end - 1], source[end] - source[end - 1]) != (1, 1):
            first, second, num = to[begin], source[begin], end - begin
            runs.append((slice(first, first + num), slice(second, second + num)))
            begin = end
    return runs


def _space_of(identity: StoreIdentity, salt: bytes = b"") -> bytes:
    text = "\0".join(map(str, identity)).encode() + b"\0" + salt
    return hashlib.blake2b(text, digest_size=SPACE_BYTES).digest()
