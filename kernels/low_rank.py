"""Low-rank products that are added to the outputs of linear layers: each row of a step may use
those of another adapter, or none.

Tables and rows are in memory at fixed addresses, so that recorded launches read what the current
step needs. A GPU reads copies of them in its own memory (``DeviceTable``, ``DeviceRows``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

NO_SLOT = -1  # in place of an adapter slot: the row has no adapter
MOST_ROWS = 32  # of a block
DEVICE_ROWS = 16  # the same on a GPU: the fewest that it multiplies at a time
RANKS = 16  # ranks that a GPU multiplies at a time
PANEL = 64  # outputs whose products are computed together
_TILE = 4  # rows that are multiplied together
RECORD_WORDS, ENTRY_WORDS, BLOCK_WORDS = 8, 2, 3


class LowRankProduct(NamedTuple):
    """What an adapter changes in some outputs y of a linear layer with inputs x:

    y * factors + added + scale * (x @ a.T) @ b.T

    All are contiguous. ``a`` and ``panels`` have x's dtype."""

    first: int  # the first of these outputs
    num_outputs: int
    a: torch.Tensor  # [rank, in]
    panels: torch.Tensor  # [panels, rank, PANEL]: b [outputs, rank] as `in_panels` returned it
    scale: float
    factors: torch.Tensor | None = None  # [outputs] float32
    added: torch.Tensor | None = None  # [outputs] float32

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def b(self) -> torch.Tensor:
        """[outputs, rank], a copy."""
        return self.panels.transpose(1, 2).reshape(-1, self.rank)[: self.num_outputs]

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self if isinstance(one, torch.Tensor))

    def record(self) -> tuple[int, ...]:
        """The integers that describe it to compiled code."""
        ends = (0 if one is None else one.data_ptr() for one in (self.factors, self.added))
        matrices = self.a.data_ptr(), self.panels.data_ptr()
        scale = int(np.float64(self.scale).view(np.int64))
        return (self.first, self.num_outputs, self.rank, *matrices, scale, *ends)


def records_of(products: Sequence[LowRankProduct]) -> NDArray[np.int64]:
    """The records of products [products, RECORD_WORDS], as a table has them."""
    return np.array([one.record() for one in products], np.int64)


def in_panels(b: torch.Tensor) -> torch.Tensor:
    """Divide [outputs, rank] into panels of outputs, [panels, rank, PANEL], padded with zeros."""
    num, rank = b.shape
    panels = b.new_zeros((-(-num // PANEL), rank, PANEL))
    whole = num // PANEL
    panels[:whole] = b[: whole * PANEL].view(whole, PANEL, rank).transpose(1, 2)
    if whole < len(panels):
        panels[whole, :, : num - whole * PANEL] = b[whole * PANEL :].T
    return panels


class DeviceTable(NamedTuple):
    """The products of one linear layer, by adapter slot, in the memory of a GPU."""

    entries: torch.Tensor  # [slots, 2] int64: number of products, address of records [products, 8]
    most_products: int  # of an adapter
    most_rank: int  # of a product

    @property
    def most_ranks(self) -> int:
        """Ranks of an adapter's products together, each rounded up to a multiple of RANKS."""
        return self.most_products * -(-self.most_rank // RANKS) * RANKS


class ProductTable:
    """The products of one linear layer, by adapter slot.

    ``entries`` [slots, 2] int64: number of products, and address of their records [products, 8].
    ``on_device``: what a GPU reads in place of them; its owner writes it."""

    on_device: DeviceTable | None = None

    def __init__(self, num_slots: int) -> None:
        self.entries: NDArray[np.int64] = np.zeros((num_slots, ENTRY_WORDS), dtype=np.int64)
        self._products: list[tuple[LowRankProduct, ...]] = [()] * num_slots
        self._records: list[NDArray[np.int64] | None] = [None] * num_slots

    def put(
        self,
        slot: int,
        products: Sequence[LowRankProduct],
        records: NDArray[np.int64] | None = None,
    ) -> None:
        """Set the products of a slot, whose outputs must not overlap. Nothing is copied. records:
        ``records_of(products)``, if they were made before."""
        if records is None:
            records = records_of(products)
        self._products[slot], self._records[slot] = tuple(products), records
        self.entries[slot] = len(products), records.ctypes.data

    def of(self, slot: int) -> tuple[LowRankProduct, ...]:
        """The products of a slot."""
        return self._products[slot]


class AdaptedRows:
    """Rows of a matrix sorted by adapter slot, in blocks of up to 32 rows with one adapter.

    ``words`` int64: number of blocks, address of the indices of rows, then for each block its
    slot, its first place in the indices, and its number of rows.
    ``head`` [3] int64: addresses of the words and of memory for the first halves of products, one
    row of floats for each index, and the floats of such a row."""

    def __init__(self, most_rows: int) -> None:
        self.words: NDArray[np.int64] = np.zeros(2 + BLOCK_WORDS * most_rows, dtype=np.int64)
        self.head: NDArray[np.int64] = np.array([self.words.ctypes.data, 0, 0], dtype=np.int64)
        self._order: NDArray[np.int64] = np.zeros(most_rows, dtype=np.int64)
        self._halves: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.words[1] = self._order.ctypes.data

    @property
    def num_blocks(self) -> int:
        return int(self.words[0])

    def clear(self) -> None:
        """Let no row have an adapter."""
        self.words[0] = 0

    def fill(self, slots: NDArray[np.integer], num_threads: int = 1, num_ranks: int = 0) -> None:
        """Set the adapter slot of each row [N]. num_threads: that share the blocks; num_ranks: for
        which there must be memory in each row of halves."""
        order = np.argsort(slots, kind="stable")
        order = order[np.count_nonzero(slots < 0) :]
        num = len(order)
        if num * num_ranks > len(self._halves):
            self._halves = np.zeros(num * num_ranks, dtype=np.float32)
        self.head[1:] = self._halves.ctypes.data, num_ranks
        self._order[:num] = order
        most = self._rows_of_block(num, num_threads)
        of_order = slots[order]
        ends = [*(np.flatnonzero(of_order[1:] != of_order[:-1]) + 1).tolist(), num] if num else []
        blocks, begin = [], 0
        for end in ends:
            slot = int(of_order[begin])
            for first in range(begin, end, most):
                blocks.append((slot, first, min(most, end - first)))
            begin = end
        if blocks:
            self.words[2 : 2 + BLOCK_WORDS * len(blocks)] = np.array(blocks, np.int64).reshape(-1)
        self.words[0] = len(blocks)

    def blocks(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The adapter slot of each block, and the indices of its rows."""
        end = 2 + BLOCK_WORDS * self.num_blocks
        for slot, first, count in self.words[2:end].reshape(-1, BLOCK_WORDS).tolist():
            yield slot, self._order[first : first + count]

    def _rows_of_block(self, num_rows: int, num_threads: int) -> int:
        most = -(-num_rows // (2 * num_threads * _TILE)) * _TILE
        return max(_TILE, min(most, MOST_ROWS))


class DeviceRows(AdaptedRows):
    """Rows of a matrix in the memory of a GPU.

    ``on_device`` int32: number of blocks, place of the first index of a row in this tensor, then
    blocks and indices as in ``words``."""

    def __init__(
        self,
        most_rows: int,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        upload: Callable[[NDArray[np.int32]], torch.Tensor],
    ) -> None:
        """zeros: allocates memory of the GPU; upload: copies an array to it."""
        super().__init__(most_rows)
        self.on_device = zeros((2 + (BLOCK_WORDS + 1) * most_rows,), torch.int32)
        self._upload = upload
        self._slots: NDArray[np.integer] = np.zeros(0, dtype=np.int32)  # those on the device

    def fill(self, slots: NDArray[np.integer], num_threads: int = 1, num_ranks: int = 0) -> None:
        """Set the adapter slot of each row [N]. Work queued earlier sees the former ones."""
        if np.array_equal(slots, self._slots):
            return
        super().fill(slots)
        end = 2 + BLOCK_WORDS * self.num_blocks
        num = np.count_nonzero(slots >= 0)
        words = np.concatenate([self.words[:end], self._order[:num]]).astype(np.int32)
        words[1] = end
        self.on_device[: len(words)].copy_(self._upload(words))
        self._slots = slots.copy()

    def _rows_of_block(self, num_rows: int, num_threads: int) -> int:
        return DEVICE_ROWS
