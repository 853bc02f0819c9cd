"""EncoderCache: whose encoder output is kept on the device, and for how long. The decision half.

absent ──add──> used ──last user gone──> idle ──room is needed──> evicted (told once)
                  ^                        │
                  └──────── used again ────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages.requests import MediaItem


@dataclass(slots=True, eq=False)
class Use:
    """One request's hold on one entry."""

    item: MediaItem
    is_over: bool = False


@dataclass(slots=True)
class Entry:
    """One media item's output; ``num_tokens`` of the cache are its."""

    num_tokens: int
    uses: set[Use] = field(default_factory=set)


class EncoderCache:
    """Entries by content hash. Sizes are in tokens; the worker keeps one embedding for each."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.entries: dict[str, Entry] = {}
        self.idle: dict[str, None] = {}  # entries without a user, longest idle first
        self.num_used = 0  # tokens of entries with users
        self._num_idle = 0
        self._evicted: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    @property
    def num_available(self) -> int:
        """Tokens that entries could have which nobody uses now."""
        return self.num_tokens - self.num_used

    def is_used(self, key: str) -> bool:
        """Does somebody hold the entry, so that it takes no room to hold it too?"""
        return key in self.entries and key not in self.idle

    def use(self, item: MediaItem) -> Use:
        """Hold the item's entry, which is made if there is none; idle ones make room."""
        entry = self.entries.get(item.hash)
        if entry is None:
            self._make_room(item.length)
            entry = self.entries[item.hash] = Entry(item.length)
        elif item.hash in self.idle:
            del self.idle[item.hash]
            self._num_idle -= entry.num_tokens
        if not entry.uses:
            self.num_used += entry.num_tokens
        use = Use(item)
        entry.uses.add(use)
        return use

    def end(self, use: Use) -> None:
        """Let go; the entry of the last user stays as long as nobody needs the room."""
        if use.is_over:
            return
        use.is_over = True
        entry = self.entries[use.item.hash]
        entry.uses.discard(use)
        if not entry.uses:
            self.num_used -= entry.num_tokens
            self._num_idle += entry.num_tokens
            self.idle[use.item.hash] = None

    def discard(self, key: str) -> None:
        """The entry is not what it should be: whoever uses it must have it made again."""
        entry = self.entries.get(key)
        if entry is None:
            return
        for use in list(entry.uses):
            self.end(use)
        self._evict(key)

    def take_evicted(self) -> list[str]:
        """What the worker must let go of, told once. It does so before it encodes anything."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _make_room(self, num_tokens: int) -> None:
        while self.num_used + self._num_idle + num_tokens > self.num_tokens:
            self._evict(next(iter(self.idle)))

    def _evict(self, key: str) -> None:
        self._num_idle -= self.entries.pop(key).num_tokens
        del self.idle[key]
        self._evicted.append(key)
