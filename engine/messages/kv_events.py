"""What happens in the prefix cache, for routers and indexes outside."""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, array_like=True, frozen=True, tag="stored"):
    """Consecutive blocks became shareable. ``parent_hash``: that of the one before, if any."""

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_ids: list[int]
    block_size: int  # tokens per block
    adapter: str | None = None
    group: int = 0  # which layers, where layers have different needs


class BlockRemoved(msgspec.Struct, array_like=True, frozen=True, tag="removed"):
    """The content of this hash was evicted; no other block has it."""

    block_hash: bytes
    group: int = 0


class AllBlocksCleared(msgspec.Struct, array_like=True, frozen=True, tag="cleared"):
    """The cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events since the batch before. Sequence numbers count batches from 0."""

    sequence: int
    time: float  # clock of the core, seconds
    events: list[KVEvent]
