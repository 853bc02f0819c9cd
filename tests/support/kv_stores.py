"""Stores of KV blocks for tests: in memory, shared by the engines of a test, with faults."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.kv_transfer.stores import Rows, StoreIdentity
from engine.sched.predict.profile import FEATURES

PLACES: defaultdict[str, dict[bytes, bytes]] = defaultdict(dict)
"""What the stores of each place have."""


class MemoryStore:
    """Keeps blocks in ``PLACES``. ``fault``: what goes wrong with reads."""

    name = "memory"

    def __init__(self, identity: StoreIdentity, place: str, fault: str = "") -> None:
        self.identity = identity
        self.fault = fault
        self.gate = GATES.get(place, OPEN)
        self.blocks = PLACES[f"{place} {identity.namespace} {identity.block_bytes}"]
        self.counted: Counter[str] = Counter()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self.fault == "contains raises":
            raise OSError("the store cannot be reached")
        return [key in self.blocks or self.fault == "promises all" for key in keys]

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        self.gate.wait(60)
        self.counted["reads"] += 1
        if self.fault == "read raises":
            raise OSError("the store cannot be reached")
        found = []
        for nth, key in enumerate(keys):
            block = self.blocks.get(key)
            is_lost = block is None or (self.fault == "loses some" and nth % 3 == 1)
            if not is_lost:
                assert block is not None
                rows[nth] = memoryview(block)
            else:
                rows[nth] = 0xFF
            found.append(not is_lost)
        return found if self.fault != "answers too little" else found[:1]

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        if self.fault == "write raises":
            raise OSError("no space left")
        for key, row in zip(keys, rows, strict=True):
            self.blocks[key] = row.tobytes()
        return [True] * len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def clear(self) -> None:
        self.blocks.clear()

    def counts(self) -> Mapping[str, int]:
        return {"num_blocks": len(self.blocks), **self.counted}

    def close(self) -> None:
        """Blocks stay, for later engines."""


HOOKS: defaultdict[str, dict[str, Callable[..., Any]]] = defaultdict(dict)
"""For a place: what is called in place of methods of its store, with the store first."""
METHODS = ("contains", "read", "write", "forget", "clear", "counts", "close")


class HookedStore(MemoryStore):
    """A store in memory, of which a test replaces methods while engines use it."""

    def __init__(self, identity: StoreIdentity, place: str) -> None:
        super().__init__(identity, place)
        hooks = HOOKS[place]
        for name in METHODS:
            setattr(self, name, self._hooked(name, hooks))

    def _hooked(self, name: str, hooks: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
        own = getattr(self, name)

        def call(*given: Any) -> Any:
            self.counted[f"{name}_calls"] += 1
            hook = hooks.get(name)
            return own(*given) if hook is None else hook(self, *given)

        return call


OPEN = threading.Event()
OPEN.set()
GATES: dict[str, threading.Event] = {}
"""For a place: reads wait until the event is set."""


def connector(place: str, **more: Any) -> dict[str, Any]:
    """The option ``kv_transfer_config`` for a store in memory."""
    return {
        "kv_connector": "support.kv_stores.MemoryStore",
        "kv_connector_extra_config": {"place": place, **more},
    }


def hooked(place: str, **more: Any) -> dict[str, Any]:
    """The option ``kv_transfer_config`` for a store with ``HOOKS``."""
    return {
        "kv_connector": "support.kv_stores.HookedStore",
        "kv_connector_extra_config": {"place": place},
        **more,
    }


def slow_profile(path: Path, seconds_per_token: float = 0.01) -> str:
    """A cost profile with which loading always takes less time than computing."""
    zeros = [0.0] * len(FEATURES)
    about = {"format": 2, "name": "slow", "is_calibrated": False, "knots": [1000000]}
    about["coefficients"] = [*zeros, seconds_per_token, seconds_per_token]
    path.write_text(json.dumps(about))
    return str(path)
