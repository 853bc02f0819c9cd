"""Remembers which hashes were evicted from the prefix cache last, and when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")
Other = TypeVar("Other")
LEAST_KEPT = 1024  # evictions, also in a small pool
MOST_KEPT = 1 << 16  # 10 to 20 MB


class Latest(Generic[Value]):
    """A map from hashes to values that keeps at least the ``num_kept`` latest entries, and at most
    twice as many."""

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
        """Set one value for several hashes."""
        new, num_kept = self._new, self._num_kept
        for key in keys:
            new[key] = value
            if len(new) >= num_kept:
                self._old = new
                new = self._new = {}


class Evictions:
    """The time at which each block hash was last evicted, in seconds. ``now``: the present time,
    which the scheduler sets in each step."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self._times: Latest[float] = Latest(min(max(num_blocks, LEAST_KEPT), MOST_KEPT))

    def add(self, key: bytes) -> None:
        """Remember that the last block with this hash is evicted now."""
        self._times.put(key, self.now)

    def add_each(self, keys: Iterable[bytes]) -> None:
        """``add`` each of these hashes."""
        self._times.put_each(keys, self.now)

    def age(self, key: bytes) -> float | None:
        """Seconds since this hash was evicted; None if it was not, or if it was forgotten."""
        time = self._times.get(key, None)
        return None if time is None else max(0.0, self.now - time)
