"""KV cache options."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How KV memory is cut and shared."""

    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """Blocks in the pool; None sizes it from free memory."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    kv_cache_memory_bytes: int | None = None
    """Size of the pool in bytes, if num_kv_blocks is not given."""
    memory_utilization: float = 0.5
    """Share of the free memory the KV pool may take when it is sized from it."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size is {self.block_size}, must be in 1..1024")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 2:
            raise ConfigError(
                f"num_kv_blocks is {self.num_kv_blocks}, must be at least 2 (one is the null block)"
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}, must be at least 1"
            )
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization is {self.memory_utilization}, must be in (0, 1]")
