"""Cutting a step's attention into items of similar work, once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.attention.softmax import STRETCH, TAIL
from kernels.meta import AttentionMeta

ITEM_FIELDS = 6  # sequence, first row, rows, first key, end of keys, items that share the row


class Items(NamedTuple):
    """Rows of ITEM_FIELDS int32 at an address."""

    address: int
    num: int
    work: int  # query tokens times keys
    owned: NDArray[np.int32]  # keeps the memory


# The header: what the bodies read of a plan, int64 addresses and numbers. A recorded step
# keeps the place of its header, whatever is planned for the next one.
SINGLES = 0  # address of the items, and their number
ROOM = 2  # address of sums of singles that share rows, [items, heads, head_dim + BEHIND] float32
# Address of [S, key heads] int64, zero between operations: items of a sequence that are done, by
# key head where they are computed apart.
ARRIVALS = 3
FIRST_ITEMS = 4  # address of [S] int64: where a sequence's items start among the singles
CHUNKS = 5  # address of the items, and their number


class Heads(NamedTuple):
    """The heads of one layer."""

    num: int
    group: int  # query heads per key head
    size: int


class AttentionPlan(NamedTuple):
    """What a step's attention is cut into; sequences of one query token apart from the others."""

    header: NDArray[np.int64]
    singles: Items
    chunks: Items
    num_rows: int  # rows of the output that are written
    owned: tuple[NDArray, ...]

    def address(self, part: int) -> int:
        """Address of a part of the header."""
        return int(self.header.ctypes.data) + 8 * part


def make_plan(meta: AttentionMeta, window: int, heads: Heads, tokens: int) -> AttentionPlan:
    """One token against many keys is cut by keys, many tokens into items of `tokens`."""
    starts, lens = meta.query_start.numpy(), meta.seq_lens.numpy()
    counts = np.where(lens > 0, np.diff(starts), 0)
    cut = _Cutter(starts, counts, lens, window, meta.block_size)
    singles = cut.singles()
    arrivals = np.zeros(len(lens) * (heads.num // heads.group), np.int64)
    first_items = np.zeros(len(lens), np.int64)
    first_items[singles[::-1, 0]] = np.arange(len(singles) - 1, -1, -1)
    one = _items(singles)
    many = _items(cut.chunks(tokens) if meta.max_query_len > 1 else singles[:0])
    is_cut = bool((singles[:, 5] > 1).any())
    room = np.empty(len(singles) * heads.num * (heads.size + TAIL) if is_cut else 0, np.float32)
    places = room.ctypes.data, arrivals.ctypes.data, first_items.ctypes.data
    header = np.array([one.address, one.num, *places, many.address, many.num], np.int64)
    return AttentionPlan(header, one, many, int(counts.sum()), (arrivals, first_items, room))


def _items(rows: NDArray[np.int32]) -> Items:
    work = int((rows[:, 2] * (rows[:, 4] - rows[:, 3])).sum())
    return Items(rows.ctypes.data, len(rows), work, rows)


class _Cutter(NamedTuple):
    starts: NDArray[np.int32]  # [S + 1]
    counts: NDArray[np.int32]  # [S]: query tokens
    lens: NDArray[np.int32]  # [S]: keys
    window: int
    block: int

    def singles(self) -> NDArray[np.int32]:
        """Items of the sequences with one query token, a stretch of keys each."""
        who = np.flatnonzero(self.counts == 1)
        high = self.lens[who]
        low = np.maximum(high - self.window, 0) if self.window else np.zeros_like(high)
        first = low - low % STRETCH
        parts = -((first - high) // STRETCH)
        each, part = _repeat(parts)
        items = np.empty((len(each), ITEM_FIELDS), np.int32)
        items[:, 0] = who[each]
        items[:, 1] = self.starts[who][each]
        items[:, 2] = 1
        begin = first[each] + part * STRETCH
        items[:, 3] = np.maximum(begin, low[each])
        items[:, 4] = np.minimum(begin + STRETCH, high[each])
        items[:, 5] = parts[each]
        return items

    def chunks(self, tokens: int) -> NDArray[np.int32]:
        """Items of the other sequences, the longest first."""
        who = np.flatnonzero(self.counts > 1)
        each, part = _repeat(-(-self.counts[who] // tokens))
        first = part * tokens
        items = np.empty((len(each), ITEM_FIELDS), np.int32)
        items[:, 0] = who[each]
        items[:, 1] = self.starts[who][each] + first
        items[:, 2] = np.minimum(self.counts[who][each] - first, tokens)
        before = (self.lens - self.counts)[who][each] + first
        low = np.maximum(before + 1 - self.window, 0) if self.window else np.zeros_like(before)
        items[:, 3] = low - low % self.block
        items[:, 4] = before + items[:, 2]
        items[:, 5] = 1
        return np.ascontiguousarray(items[np.argsort(items[:, 3] - items[:, 4], kind="stable")])


def _repeat(parts: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For each part of each thing: which thing, which part of it."""
    each = np.repeat(np.arange(len(parts)), parts)
    return each, np.arange(len(each)) - np.repeat(np.cumsum(parts) - parts, parts)
