"""Stores of KV blocks for tests: in memory, shared by the engines of a test, with faults."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import LLMEngine
from engine.kv_transfer.stores import Rows, StoreIdentity
from engine.sched.predict.profile import FEATURES

PLACES: defaultdict[str, dict[bytes, bytes]] = defaultdict(dict)
"""What the stores of each place have."""


class MemoryStore:
    """Keeps blocks in ``PLACES``."""

    name = "memory"

    def __init__(self, identity: StoreIdentity, place: str) -> None:
        self.blocks = PLACES[f"{place} {identity.namespace} {identity.block_bytes}"]
        self.counted: Counter[str] = Counter()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        self.counted["reads"] += 1
        for nth, key in enumerate(keys):
            block = self.blocks.get(key)
            rows[nth] = 0xFF if block is None else memoryview(block)
        return [key in self.blocks for key in keys]

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
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


def connector(place: str) -> dict[str, Any]:
    """The option ``kv_transfer_config`` for a store in memory."""
    return {
        "kv_connector": "support.kv_stores.MemoryStore",
        "kv_connector_extra_config": {"place": place},
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


def drop(place: str) -> None:
    """Drop all that the stores of a place have."""
    HOOKS.pop(place, None)
    for name in [name for name in PLACES if name.startswith(place)]:
        del PLACES[name]


def counters(engine: LLMEngine) -> dict[str, int]:
    """The counters of loads."""
    stats = engine.stats()
    assert stats is not None
    prefix, found = "kv load.", stats.counters.items()
    return {name[len(prefix) :]: n for name, n in found if name.startswith(prefix)}
