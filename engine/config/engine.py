"""All options of one engine in a frozen object: as requested, and with defaults filled in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.config.cache import DEFAULT_GIB, MAX_EVENTS_PORT, TIERS, CacheConfig
from engine.config.check import check_range, check_types
from engine.config.core import CoreConfig, PollConfig
from engine.config.gpu import GPUConfig
from engine.config.lora import LoRAConfig
from engine.config.media import MediaConfig
from engine.config.model import ModelConfig
from engine.config.option import BOTH, FRONT_END
from engine.config.parallel import ParallelConfig
from engine.config.sched import SchedulerConfig, SchedulerOptions
from engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_POOL_SIZE = 64  # text processes of each kind
MAX_THREADS = 4096  # of a core on a node of a cluster


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Device, threads, logs, JSON objects, text processes."""

    device: Device = "auto"
    """Where the model runs. auto: a CUDA GPU if there is one, else the CPU."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs. Default: on with a GPU; off on a CPU, where nothing
    overlaps."""
    num_threads: int | None = None
    """Threads of CPU kernels. Default: the cores that this process may use."""
    log_level: LogLevel | None = field(default=None, metadata=BOTH)
    """How much the engine logs. Default: METRONOME_LOG_LEVEL, else info (commands: warning)."""
    disable_log_stats: bool = field(default=False, metadata=FRONT_END)
    """Do not log the line of statistics every few seconds."""
    step_log: str | Path | None = None
    """File that records every input and plan of the scheduler, for metronome replay. With several
    cores, each has a file that ends with -core0, -core1, ..."""
    torch_profiler_dir: str | Path | None = None
    """Directory for the traces of start_profile and stop_profile. If set, generate, chat and bench
    profile themselves."""
    kernel_cache: str | Path | None = None
    """Directory for compiled kernels. Default: METRONOME_KERNEL_CACHE, else the package's own
    directory and ~/.cache/metronome."""
    logits_processors: list[Any] | tuple[Any, ...] = ()
    """Factories of custom logits processors, or their dotted paths, in the order of application."""
    additional_properties: Literal["closed", "open"] = field(default="closed", metadata=FRONT_END)
    """Whether a JSON object may have properties that its schema does not name, if the schema names
    some and has no keyword for others. closed: no; open: yes, as JSON schema defines it, which
    makes small models write without end. Requests can override it."""
    property_order: Literal["schema", "free"] = field(default="schema", metadata=FRONT_END)
    """Order of a JSON object's properties: as in the schema, or free. Requests can override it."""
    tokenizer_pool_size: int = field(default=0, metadata=FRONT_END)
    """Processes that tokenise, and the same numbers that detokenise and, if the model sees, decode
    pictures; 0: this process does all. They protect the engine from a text or picture that crashes
    its library, but a token costs 1.5 to 2 times the processor time."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """The options that a user requested. Options that depend on model or machine may still be
    unset."""

    model: ModelConfig
    """The model and how it is loaded."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Size and sharing of KV memory."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Budgets and policy of the scheduler."""
    gpu: GPUConfig = field(default_factory=GPUConfig)
    """Use of a GPU."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """LoRA adapters."""
    media: MediaConfig = field(default_factory=MediaConfig)
    """Pictures in prompts."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Ranks that compute the model together."""
    core: CoreConfig = field(default_factory=CoreConfig)
    """Where the core runs."""
    polling: PollConfig = field(default_factory=PollConfig)
    """How long the core waits for messages."""
    log_level: LogLevel = "info"
    """How much the engine logs."""
    torch_profiler_dir: str | None = None
    """Directory for the worker's traces, as an absolute path."""
    kernel_cache: str | None = None
    """Directory for the worker's compiled kernels, as an absolute path."""
    core_index: int = 0
    """Number of this core among those that were started together."""
    num_cores: int = 1
    """How many cores were started together."""
    kv_arena: tuple[str, int, int, int, int] | None = None
    """Handle of the memory for copies of KV blocks that these cores share. None: each has its own,
    if any."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 0, MAX_POOL_SIZE, "tokenizer_pool_size")
        if self.tokenizer_pool_size and self.model.skip_tokenizer_init:
            raise ConfigError(
                f"tokenizer_pool_size is {self.tokenizer_pool_size} and skip_tokenizer_init is "
                "True: text processes need a tokenizer; set only one of the two"
            )
        cores, whose = os.cpu_count() or 1, "the cores of this machine"
        if "ray" in (self.core.data_parallel_backend, self.parallel.distributed_executor_backend):
            cores, whose = max(cores, MAX_THREADS), "with Ray"  # nodes may have more
        if self.num_threads is not None and not 1 <= self.num_threads <= cores:
            raise ConfigError(
                f"num_threads is {self.num_threads}, must be in 1..{cores}, {whose} "
                "(None: the cores that this process may use)"
            )
        self._check_events()
        self._check_ranks()
        if self.parallel.distributed_executor_backend == "ray":
            self._check_placed_ranks()
        if self.core.prefill_cores:
            self._check_prefill()

    def _check_prefill(self) -> None:
        """Raise ``ConfigError`` if blocks of prefill cores could not be found by decode cores."""
        cache, prefill_cores = self.cache, self.core.prefill_cores
        for name, needed in (
            ("enable_prefix_caching", True),
            ("prefix_caching_hash_algo", "sha256"),
        ):
            if (value := getattr(cache, name)) != needed:
                raise ConfigError(
                    f"prefill_cores is {prefill_cores}, but {name} is {value!r}: decode cores find "
                    f"the KV of prompts by the prefix cache; set {name}={needed!r}, or leave "
                    "prefill_cores and decode_cores out"
                )

    def _check_ranks(self) -> None:
        """Raise ``ConfigError`` for options that several ranks cannot have."""
        parallel = self.parallel
        if parallel.num_workers > 1 and self.core.data_parallel_backend == "ray":
            raise ConfigError(
                f"{parallel.sizes}, and data_parallel_backend is 'ray', whose cores have one rank "
                "each: leave it out; tensor_parallel_size with distributed_executor_backend='ray' "
                "places the ranks of one core"
            )
        drafts = self.scheduler.speculative_config or {}
        if parallel.pipeline_parallel_size > 1 and drafts.get("model") is not None:
            raise ConfigError(
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and the model "
                f"{drafts['model']!r:.80} in speculative_config needs all layers on one rank: "
                "choose another method for drafts, such as 'ngram', or use tensor_parallel_size"
            )

    def _check_placed_ranks(self) -> None:
        """Raise ``ConfigError`` for options that ranks on several nodes cannot have."""
        parallel, core = self.parallel, self.core
        names = {
            "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
            core.sizes.replace(" is ", "="): core.num_cores > 1,
            **{name: getattr(self.cache, name) is not None for name in TIERS},
        }
        for name in [name for name, is_used in names.items() if is_used]:
            raise ConfigError(
                f"distributed_executor_backend is 'ray', and {name} needs all ranks on one "
                "machine: leave one of the two out"
            )
        if parallel.tensor_parallel_size == 1:
            raise ConfigError(
                "distributed_executor_backend is 'ray', but tensor_parallel_size is 1, so there "
                "are no ranks to place: set it, or place whole cores with "
                "data_parallel_backend='ray'"
            )

    def _check_events(self) -> None:
        endpoint, num_cores = self.cache.kv_events_endpoint, self.core.num_cores
        _, is_tcp, port = (endpoint or "").rpartition(":")
        most = MAX_EVENTS_PORT + 2 - 2 * num_cores
        if num_cores > 1 and is_tcp and port.isdigit() and int(port) > most:
            raise ConfigError(
                f"kv_events_endpoint is {endpoint!r} and {self.core.sizes}: each core needs two "
                f"ports from there on, so the port must be at most {most}"
            )


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The options for one device and model, with all defaults filled in, from which a worker is
    made. Only the number of KV blocks is decided later.
    """

    scheduler: SchedulerConfig
    """The scheduler's configuration."""
    block_size: int
    """Tokens per KV block."""


def with_shared_blocks(config: EngineConfig) -> EngineConfig:
    """The configuration with memory for KV blocks that prefill and decode cores share, or that
    cores serve to other engines."""
    cache = config.cache
    is_needed = config.core.prefill_cores or cache.serves_blocks
    if not is_needed or cache.kv_offloading_size is not None:
        return config
    return replace(config, cache=replace(cache, kv_offloading_size=DEFAULT_GIB))
