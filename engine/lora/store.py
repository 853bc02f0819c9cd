"""AdapterStore: the adapters in the host's memory, which scheduler and worker share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.errors import ConfigError


class HostCopy(Protocol):
    """An adapter in the host's memory, read and checked: what a loader makes of its files."""

    @property
    def digest(self) -> str:
        """sha256 of all that changes results, in hexadecimal digits."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


C = TypeVar("C", bound=HostCopy)


class AdapterStore(Generic[C]):
    """Adapters by digest. Only the thread of the core uses it.

    The scheduler's half of the feature adds and drops copies; the worker's half takes those that a
    plan loads into a slot, which are there until the plan's requests have ended."""

    def __init__(self, max_adapters: int | None = None, max_bytes: int | None = None) -> None:
        """max_adapters, max_bytes: limits that ``trim`` keeps; ``None``: no limit. Raises
        ``ConfigError`` for a limit below 1."""
        for name, limit in (("max_cpu_loras", max_adapters), ("max_bytes", max_bytes)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} is {limit}, must be at least 1")
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self.on_drop: Callable[[str], object] = lambda digest: None
        self._copies: dict[str, C] = {}  # least recently used first
        self.num_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def copy_of(self, digest: str) -> C:
        """The adapter with this digest."""
        return self._copies[digest]

    def take(self, digest: str) -> C:
        """The adapter with this digest, which becomes the most recently used."""
        copy = self._copies[digest] = self._copies.pop(digest)
        return copy

    def add(self, copy: C) -> None:
        """Add an adapter as the most recently used, in place of one with the same digest."""
        if (old := self._copies.pop(copy.digest, None)) is not None:
            self.num_bytes -= old.num_bytes
        self._copies[copy.digest] = copy
        self.num_bytes += copy.num_bytes

    def has_room(
        self, num_bytes: int, is_needed: Callable[[str], bool], coming: Sequence[int] = ()
    ) -> bool:
        """True if another adapter of ``num_bytes`` fits next to those that ``is_needed`` names by
        their digests, and those of the sizes in ``coming`` that are about to be added. One that is
        larger than the limit fits if there is no other."""
        sizes = [copy.num_bytes for digest, copy in self._copies.items() if is_needed(digest)]
        sizes += coming
        return (self._max_adapters is None or len(sizes) < self._max_adapters) and (
            not sizes or self._max_bytes is None or sum(sizes) + num_bytes <= self._max_bytes
        )

    def trim(self, is_needed: Callable[[str], bool]) -> int:
        """Drop the least recently used adapters that are not needed, until the limits are kept.
        Returns how many were dropped."""
        dropped = 0
        for digest in [each for each in self._copies if not is_needed(each)]:
            if not self.is_over:
                break
            self.drop(digest)
            dropped += 1
        return dropped

    def drop(self, digest: str) -> None:
        self.num_bytes -= self._copies.pop(digest).num_bytes
        self.on_drop(digest)

    @property
    def is_over(self) -> bool:
        """True if there are more adapters than the limits allow, and not only one."""
        return len(self._copies) > 1 and (
            (self._max_adapters is not None and len(self._copies) > self._max_adapters)
            or (self._max_bytes is not None and self.num_bytes > self._max_bytes)
        )
