"""Events of the prefix cache, for external routers and indexes, in the form of vLLM's.

Each is a map with its name as ``type``; docs/internals/routers.md lists who reads which field."""

from __future__ import annotations

import msgspec

ExtraKey = str | tuple[str, int]
MEDIUM = "GPU"  # what routers call the memory in which the model computes, on any device


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of a sequence were cached. A hash is the last eight bytes of the block's
    hash as an integer, big-endian."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first
    token_ids: list[int]
    block_size: int  # tokens per block
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[ExtraKey] | None] | None = None
    """For each block what its hash depends on in addition to tokens: the adapter's name; hashes of
    media that begin in it, with their offsets; in the first block the cache salt."""
    group_idx: int = 0  # group of layers, for models with different kinds of attention
    kv_cache_spec_kind: str = "full_attention"
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks were evicted, and no other cached blocks have their hashes."""

    block_hashes: list[int]
    medium: str = MEDIUM
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events since the previous batch. ``ts``: seconds since 1970. ``data_parallel_rank``:
    number of the core among several."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0
