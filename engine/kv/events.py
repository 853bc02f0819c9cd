"""Collects events of the prefix cache and publishes them in numbered batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)


class Publisher(Protocol):
    """Receives event batches. ``publish`` must not block: it is called between two steps."""

    def publish(self, batch: KVEventBatch) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Collects events of the prefix cache and publishes them as one batch per step. A hash may be
    ``stored`` again and is ``removed`` when no block has it, so subscribers should keep a set."""

    def __init__(
        self, publisher: Publisher, *, block_size: int, clock: Callable[[], float]
    ) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._clock = clock
        self._events: list[KVEvent] = []
        self._num_batches = 0

    def stored(
        self,
        hashes: Sequence[bytes],
        parent: bytes | None,
        tokens: array[int],
        adapter: str | None,
        group: int,
    ) -> None:
        """Add an event: consecutive blocks with these hashes and tokens are now cached. ``parent``:
        hash of the block before the first, ``None`` at the start of a sequence."""
        self._events.append(
            BlockStored(list(hashes), parent, tokens.tolist(), self._block_size, adapter, group)
        )

    def removed(self, key: bytes) -> None:
        """Add an event: no block with this cache key (hash and group) is cached any more."""
        self._events.append(BlockRemoved(*split_key(key)))

    def cleared(self) -> None:
        """Add an event: the cache was emptied."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish the events since the last call, if there are any."""
        if not self._events:
            return
        batch = KVEventBatch(self._num_batches, self._clock(), self._events)
        self._events = []
        self._num_batches += 1
        self._publisher.publish(batch)

    def close(self) -> None:
        """Publish the remaining events and close the publisher."""
        self.flush()
        self._publisher.close()


def split_key(key: bytes) -> tuple[bytes, int]:
    """Split a cache key into block hash and group of layers. Hashes have an even number of bytes; a
    key with an odd number ends with the group, any other key is a hash in group 0."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)
