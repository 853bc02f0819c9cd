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
    """Where batches go. It must not block: it is called between two steps."""

    def publish(self, batch: KVEventBatch) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """One batch a step, if anything happened. A listener can keep a plain set of hashes:
    ``stored`` may repeat, and ``removed`` is sent only when no block holds the content any more."""

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
        """These blocks, which follow each other, can be found from now on."""
        self._events.append(
            BlockStored(list(hashes), parent, tokens.tolist(), self._block_size, adapter, group)
        )

    def removed(self, key: bytes) -> None:
        """Nothing can be found under this key any more."""
        self._events.append(BlockRemoved(*split_key(key)))

    def cleared(self) -> None:
        """Nothing can be found under any key."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Hand over what has happened."""
        if not self._events:
            return
        batch = KVEventBatch(self._num_batches, self._clock(), self._events)
        self._events = []
        self._num_batches += 1
        self._publisher.publish(batch)

    def close(self) -> None:
        """Hand over the rest and close the publisher."""
        self.flush()
        self._publisher.close()


def split_key(key: bytes) -> tuple[bytes, int]:
    """The hash and the group of a key. Hashes have an even length, so an odd one has a group."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)
