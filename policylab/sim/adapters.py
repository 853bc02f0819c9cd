"""LoRA adapters in simulations: the engine's slots and library, with reads on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from engine.lora.decide import AdapterSlots
from engine.lora.library import AdapterLibrary
from engine.lora.loading import NUM_THREADS, Order
from engine.lora.store import AdapterStore
from engine.messages.adapters import AdapterSource
from engine.messages.requests import AddRequest

Clock = Callable[[], float]


class SimulatedCopy(NamedTuple):
    """An adapter in the host's memory."""

    digest: str
    rank: int = 1
    num_bytes: int = 1


class SimulatedReading:
    """An adapter that is read until ``ready_at``, in seconds on the clock."""

    def __init__(self, name: str, ready_at: float, clock: Clock) -> None:
        self.ready_at = ready_at
        self._copy = SimulatedCopy(name)
        self._clock = clock

    def poll(self) -> SimulatedCopy | None:
        return self._copy if self._clock() >= self.ready_at else None

    def wait(self) -> None:
        self.ready_at = self._clock()

    def hurry(self, is_alone: bool) -> None:
        """Reading takes the same time in any case."""


class SimulatedReader:
    """Reads adapters on a virtual clock, as many at a time as the engine's threads do."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        """seconds: how long it takes to read an adapter."""
        self._clock = clock
        self._seconds = seconds
        self._free_at = [0.0] * NUM_THREADS  # when each thread has read what it was given
        self._readings: list[SimulatedReading] = []

    @property
    def next_time(self) -> float:
        """When the next adapter will be there, in seconds on the clock; infinity for none."""
        now = self._clock()
        self._readings = [each for each in self._readings if each.ready_at > now]
        return min((each.ready_at for each in self._readings), default=inf)

    def submit(self, order: Order) -> SimulatedReading:
        thread = min(range(NUM_THREADS), key=self._free_at.__getitem__)
        ready_at = max(self._free_at[thread], self._clock()) + self._seconds
        self._free_at[thread] = ready_at
        reading = SimulatedReading(order.name, ready_at, self._clock)
        self._readings.append(reading)
        return reading

    def shutdown(self) -> None:
        """Nothing to release."""


class SimulatedAdapters:
    """The adapters of a simulated engine. ``slots``: the resource of its scheduler."""

    def __init__(
        self, max_loras: int, max_cpu_loras: int | None, clock: Clock, read_seconds: float
    ) -> None:
        """max_loras, max_cpu_loras: as in an engine's options. read_seconds: how long it takes to
        read an adapter from a disk. Raises ``ConfigError`` for limits below 1."""
        self.reader = SimulatedReader(clock, read_seconds)
        store: AdapterStore[SimulatedCopy] = AdapterStore(max_cpu_loras)
        library = AdapterLibrary(self.reader, store, most_pinned=0)
        self.slots = AdapterSlots(max_loras, library)

    def named(self, request: AddRequest) -> AddRequest:
        """The request with its adapter's identity in place of its name, as in an engine core."""
        if request.adapter is None:
            return request
        source = AdapterSource(path=request.adapter)
        return self.slots.resolved(replace(request, adapter_source=source))
