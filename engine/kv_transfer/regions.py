"""Region: slots for KV blocks in a region of an arena, with one writer and many readers.

Readers copy a slot and then look whether it has changed meanwhile: its *sequence* is odd while its
owner writes, and increases with each write. This relies on three things:

* Aligned words of 8 bytes are written and read in one piece.
* Words and blocks are seen to change in the order of the program where ``fence`` is called between
  them. x86 keeps this order anyway, ARM does not.
* The arena lends a region to one process at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
LINE = 64  # slots begin at multiples of this: a line of the processor's cache
MAX_KEY_BYTES = 48
LABEL_BYTES = 64
SPACE_BYTES = LABEL_BYTES - MAX_KEY_BYTES - 1
BLOCK_BYTES, NUM_CHANGES, NUM_WITHDRAWALS = range(3)  # words of a region's first page

Words = NDArray[np.int64]
_LOCK = threading.Lock()


def fence() -> None:
    """Let all processes see the accesses to memory before this call before those after it.

    Releasing a lock orders what precedes it, acquiring one orders what follows, and a release is
    not exchanged with a later acquisition."""
    with _LOCK:
        pass
    with _LOCK:
        pass


class Region:
    """A region with slots for blocks of ``block_bytes``: arrays in shared memory.

    ``header``: words, see ``BLOCK_BYTES``. ``changes`` [num_slots]: the slots whose content changed
    last, number i at i % num_slots. ``sequences`` [num_slots]: odd while a slot is being written.
    ``stamps`` [num_slots]: when a slot was last used, in ns; any process writes these.
    ``labels`` [num_slots, 8]: the space and key of a block as 64 bytes, see ``labels_of``.
    ``withdrawn`` [regions, num_slots]: a slot with this sequence is not valid; each process writes
    its own row. ``blocks`` [num_slots, block_bytes]."""

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int, num_regions: int) -> None:
        stride = _up(block_bytes, LINE)
        words = 3 + LABEL_BYTES // 8 + num_regions
        num = self.num_slots = max(0, len(memory) - 2 * PAGE) // (stride + 8 * words)
        self.block_bytes = block_bytes
        self.header: Words = memory[:PAGE].view(np.int64)
        self._tables: Words = memory[PAGE : PAGE + 8 * words * num].view(np.int64)
        self.changes, self.sequences, self.stamps = self._tables[: 3 * num].reshape(3, num)
        self.labels = self._tables[3 * num : 11 * num].reshape(num, 8)
        self.withdrawn = self._tables[11 * num :].reshape(num_regions, num)
        begin = PAGE + _up(8 * words * num, PAGE)
        self.blocks = memory[begin : begin + num * stride].reshape(num, stride)[:, :block_bytes]

    def take_over(self, own: int) -> None:
        """Become the region of this process, number ``own``: a region with another layout is
        emptied, and slots that were being written become invalid."""
        if self.header[BLOCK_BYTES] != self.block_bytes:
            self.header[BLOCK_BYTES] = 0
            fence()
            self._tables[:] = 0
            fence()
            self.header[BLOCK_BYTES] = self.block_bytes
        odd = np.flatnonzero(self.sequences & 1)
        self.withdrawn[own, odd] = self.sequences[odd] + 1
        fence()
        self.sequences[odd] += 1
        self.header[NUM_CHANGES] += self.num_slots + 1  # whoever follows reads all tables again

    def valid(self, slots: Words, sequences: Words) -> NDArray[np.bool_]:
        """Which of these slots have this sequence and a block that nobody has withdrawn."""
        is_same: NDArray[np.bool_] = (self.sequences[slots] == sequences) & (sequences & 1 == 0)
        is_same &= (self.withdrawn[:, slots] != sequences).all(axis=0)
        is_same &= self.header[BLOCK_BYTES] == self.block_bytes
        return is_same

    def find(self, slots: Words, space: bytes) -> list[tuple[bytes, int]]:
        """The keys of valid blocks of a space in these slots, each with its slot."""
        sequences = self.sequences[slots]
        fence()
        labels = self.labels[slots]
        is_ours = labels.view(np.uint8)[:, :SPACE_BYTES] == np.frombuffer(space, np.uint8)
        fence()
        found = np.flatnonzero(is_ours.all(axis=1) & self.valid(slots, sequences))
        text = labels[found].tobytes()
        keys = [
            text[at + 1 : at + 1 + text[at]] for at in range(SPACE_BYTES, len(text), LABEL_BYTES)
        ]
        return list(zip(keys, slots[found].tolist(), strict=True))

    def changed(self, since: int, until: int) -> Words:
        """The slots that changes number ``since`` to ``until`` have changed; all if these are no
        longer logged."""
        num = self.num_slots
        if 0 <= until - since <= num:
            fence()
            slots = np.unique(self.changes[np.arange(since, until) % num] % num)
            fence()
            if self.header[NUM_CHANGES] - since <= num:  # nothing of it was overwritten meanwhile
                return slots
        return np.arange(num)

    def log(self, slots: Words) -> None:
        """Let the other processes know that these slots have changed."""
        count = int(self.header[NUM_CHANGES])
        self.changes[(count + np.arange(len(slots))) % self.num_slots] = slots
        fence()
        self.header[NUM_CHANGES] = count + len(slots)


def least_bytes(block_bytes: int, num_regions: int) -> int:
    """A size of an arena in which a block fits into each region."""
    return PAGE + num_regions * (4 * PAGE + _up(block_bytes, LINE) + 8 * num_regions)


def labels_of(space: bytes, keys: Sequence[bytes]) -> Words:
    """The labels [keys, 8] of keys in a space: space, length of the key, key, zeros."""
    parts = [space + bytes((len(key),)) + key.ljust(MAX_KEY_BYTES, b"\0") for key in keys]
    return np.frombuffer(b"".join(parts), np.int64).reshape(-1, LABEL_BYTES // 8)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
