"""Remembers which hashes were evicted from the prefix cache last, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Generic, TypeVar

Value = TypeVar("Value")
Other = TypeVar("Other")
LEAST_KEPT = 1024  # evictions, also in a small pool
MOST_KEPT = 1 << 16  # 10 to 20 MB


class Latest(Generic[Value]):
    """A map from hashes to values that keeps at least the ``num_kept`` latest entries, and at most
    three times as many."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._new: dict[bytes, Value] = {}
        self._old: dict[bytes, Value] = {}

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())

    def get(self, key: bytes, default: Other) -> Value | Other:
        """The latest value of a hash; ``default`` if it has none, or if the map has dropped it."""
        return self._new[key] if key in self._new else self._old.get(key, default)

    def put(self, key: bytes, value: Value) -> None:
        """Set the value of a hash."""
        self.put_each((key,), value)

    def put_each(self, keys: Iterable[bytes], value: Value) -> None:
        """Set one value for at most ``num_kept`` hashes."""
        self._new.update(zip(keys, repeat(value)))
        if len(self._new) >= self._num_kept:
            self._old, self._new = self._new, {}


class Evictions:
    """The times at which hashes were last evicted, in seconds. ``now``: the present time, which the
    scheduler sets in each step.

    Evictions are only noted when they happen, in steps that decode too. They are sorted by hash
    when a time is looked up."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self._num_kept = min(max(num_blocks, LEAST_KEPT), MOST_KEPT)
        self._times: Latest[float] = Latest(self._num_kept)
        self._unsorted: deque[tuple[float, Sequence[bytes]]] = deque()
        self._num_unsorted = 0

    def add_each(self, keys: Sequence[bytes]) -> None:
        """Note that the last blocks with these hashes are evicted now."""
        unsorted = self._unsorted
        if len(keys) > self._num_kept:
            keys = keys[-self._num_kept :]
        unsorted.append((self.now, keys))
        self._num_unsorted += len(keys)
        while self._num_unsorted - len(unsorted[0][1]) >= self._num_kept:
            self._num_unsorted -= len(unsorted.popleft()[1])

    def age(self, key: bytes) -> float | None:
        """Seconds since this hash was evicted; ``None`` if it was not, or was forgotten."""
        for time, keys in self._unsorted:
            self._times.put_each(keys, time)
        self._unsorted.clear()
        self._num_unsorted = 0
        evicted = self._times.get(key, None)
        return None if evicted is None else max(0.0, self.now - evicted)
