"""The connector between engines, as the options open it."""

from __future__ import annotations

from typing import Any

import pytest
from support.peers import SECRET
from support.remote_prefill import peers
from support.served import free_port

from engine.config.cache import CacheConfig
from engine.config.core import CoreConfig
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import ConfigError
from engine.kv_transfer.opening import OpenStore, PlannedStores


def opened(role: str, port: int) -> list[OpenStore]:
    options: dict[str, Any] = {"kv_transfer_config": peers(role, port), "kv_offloading_size": 0.001}
    config = EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(**options),
        core=CoreConfig(core_secret=SECRET),
    )
    return PlannedStores(config).open("00", 64)


def test_only_a_producer_listens() -> None:
    """Also if a consumer keeps copies of blocks itself."""
    port = free_port()
    stores = [opened("consumer", port), opened("consumer", port), opened("both", port)]
    assert all([each.writes for each in found] == [True, False] for found in stores)
    with pytest.raises(ConfigError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
        opened("producer", port)
    for found in stores:
        for each in found:
            each.store.close()
