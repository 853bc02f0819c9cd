"""Everything asked of one engine, in one frozen object, and what is decided of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.cache import CacheConfig
from engine.config.check import check_range, check_types
from engine.config.core import CoreConfig, PollConfig
from engine.config.gpu import GPUConfig
from engine.config.model import ModelConfig
from engine.config.option import BOTH, FRONT_END
from engine.config.sched import SchedulerConfig, SchedulerOptions
from engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_POOL_SIZE = 64  # of text processes of each kind


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Device, threads, log, objects of JSON schemas, and processes for text."""

    device: Device = "auto"
    """Where the model runs; auto is a CUDA GPU if there is one, else the CPU."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs; if not given on with a GPU and off on a CPU, which has
    nothing to overlap with."""
    num_threads: int | None = None
    """Threads of CPU kernels; the cores this process may use if not given."""
    log_level: LogLevel | None = field(default=None, metadata=BOTH)
    """How much the engine logs; METRONOME_LOG_LEVEL or info (commands: warning) if not given."""
    disable_log_stats: bool = field(default=False, metadata=FRONT_END)
    """Leave out the line of figures that is logged every few seconds while there is work."""
    step_log: str | Path | None = None
    """File to record every input and plan of the scheduler in, for metronome replay."""
    torch_profiler_dir: str | Path | None = None
    """Directory for the traces of start_profile and stop_profile, made if it is not there. The
    commands generate, chat and bench record what they do."""
    kernel_cache: str | Path | None = None
    """Directory in which compiled kernels are kept, made if it is not there;
    METRONOME_KERNEL_CACHE, else the package's own and ~/.cache/metronome if not given."""
    logits_processors: list[Any] | tuple[Any, ...] = ()
    """Factories of custom logits processors, or their dotted paths, applied in this order."""
    additional_properties: Literal["closed", "open"] = field(default="closed", metadata=FRONT_END)
    """What structured outputs and tools make of an object whose schema names properties and says
    nothing about others: closed: it has no others; open: any, as JSON schema has it, which small
    models write without end. A request may say it, too."""
    property_order: Literal["schema", "free"] = field(default="schema", metadata=FRONT_END)
    """The order in which properties are written: schema: as the schema names them; free: any. A
    request may say it, too."""
    tokenizer_pool_size: int = field(default=0, metadata=FRONT_END)
    """Processes that tokenise, and as many that detokenise; 0: this process does both. They do not
    pay on two cores (a token costs 1.5 to 2 times the processor time); they keep a tokenizer that
    crashes or hangs away from the engine."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """What the user asked for. Sizes that depend on model and machine are decided from it later."""

    model: ModelConfig
    """Which model, and how it is loaded."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """How KV memory is cut and shared."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Budgets and policy of the scheduler."""
    gpu: GPUConfig = field(default_factory=GPUConfig)
    """How a GPU is used."""
    core: CoreConfig = field(default_factory=CoreConfig)
    """Where the core runs."""
    polling: PollConfig = field(default_factory=PollConfig)
    """How long the core waits for messages."""
    log_level: LogLevel = "info"
    """How much the engine logs."""
    torch_profiler_dir: str | None = None
    """Directory for traces of the worker, wherever that runs."""
    kernel_cache: str | None = None
    """Directory for compiled kernels, wherever the worker runs."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 0, MAX_POOL_SIZE, "tokenizer_pool_size")
        if self.tokenizer_pool_size and self.model.skip_tokenizer_init:
            raise ConfigError(
                f"tokenizer_pool_size is {self.tokenizer_pool_size} and skip_tokenizer_init is "
                "True: without a tokenizer its processes have nothing to do; set only one of them"
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
                f"{self.core.data_parallel_size}: a log is of one scheduler; set only one of them"
            )
        if self.core.data_parallel_size > 1 and self.cache.kv_events_endpoint is not None:
            raise ConfigError(
                f"kv_events_endpoint is {self.cache.kv_events_endpoint!r} and data_parallel_size "
                f"is {self.core.data_parallel_size}: each core needs an address of its own; leave "
                "it out and they are logged"
            )


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """What was asked, and what was left open in it decided for a device and a model.

    A worker is made from it. Only the number of blocks waits for the model's memory.
    """

    scheduler: SchedulerConfig
    """What the scheduler runs with."""
    block_size: int
    """Tokens per KV block."""
