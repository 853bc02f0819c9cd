"""A store of KV blocks in the memory of each rank, one of which has a fault."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.kv_transfer.stores import Rows, StoreIdentity
from support.kv_stores import MemoryStore
from support.patience import WAIT_SECONDS

FAULTS = ("raises", "hangs", "is full", "forgets", "promises", "is late")


class RankStore(MemoryStore):
    """``fault``: what is wrong with the store of ``rank``. ``note``: a file that is there once this
    one has hung."""

    def __init__(
        self, identity: StoreIdentity, place: str, rank: int = 0, fault: str = "", note: str = ""
    ) -> None:
        super().__init__(identity, f"{place} {identity.rank} of {identity.num_ranks}")
        self._fault = fault if identity.rank == rank else ""
        self._note = Path(note)
        self._num_reads = 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys) if self._fault == "promises" else super().contains(keys)

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        self._num_reads += 1
        if self._fault == "is late":
            time.sleep(0.05)
        if self._fault == "hangs" and self._num_reads > 2:
            self._note.touch()
            time.sleep(2 * WAIT_SECONDS)
        if self._fault == "raises":
            rows[:] = 0xFF
            raise OSError("a cable has come loose")
        found = super().read(keys, rows)
        if self._fault == "forgets":
            rows[::2] = 0xFF
            found[::2] = [False] * len(found[::2])
        return found

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        if self._fault == "is full" and len(self.blocks) > 20:
            return [False] * len(keys)
        return super().write(keys, rows)


def rank_connector(**options: Any) -> dict[str, Any]:
    """The option ``kv_transfer_config`` for such stores."""
    return {
        "kv_connector": "support.rank_stores.RankStore",
        "kv_connector_extra_config": options,
    }
