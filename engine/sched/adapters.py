"""What policies see of LoRA adapters: where each of them is, and who uses it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol

Place = Literal["slot", "host", "disk"]
"""Where an adapter is: in a slot of the device, so that requests can run with it; in the host's
memory, from where it is copied into a slot; or only on a disk or at a hub."""


class AdapterPlaces(Protocol):
    """Where adapters are. An adapter is named as in ``Request.adapter``, by its content."""

    @property
    def num_slots(self) -> int:
        """The most different adapters that running requests may use; 0 if there is no limit."""
        ...

    @property
    def in_slots(self) -> Collection[str]:
        """Adapters in slots of the device, least recently used first."""
        ...

    @property
    def in_use(self) -> Collection[str]:
        """Adapters of running requests; they keep their slots."""
        ...

    def num_running(self, adapter: str) -> int:
        """Number of running requests that use this adapter."""
        ...

    def place(self, adapter: str) -> Place:
        """Where this adapter is: `slot`, `host` (in the host's memory) or `disk`."""
        ...


class NoAdapters:
    """The ``AdapterPlaces`` of a scheduler without slots for adapters."""

    num_slots = 0
    in_slots: Collection[str] = ()
    in_use: Collection[str] = ()

    def num_running(self, adapter: str) -> int:
        return 0

    def place(self, adapter: str) -> Place:
        return "slot"
