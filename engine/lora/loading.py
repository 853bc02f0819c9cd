"""Reads adapters in threads, so that no step waits for a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, Protocol

from engine.lora.store import HostCopy
from engine.lora.turns import taking_turns

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
        reason why it cannot be used. Once it has returned or raised, it is not called again, and
        what it has returned is added to the ``AdapterStore``."""

    def wait(self) -> None:
        """Block until ``poll`` can return the adapter or raise."""

    def hurry(self, is_alone: bool) -> None:
        """Set whether nothing else is computed until the next call, so that no step is held up."""


class AdapterReader(Protocol):
    """Reads and checks adapters in the background."""

    def submit(self, order: Order) -> Reading:
        """Start to read an adapter, without waiting."""

    def shutdown(self) -> None:
        """Release threads."""


class FutureReading:
    """A ``Reading`` in a thread."""

    def __init__(self) -> None:
        self.future: futures.Future[HostCopy] = futures.Future()
        self.is_urgent = Event()
        """Set while nothing is done but to wait for it."""

    def poll(self) -> HostCopy | None:
        return self.future.result() if self.future.done() else None

    def wait(self) -> None:
        self.is_urgent.set()
        futures.wait([self.future])

    def hurry(self, is_alone: bool) -> None:
        if is_alone:
            self.is_urgent.set()
        else:
            self.is_urgent.clear()


class ThreadedReader:
    """An ``AdapterReader`` that calls a function in threads. They start with the first order, and
    the end of the process does not wait for them."""

    def __init__(self, read: Callable[[Order], HostCopy]) -> None:
        """read: reads an adapter and checks all of it. It must not touch a device that computes."""
        self._read = read
        self._orders: SimpleQueue[tuple[Order, FutureReading] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def submit(self, order: Order) -> FutureReading:
        reading = FutureReading()
        self._orders.put((order, reading))
        if len(self._threads) < NUM_THREADS:
            name = f"adapters-{len(self._threads)}"
            self._threads.append(Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        return reading

    def shutdown(self) -> None:
        with suppress(Empty):
            while True:
                self._orders.get_nowait()
        for _ in self._threads:
            self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            what, reading = order
            try:
                with taking_turns(reading.is_urgent):
                    copy = self._read(what)
                reading.future.set_result(copy)
            except BaseException as error:  # the request that needs the adapter fails
                reading.future.set_exception(error)
