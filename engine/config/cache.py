"""KV cache options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from engine.config.check import check_range, check_types
from engine.errors import ConfigError

EVENTS_ENDPOINT = re.compile(r"ipc://.+|tcp://.+:([0-9]{1,5})")
MAX_EVENTS_PORT = 65534
MAX_EVENTS_STEPS = 10**9
MAX_BLOCKS = 2**24  # of which the lists alone take half a GiB


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How KV memory is cut and shared."""

    block_size: int | None = None
    """Tokens per KV block; 64 on a GPU and 16 on a CPU if not given."""
    num_kv_blocks: int | None = None
    """Blocks in the KV pool; sized from free memory if not given."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = "auto"
    """Type of keys and values; auto is the type computed in, bfloat16 halves float32's bytes, fp8
    (e4m3, on a GPU from compute capability 9.0 on) those of 16 bits, for less exact answers."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes, if num_kv_blocks is not given."""
    memory_utilization: float = 0.5
    """Share of the free memory the KV pool may take when it is sized from it (CPU)."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    prefix_caching_hash_algo: Literal["sha256", "fast"] = "sha256"
    """Hash of cached blocks; fast is 3 times as quick and secure while the seed is secret."""
    enable_kv_events: bool = False
    """Publish over ZeroMQ what is stored in the prefix cache and what is evicted."""
    kv_events_endpoint: str | None = None
    """Address to publish at, ipc:// or tcp://; a new socket file that is logged if not given."""
    kv_events_buffer_steps: int = 10_000
    """Batches of events that are remembered for listeners that come late or miss some."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, 1024, "block_size")
        check_range(self, 2, MAX_BLOCKS, "num_kv_blocks")
        check_range(self, 1, None, "kv_cache_memory_bytes")
        check_range(self, 1, MAX_EVENTS_STEPS, "kv_events_buffer_steps")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization is {self.memory_utilization}, must be in (0, 1]")
        self._check_events()

    def _check_events(self) -> None:
        endpoint = self.kv_events_endpoint
        found = EVENTS_ENDPOINT.fullmatch("ipc://any" if endpoint is None else endpoint)
        if found is None or not 0 < int(found[1] or 1) <= MAX_EVENTS_PORT:
            raise ConfigError(
                f"kv_events_endpoint is {endpoint!r}, must be ipc://PATH or tcp://HOST:PORT with a "
                f"port in 1..{MAX_EVENTS_PORT} (the next one answers for the past)"
            )
        if self.enable_kv_events and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_kv_events needs enable_prefix_caching: without it there is nothing to tell"
            )
