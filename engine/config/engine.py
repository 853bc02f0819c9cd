"""Everything asked of one engine, in one frozen object."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.config.cache import CacheConfig
from engine.config.check import check_range
from engine.config.core import CoreConfig
from engine.config.env import LOG_LEVELS
from engine.config.gpu import GPUConfig
from engine.config.model import ModelConfig, check_choice
from engine.config.polling import PollConfig
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_POOL_SIZE = 64  # of text processes of each kind


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked for. Sizes that depend on model and machine are decided from it later."""

    model: ModelConfig
    """Which model, and how it is loaded."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """How KV memory is cut and shared."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Budgets and policy of the scheduler."""
    gpu: GPUConfig = field(default_factory=GPUConfig)
    """How a GPU is used."""
    device: Device = "auto"
    """Where the model runs; auto is a CUDA GPU if there is one, else the CPU."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs; None is on with a GPU and off on a CPU, which has nothing
    to overlap with."""
    num_threads: int | None = None
    """Threads of CPU kernels; None takes OMP_NUM_THREADS, or the cores this process may use."""
    log_level: LogLevel = "info"
    """How much the engine logs."""
    disable_log_stats: bool = False
    """Leave out the line of figures that is logged every few seconds while there is work."""
    step_log: str | None = None
    """File in which every input and every plan of the scheduler is recorded."""
    torch_profiler_dir: str | None = None
    """Directory for traces of the worker."""
    logits_processors: tuple[Any, ...] = ()
    """Factories of custom logits processors, applied in this order."""
    core: CoreConfig = field(default_factory=CoreConfig)
    """Where the core runs."""
    polling: PollConfig = field(default_factory=PollConfig)
    """How long the core waits for messages."""
    tokenizer_pool_size: int = 0
    """Tokenizer processes, and as many detokenizer processes; 0: the user's process does both."""

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("log_level", self.log_level, LOG_LEVELS)
        check_range(self, 0, MAX_POOL_SIZE, "tokenizer_pool_size")
        if self.tokenizer_pool_size and self.model.skip_tokenizer_init:
            raise ConfigError(
                f"tokenizer_pool_size is {self.tokenizer_pool_size} and skip_tokenizer_init is "
                "True: without a tokenizer its processes have nothing to do; leave one of both out"
            )
        cores = os.cpu_count() or 1
        if self.num_threads is not None and not 1 <= self.num_threads <= cores:
            raise ConfigError(
                f"num_threads is {self.num_threads}, must be in 1..{cores}, the cores of this "
                "machine (None takes those this process may use)"
            )
        if self.core.data_parallel_size > 1 and self.step_log is not None:
            raise ConfigError(
                f"step_log is {self.step_log!r} and data_parallel_size is "
                f"{self.core.data_parallel_size}: a log is of one scheduler; leave one of both out"
            )
        if self.core.data_parallel_size > 1 and self.cache.kv_events_endpoint is not None:
            raise ConfigError(
                f"kv_events_endpoint is {self.cache.kv_events_endpoint!r} and data_parallel_size "
                f"is {self.core.data_parallel_size}: each core needs an address of its own; leave "
                "it out and they are logged"
            )
