"""PoolBlocks: copies blocks of the KV pool to rows of bytes on the host, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch

from engine.kv_transfer.stores import Rows
from engine.worker.platform import Mark, Platform


class Home(Protocol):
    """Waits until blocks that were read are on the host, in any thread, and returns the rows
    ``part`` of them: [n, ``num_bytes``] uint8."""

    def __call__(self, part: slice = slice(None)) -> Rows: ...


class PoolBlocks:
    """The blocks of the pool as bytes. ``pieces``: tensors [blocks, bytes] uint8 that together hold
    the content of each block.

    On a GPU, blocks are gathered by the stream of the steps, in the order of plans, and are copied
    to the host by another one, while steps go on; rows are copied to blocks by another one, too."""

    def __init__(self, pieces: Sequence[torch.Tensor], platform: Platform) -> None:
        self._platform = platform
        self._on_host = [p.numpy() for p in pieces] if platform.shares_memory else None
        self._pieces = list(pieces)
        if self._on_host is None and all(map(_has_words, pieces)):  # 8 times fewer elements
            self._pieces = [piece.view(torch.int64) for piece in pieces]
        self._dtype = self._pieces[0].dtype
        ends = np.cumsum([0, *(piece.shape[1] for piece in self._pieces)]).tolist()
        self._columns = [slice(*ends[n : n + 2]) for n in range(len(pieces))]
        self.num_bytes = int(ends[-1]) * self._dtype.itemsize

    def rows(self, num: int) -> Rows:
        """Memory for this many blocks, from which a device can copy."""
        if self._on_host is not None:
            return np.empty((num, self.num_bytes), dtype=np.uint8)
        pinned = self._platform.pinned(num * self.num_bytes)
        return pinned.numpy().reshape(num, self.num_bytes)

    def read(self, blocks: Sequence[int]) -> Home:
        """Copy the present contents of these blocks. They are on the host once the function that is
        returned has brought them."""
        if self._on_host is None:
            return self._read_device(blocks)
        rows = self.rows(len(blocks))
        for columns, own in zip(self._columns, self._on_host, strict=True):
            part = rows[:, columns]
            for place, first, length in runs(blocks):
                part[place : place + length] = own[first : first + length]

        def here(part: slice = slice(None)) -> Rows:
            return rows[part]

        return here

    def write(self, blocks: Sequence[int], rows: Rows, after: Mark) -> None:
        """Set the contents of these blocks, and wait until that is done. ``after``: steps before
        this mark may still use what the blocks contain."""
        after.synchronize()
        if self._on_host is None:
            self._write_device(blocks, rows)
            return
        for columns, own in zip(self._columns, self._on_host, strict=True):
            part = rows[:, columns]
            for place, first, length in runs(blocks):
                own[first : first + length] = part[place : place + length]

    # -- on a device

    def _read_device(self, blocks: Sequence[int]) -> Home:
        index = self._platform.upload(np.array(blocks, dtype=np.int64))
        gathered = torch.cat([piece.index_select(0, index) for piece in self._pieces], dim=1)
        done = self._platform.mark()

        def home(part: slice = slice(None)) -> Rows:
            done.synchronize()
            wanted = gathered[part].view(torch.uint8)
            rows = self.rows(len(wanted))
            with self._platform.current(), self._platform.aside():
                torch.from_numpy(rows).copy_(wanted, non_blocking=True)
                self._platform.mark().synchronize()
            return rows

        return home

    @torch.inference_mode()
    def _write_device(self, blocks: Sequence[int], rows: Rows) -> None:
        with self._platform.current(), self._platform.aside():
            index = self._platform.upload(np.array(blocks, dtype=np.int64))
            content = self._platform.upload(rows).view(self._dtype)
            for columns, piece in zip(self._columns, self._pieces, strict=True):
                piece.index_copy_(0, index, content[:, columns])
            self._platform.mark().synchronize()


def _has_words(piece: torch.Tensor) -> bool:
    """True if the bytes of each block can be copied as words of 8."""
    begins = (piece.data_ptr(), piece.storage_offset(), piece.stride(0), piece.shape[1])
    return piece.stride(1) == 1 and all(each % 8 == 0 for each in begins)


def runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranges of consecutive blocks: index of the first one in ``blocks``, its number, length."""
    found = []
    for _, group in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        pairs = list(group)
        found.append((*pairs[0], len(pairs)))
    return found
