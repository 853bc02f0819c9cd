"""BlockStore: keeps copies of KV blocks outside the pool, under the keys of the prefix cache.

A key is made of the hash of all tokens up to the end of a block, and of the group of layers, so
equal keys mean equal content. Pieces of snapshots of recurrent states have keys, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]
"""Blocks as bytes: [n, ``block_bytes``], contiguous."""


class StoreIdentity(NamedTuple):
    """What the blocks of a store belong to. Blocks of another identity are never served.

    ``namespace``: hex digest of model, weights, dtypes, block size and layout. ``block_bytes``:
    bytes of a block in one rank. ``rank``, ``num_ranks``: of the worker whose blocks these are."""

    namespace: str
    block_bytes: int
    rank: int = 0
    num_ranks: int = 1


class BlockStore(Protocol):
    """Keeps copies of blocks. All methods may be called by several threads at once.

    ``name`` is used in statistics and errors. A store may evict blocks on its own. If it raises,
    the error is logged and counted, and requests compute what it does not supply."""

    name: str

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys it has. Answered from memory, since the scheduler waits for it."""

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        """Copy the blocks with these keys into ``rows``. False: it does not have the block, or the
        block was damaged and is dropped; its row then has arbitrary content."""

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        """Keep copies of these blocks. False: a block is not kept, for lack of room or because of
        an error. ``rows`` may change after the call."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Never serve these blocks again, because their content is wrong."""

    def clear(self) -> None:
        """Never serve any present block again, because the weights have changed."""

    def counts(self) -> Mapping[str, int]:
        """Counters: ``num_blocks`` it has and ``num_bytes`` they take now; others since its
        start, such as ``evicted``, ``damaged``, ``refused``."""

    def close(self) -> None:
        """Write what is pending and release files and memory. May be repeated."""
