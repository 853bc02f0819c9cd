"""Options of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config.cache import CacheConfig
from engine.config.check import check_kind, check_types
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError

MAX_GRAPH_ROWS = 512
TOKEN_BUDGET = 8192
BLOCK_SIZE = 64  # a tile of keys is one block then
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class GPUConfig:
    """How a GPU is used; the CPU reads none of it."""

    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory the engine may take; the KV pool gets what it leaves of that."""
    enforce_eager: bool = False
    """Launch every step call by call: no CUDA graphs."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are recorded for; None takes 1, 2, 4, then every 8 and 16 up to
    max_num_seqs or 512."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None takes 8192, or max_num_seqs if that is more."""
    block_size: int | None = None
    """Tokens per KV block; None takes 64."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be in (0, 1]"
            )
        for size in self.cudagraph_capture_sizes or ():
            check_kind("a size in cudagraph_capture_sizes", size, (int,))
            if size < 1:
                raise ConfigError(f"cudagraph_capture_sizes has {size}, must be at least 1")


def graph_sizes(config: GPUConfig, max_num_seqs: int) -> list[int]:
    """Batch sizes to record, ascending. Larger steps than the largest are launched call by call."""
    if config.enforce_eager:
        return []
    if config.cudagraph_capture_sizes is not None:
        return sorted({size for size in config.cudagraph_capture_sizes if size <= max_num_seqs})
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_ROWS, 16))
    return [*(size for size in steps if size < most), most]


def for_gpu(
    config: GPUConfig,
    sched: SchedulerConfig,
    cache: CacheConfig,
    async_scheduling: bool | None,
) -> tuple[SchedulerConfig, CacheConfig]:
    """What was left open, as a GPU likes it: large steps and blocks, the next one planned ahead."""
    budget = config.max_num_batched_tokens or max(TOKEN_BUDGET, sched.max_num_seqs)
    depth = STEPS_IN_FLIGHT if async_scheduling is None else sched.num_steps_in_flight
    return (
        replace(sched, max_num_batched_tokens=budget, num_steps_in_flight=depth),
        replace(cache, block_size=config.block_size or BLOCK_SIZE),
    )
