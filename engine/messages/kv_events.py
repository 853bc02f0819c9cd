"""Events of the prefix cache, for external routers and indexes."""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, array_like=True, frozen=True, tag="stored"):
    """Consecutive blocks of a sequence were cached. ``parent_hash``: hash of the previous block."""

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_ids: list[int]
    block_size: int  # tokens per block
    adapter: str | None = None
    group: int = 0  # group of layers, for models with different kinds of attention


class BlockRemoved(msgspec.Struct, array_like=True, frozen=True, tag="removed"):
    """A block was evicted, and no other cached block has its hash."""

    block_hash: bytes
    group: int = 0


class AllBlocksCleared(msgspec.Struct, array_like=True, frozen=True, tag="cleared"):
    """The prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events since the previous batch. Batches are numbered from 0."""

    sequence: int
    time: float  # seconds on the core's clock
    events: list[KVEvent]
