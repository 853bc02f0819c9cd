"""Splits a step's attention into work items of similar size, once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.attention.softmax import STRETCH, TAIL
from kernels.meta import AttentionMeta

ITEM_FIELDS = 6  # sequence, first row, rows, first key, end of keys, items that share the row


class Items(NamedTuple):
    """A table of work items: `num` rows of ITEM_FIELDS int32 at an address."""

    address: int
    num: int
    work: int  # query tokens times keys
    owned: NDArray[np.int32]  # keeps the memory


# Indices in the header, the int64 addresses and numbers that bodies read. The address of a recorded
# step's header stays the same for later steps.
SINGLES = 0  # address of the items of single tokens, and their number
ROOM = 2  # address of partial sums of single tokens, [items, heads, head_dim + TAIL] float32
# Address of [S, KV heads] int64, zero between operations: number of finished items of a sequence,
# by KV head if heads are separate items.
ARRIVALS = 3
FIRST_ITEMS = 4  # address of [S] int64, index of a sequence's first item of a single token
CHUNKS = 5  # address of the items of chunks, and their number


class Heads(NamedTuple):
    """The heads of one layer."""

    num: int
    group: int  # query heads per KV head
    size: int


class AttentionPlan(NamedTuple):
    """The work items of a step's attention: for sequences with one query token, and for chunks."""

    header: NDArray[np.int64]
    singles: Items
    chunks: Items
    num_rows: int  # rows of the output that are written
    owned: tuple[NDArray, ...]

    def address(self, part: int) -> int:
        """Address of a header field, for kernel bodies. part: a constant such as ``SINGLES``."""
        return int(self.header.ctypes.data) + 8 * part


def make_plan(meta: AttentionMeta, window: int, heads: Heads, tokens: int) -> AttentionPlan:
    """Plan a step's attention. The keys of sequences with one query token are split among items;
    chunks are split into items of `tokens` query tokens."""
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
        """Work items of sequences with one query token. Each item covers up to ``STRETCH`` keys."""
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
        """Work items of the sequences with several query tokens, those with most keys first."""
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
    """Enumerate the parts of all sequences, where sequence i has ``parts[i]`` parts. Returns two
    arrays with an entry for each part: its sequence, and its index within the sequence."""
    each = np.repeat(np.arange(len(parts)), parts)
    return each, np.arange(len(each)) - np.repeat(np.cumsum(parts) - parts, parts)
