"""A reader of adapters without files: a test decides what is on its disk, and when it is read."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from engine.lora.decide import AdapterSlots
from engine.lora.library import AdapterLibrary
from engine.lora.loading import Order
from engine.lora.store import AdapterStore


class Copy(NamedTuple):
    """An adapter in the host's memory."""

    digest: str
    rank: int = 8
    num_bytes: int = 100


def digest_of(content: str) -> str:
    return sha256(content.encode()).hexdigest()


class FakeReading:
    def __init__(self, reader: FakeReader, order: Order) -> None:
        self.order = order
        self._reader = reader
        self._content: str | Exception | None = None
        self.is_alone = False

    def wait(self) -> None:
        """Find what is on the disk at that time."""
        if self._content is None:
            missing = FileNotFoundError(f"no directory {self.order.path}")
            self._content = self._reader.disk.get(self.order.path, missing)

    def poll(self) -> Copy | None:
        if self._content is None and self._reader.is_slow:
            return None
        self.wait()
        if isinstance(self._content, Exception):
            raise self._content
        return Copy(digest_of(self._content or ""))

    def hurry(self, is_alone: bool) -> None:
        self.is_alone = is_alone


class FakeReader:
    """``disk``: contents, or errors, by path. While ``is_slow``, nothing is read unless a test
    calls ``finish``."""

    def __init__(self, *, is_slow: bool = False, **disk: str | Exception) -> None:
        self.disk = disk
        self.is_slow = is_slow
        self.readings: list[FakeReading] = []

    @property
    def paths(self) -> list[str]:
        """What was read, in order."""
        return [reading.order.path for reading in self.readings]

    def submit(self, order: Order) -> FakeReading:
        self.readings.append(FakeReading(self, order))
        return self.readings[-1]

    def finish(self, path: str) -> None:
        for reading in self.readings:
            if reading.order.path == path:
                reading.wait()

    def shutdown(self) -> None:
        pass


def slots_of(
    reader: FakeReader, max_loras: int = 2, *, most_copies: int | None = None, **options
) -> AdapterSlots:
    """The scheduler's half of the feature, with ``most_copies`` in the host's memory."""
    options = {"most_pinned": max_loras - 1, **options}
    store: AdapterStore[Copy] = AdapterStore(most_copies)
    return AdapterSlots(max_loras, AdapterLibrary(reader, store, **options))
