"""Cutting a step's attention into items of similar work, once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.meta import AttentionMeta

ITEM_FIELDS = 6  # sequence, first row, rows, first key, end of keys, items that share the row
MAX_TOKENS = 8  # query tokens an item

_MIN_KEYS = 256  # keys an item keeps to itself before its sequence is cut
_ITEMS_A_THREAD = 4


class Plan(NamedTuple):
    """Addresses of what a body reads; `owned` keeps the memory."""

    items: int  # [num_items, ITEM_FIELDS] int32
    num_items: int
    arrivals: int  # [S] int64, zero between operations: items of a sequence that are done
    first_items: int  # [S] int64: where a sequence's items start
    is_cut: bool  # whether items share rows
    num_rows: int  # rows of the output that are written
    work: int  # query tokens times keys
    owned: tuple[NDArray, ...]


def make_plan(meta: AttentionMeta, window: int, threads: int) -> Plan:
    """One token against many keys is cut by keys, many tokens are cut by tokens."""
    starts, lens = meta.query_start.numpy(), meta.seq_lens.numpy()
    counts = np.where(lens > 0, np.diff(starts), 0)
    cut = _Cutter(starts, counts, lens, window, meta.block_size)
    items = np.concatenate((cut.chunks(), cut.singles(threads)))
    arrivals, first_items = np.zeros(len(lens), np.int64), np.zeros(len(lens), np.int64)
    first_items[items[::-1, 0]] = np.arange(len(items) - 1, -1, -1)
    return Plan(
        items.ctypes.data,
        len(items),
        arrivals.ctypes.data,
        first_items.ctypes.data,
        bool((items[:, 5] > 1).any()),
        int(counts.sum()),
        int((items[:, 2] * (items[:, 4] - items[:, 3])).sum()),
        (items, arrivals, first_items),
    )


class _Cutter(NamedTuple):
    starts: NDArray[np.int32]  # [S + 1]
    counts: NDArray[np.int32]  # [S]: query tokens
    lens: NDArray[np.int32]  # [S]: keys
    window: int
    block: int

    def singles(self, threads: int) -> NDArray[np.int32]:
        """Items of the sequences with one query token, each a whole number of blocks of keys."""
        who = np.flatnonzero(self.counts == 1)
        high = self.lens[who]
        low = np.maximum(high - self.window, 0) if self.window else np.zeros_like(high)
        aligned = low - low % self.block
        most = max(_MIN_KEYS, int((high - aligned).sum()) // (threads * _ITEMS_A_THREAD))
        most += -most % self.block
        parts = -((aligned - high) // most)
        each, part = _repeat(parts)
        items = np.empty((len(each), ITEM_FIELDS), np.int32)
        items[:, 0] = who[each]
        items[:, 1] = self.starts[who][each]
        items[:, 2] = 1
        begin = aligned[each] + part * most
        items[:, 3] = np.maximum(begin, low[each])
        items[:, 4] = np.minimum(begin + most, high[each])
        items[:, 5] = parts[each]
        return items

    def chunks(self) -> NDArray[np.int32]:
        """Items of the sequences with several query tokens, the longest first."""
        who = np.flatnonzero(self.counts > 1)
        each, part = _repeat(-(-self.counts[who] // MAX_TOKENS))
        first = part * MAX_TOKENS
        items = np.empty((len(each), ITEM_FIELDS), np.int32)
        items[:, 0] = who[each]
        items[:, 1] = self.starts[who][each] + first
        items[:, 2] = np.minimum(self.counts[who][each] - first, MAX_TOKENS)
        before = (self.lens - self.counts)[who][each] + first
        items[:, 3] = np.maximum(before + 1 - self.window, 0) if self.window else 0
        items[:, 4] = before + items[:, 2]
        items[:, 5] = 1
        return items[::-1]


def _repeat(parts: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For each part of each thing: which thing, which part of it."""
    each = np.repeat(np.arange(len(parts)), parts)
    return each, np.arange(len(each)) - np.repeat(np.cumsum(parts) - parts, parts)
