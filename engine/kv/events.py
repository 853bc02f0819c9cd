"""Collects events of the prefix cache and publishes them in numbered batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config.kv_groups import FULL, Group
from engine.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    KVEvent,
    KVEventBatch,
)

HASH_BYTES = 8


class Publisher(Protocol):
    """Receives event batches. ``publish`` must not block: it is called between two steps."""

    def publish(self, batch: KVEventBatch) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Collects events of the prefix cache and publishes them as one batch per step. A hash may be
    ``stored`` again and is ``removed`` when no block has it, so subscribers should keep a set.

    ``clock``: seconds since 1970. ``name_of``: the name of an adapter, by its digest. ``rank``:
    number of this core among several."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        block_size: int,
        clock: Callable[[], float],
        groups: Sequence[Group] = (FULL,),
        name_of: Callable[[str], str] = str,
        rank: int = 0,
    ) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._clock = clock
        self._groups = groups
        self._name_of = name_of
        self._rank = rank
        self._events: list[KVEvent] = []

    def stored(
        self,
        hashes: Sequence[bytes],
        parent: bytes | None,
        tokens: array[int],
        group: int,
        *,
        adapter: str | None = None,
        salt: str | None = None,
        media: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Add an event: consecutive blocks with these hashes and tokens are now cached. ``parent``:
        hash of the block before the first, ``None`` at the start of a sequence. ``adapter``: its
        digest. ``salt``: the request's cache salt. ``media``: offset in ``tokens`` and hash of
        each media item that begins there."""
        name = None if adapter is None else self._name_of(adapter)
        layers = self._groups[group]
        self._events.append(
            BlockStored(
                [number_of(each) for each in hashes],
                None if parent is None else number_of(parent),
                tokens.tolist(),
                self._block_size,
                lora_name=name,
                extra_keys=self._extra_keys(len(hashes), name, None if parent else salt, media),
                group_idx=group,
                kv_cache_spec_kind=_kind_of(layers),
                kv_cache_spec_sliding_window=layers.window or None,
            )
        )

    def _extra_keys(
        self,
        num_blocks: int,
        adapter: str | None,
        salt: str | None,
        media: Sequence[tuple[int, str]],
    ) -> list[list[ExtraKey] | None] | None:
        """What each block's hash depends on in addition to its tokens; ``None`` if on nothing."""
        if adapter is None and salt is None and not media:
            return None
        keys: list[list[ExtraKey]] = [[] for _ in range(num_blocks)]
        for each in keys:
            each += [] if adapter is None else [adapter]
        for offset, media_hash in media:
            index, within = divmod(offset, self._block_size)
            keys[index].append((media_hash, within))
        keys[0] += [] if salt is None else [salt]
        return [each or None for each in keys]

    def removed(self, key: bytes) -> None:
        """Add an event: no block with this cache key (hash and group) is cached any more."""
        block_hash, group = split_key(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(number_of(block_hash))
        else:
            self._events.append(BlockRemoved([number_of(block_hash)], group_idx=group))

    def cleared(self) -> None:
        """Add an event: the cache was emptied."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish the events since the last call, if there are any."""
        if not self._events:
            return
        batch = KVEventBatch(self._clock(), self._events, self._rank)
        self._events = []
        self._publisher.publish(batch)

    def close(self) -> None:
        """Publish the remaining events and close the publisher."""
        self.flush()
        self._publisher.close()


def split_key(key: bytes) -> tuple[bytes, int]:
    """Split a cache key into block hash and group of layers. Hashes have an even number of bytes; a
    key with an odd number ends with the group, any other key is a hash in group 0."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)


def number_of(block_hash: bytes) -> int:
    """The hash of a block as events have it."""
    return int.from_bytes(block_hash[-HASH_BYTES:], "big")


def _kind_of(group: Group) -> str:
    if not group.window:
        return "full_attention"
    return "chunked_local_attention" if group.is_chunked else "sliding_window"
