"""Splits a step's attention into work items of similar size, once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.attention.softmax import STRETCH, TAIL
from kernels.cpu.native import Kernel, i32, i64
from kernels.meta import AttentionMeta

# Sequence, first row, rows, first key, end of keys, items that share the row, position of the first
# row.
ITEM_FIELDS = 7
_MUCH = 1 << 26  # bytes of partial sums; only written pages take memory

# Indices in the header, the int64 addresses and numbers that bodies read. The address of a plan's
# header stays the same for later steps.
SINGLES = 0  # address of the items of single tokens, and their number
ROOM = 2  # address of partial sums of single tokens, [items, heads, head_dim + TAIL] float32
# Address of [S, KV heads] int64, zero between operations: number of finished items of a sequence,
# by KV head if heads are separate items.
ARRIVALS = 3
FIRST_ITEMS = 4  # address of [S] int64, index of a sequence's first item of a single token
CHUNKS = 5  # address of the items of chunks, and their number
# What the kernel that finds the items of single tokens reads: addresses of the first row and the
# length of each sequence; the number of sequences; the window.
_STARTS, _LENS, _NUM_SEQS, _WINDOW = range(7, 11)
# What it writes: query tokens times keys of single tokens, and the number of rows of all sequences.
_WORK, _NUM_ROWS = 11, 12
_HEADER = 13


class Heads(NamedTuple):
    """The heads of one layer."""

    num: int
    group: int  # query heads per KV head
    size: int


class AttentionPlan:
    """The work items of a step's attention: for sequences with one query token, and for chunks.

    The plan owns the memory of its items. `renew` makes it the plan of another step."""

    def __init__(self, window: int, ahead: int, heads: Heads, tokens: int) -> None:
        """window: 0 for full attention; ahead: keys after its own position to which a query
        attends; tokens: query tokens of an item of a chunk."""
        self.header = np.zeros(_HEADER, np.int64)
        self.header[_WINDOW] = window
        self.chunk_work = 0
        self._window, self._ahead, self._heads, self._tokens = window, ahead, heads, tokens
        self._bytes_an_item = heads.num * (heads.size + TAIL) * 4  # of partial sums
        self._num_items = self._num_seqs = 0  # for which there is memory
        self._owned: tuple[NDArray[np.generic], ...] = ()
        self._chunks = np.empty((0, ITEM_FIELDS), np.int32)

    def address(self, part: int) -> int:
        """Address of a header field, for kernel bodies. part: a constant such as ``SINGLES``."""
        return int(self.header.ctypes.data) + 8 * part

    @property
    def num_singles(self) -> int:
        """Number of items of sequences with one query token."""
        return int(self.header[SINGLES + 1])

    @property
    def num_chunks(self) -> int:
        """Number of items of chunks."""
        return len(self._chunks)

    @property
    def single_work(self) -> int:
        """Pairs of query token and key in the items of sequences with one query token."""
        return int(self.header[_WORK])

    @property
    def num_rows(self) -> int:
        """Number of rows of the output that are written."""
        return int(self.header[_NUM_ROWS])

    def make_room(self, num_seqs: int, max_seq_len: int) -> bool:
        """Allocate memory for single tokens of any ``num_seqs`` sequences of up to ``max_seq_len``
        keys, unless it is much. Returns whether there is memory for them."""
        if not self._has_room(num_seqs, max_seq_len):
            needed = num_seqs * -(-max_seq_len // STRETCH)
            if needed * self._bytes_an_item > _MUCH:
                return False
            self._grow(needed, num_seqs)
        return True

    def renew(self, meta: AttentionMeta) -> None:
        """Plan another step: allocate memory, and split its chunks. `find_singles` must follow."""
        header, num_seqs = self.header, len(meta.seq_lens)
        header[_STARTS], header[_LENS] = meta.query_start.data_ptr(), meta.seq_lens.data_ptr()
        header[_NUM_SEQS] = num_seqs
        if not self._has_room(num_seqs, meta.max_seq_len):
            needed = int((-(-meta.seq_lens.numpy() // STRETCH)).sum())
            if needed > self._num_items or num_seqs > self._num_seqs:
                self._grow(needed, num_seqs)
        if meta.max_query_len > 1 or len(self._chunks):
            self._chunks = _chunks(meta, (self._window, self._ahead), self._tokens)
            header[CHUNKS], header[CHUNKS + 1] = self._chunks.ctypes.data, len(self._chunks)
            self.chunk_work = _work(self._chunks)

    def find_singles(self) -> None:
        """Find the items of sequences with one query token. A recorded step repeats this launch."""
        SINGLE_ITEMS.run(1, self.address(0))

    def _has_room(self, num_seqs: int, max_seq_len: int) -> bool:
        """True if there is memory for any sequences as in `make_room`."""
        parts = -(-max_seq_len // STRETCH)
        return num_seqs <= self._num_seqs and num_seqs * parts <= self._num_items

    def _grow(self, num_items: int, num_seqs: int) -> None:
        """Allocate memory for at least this many items and sequences."""
        heads = self._heads
        self._num_items = max(2 * num_items, self._num_items)
        self._num_seqs = num_seqs = max(num_seqs, self._num_seqs)
        items = np.empty((self._num_items, ITEM_FIELDS), np.int32)
        room = np.empty(self._num_items * self._bytes_an_item, np.uint8)
        arrivals = np.zeros(num_seqs * (heads.num // heads.group), np.int64)
        first_items = np.empty(num_seqs, np.int64)
        self._owned = items, room, arrivals, first_items
        self.header[SINGLES] = items.ctypes.data
        for part, each in ((ROOM, room), (ARRIVALS, arrivals), (FIRST_ITEMS, first_items)):
            self.header[part] = each.ctypes.data


def _singles_body(row):
    """The kernel that finds the items of sequences with one query token, each of up to `STRETCH`
    keys. Parameter 1: address of the plan's header."""
    header = i64(i64(row, (2,))[1], (_HEADER,))
    num_seqs, window = header[_NUM_SEQS], header[_WINDOW]
    starts, lens = i32(header[_STARTS], (num_seqs + 1,)), i32(header[_LENS], (num_seqs,))
    first_items = i64(header[FIRST_ITEMS], (num_seqs,))
    num, work, num_rows = 0, 0, 0
    for seq in range(num_seqs):
        length, count = np.int64(lens[seq]), np.int64(starts[seq + 1] - starts[seq])
        if length <= 0:
            continue
        num_rows += count
        if count != 1:
            continue
        low = max(length - window, 0) if window else 0
        begin = low - low % STRETCH
        parts = (length - begin + STRETCH - 1) // STRETCH
        first_items[seq] = num
        work += length - low
        while begin < length:
            item = i32(header[SINGLES] + num * (ITEM_FIELDS * 4), (ITEM_FIELDS,))
            item[0], item[1], item[2] = seq, starts[seq], 1
            item[3], item[4] = max(begin, low), min(begin + STRETCH, length)
            item[5], item[6] = parts, length - 1
            num, begin = num + 1, begin + STRETCH
    header[SINGLES + 1], header[_WORK], header[_NUM_ROWS] = num, work, num_rows


SINGLE_ITEMS = Kernel(_singles_body)


def _work(items: NDArray[np.int32]) -> int:
    """Pairs of query token and key in these items."""
    return int((items[:, 2] * (items[:, 4] - items[:, 3])).sum())


def _chunks(meta: AttentionMeta, seen: tuple[int, int], tokens: int) -> NDArray[np.int32]:
    """Work items of the sequences with several query tokens, those with most keys first. seen:
    (window, keys after its own position to which a query attends)."""
    window, ahead = seen
    starts, lens = meta.query_start.numpy(), meta.seq_lens.numpy()
    counts = np.where(lens > 0, np.diff(starts), 0)
    who = np.flatnonzero(counts > 1)
    parts = -(-counts[who] // tokens)
    each = np.repeat(np.arange(len(who)), parts)
    first = (np.arange(len(each)) - np.repeat(np.cumsum(parts) - parts, parts)) * tokens
    items = np.empty((len(each), ITEM_FIELDS), np.int32)
    items[:, 0] = who[each]
    items[:, 1] = starts[who][each] + first
    items[:, 2] = np.minimum(counts[who][each] - first, tokens)
    before = (lens - counts)[who][each] + first
    low = np.maximum(before + 1 - window, 0) if window else np.zeros_like(before)
    items[:, 3] = low - low % meta.block_size
    items[:, 4] = np.minimum(before + items[:, 2] + ahead, lens[who][each])
    items[:, 5] = 1
    items[:, 6] = before
    return np.ascontiguousarray(items[np.argsort(items[:, 3] - items[:, 4], kind="stable")])
