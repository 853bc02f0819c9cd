"""Reads adapters in threads, so that no step waits for a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from engine.lora.store import HostCopy

NUM_THREADS = 2  # so that a slow disk or a download does not hold up all others


class Order(NamedTuple):
    """What to read: a directory or a repository, or the bytes of an adapter's files."""

    name: str
    path: str = ""
    files: Mapping[str, bytes] | None = None  # by file name; in place of ``path``
    within: str | None = None  # directory outside of which nothing may be read


class Reading(Protocol):
    """An adapter that is being read, or has been."""

    def poll(self) -> HostCopy | None:
        """Return the adapter, read and checked, or ``None`` while it is being read. Raises the
        reason why it cannot be used."""

    def wait(self) -> HostCopy:
        """Block until the adapter is read. Returns it, or raises as ``poll`` does."""


class AdapterReader(Protocol):
    """Reads and checks adapters in the background."""

    def submit(self, order: Order) -> Reading:
        """Start to read an adapter, without waiting."""

    def shutdown(self) -> None:
        """Release threads."""


class FutureReading:
    """A ``Reading`` in a thread."""

    def __init__(self, future: Future[HostCopy]) -> None:
        self._future = future

    def poll(self) -> HostCopy | None:
        return self._future.result() if self._future.done() else None

    def wait(self) -> HostCopy:
        return self._future.result()


class ThreadedReader:
    """An ``AdapterReader`` that calls a function in threads."""

    def __init__(self, read: Callable[[Order], HostCopy]) -> None:
        """read: reads an adapter and checks all of it. It must not touch a device."""
        self._read = read
        self._threads = ThreadPoolExecutor(NUM_THREADS, "adapters")

    def submit(self, order: Order) -> Reading:
        return FutureReading(self._threads.submit(self._read, order))

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
