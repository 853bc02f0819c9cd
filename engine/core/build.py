"""Config -> a wired core. The only place that knows every class; heavy imports happen here."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config.cache import CacheConfig
from engine.config.engine import EngineConfig
from engine.config.model import read_model_info
from engine.core.client import InprocClient
from engine.core.engine_core import EngineCore, Executor
from engine.core.recording import describe, record
from engine.kv.events import EventLog
from engine.kv.hashing import BlockHasher, Sha256Hasher
from engine.kv.manager import KVManager
from engine.sched.find import Chosen, choose, make_scheduler
from engine.sched.interface import SchedulerInterface

logger = logging.getLogger("engine.core")


def build_core(
    config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
) -> InprocClient:
    """Load the model and wire scheduler, KV manager and worker. Raises ``ConfigError``."""
    chosen = choose(config.scheduler)  # or its ConfigError, before minutes of loading
    info = read_model_info(config.model.model)
    if config.model.load_format != "dummy":
        read_ahead(info.path)
    from engine.worker.profiler import TorchProfiler
    from engine.worker.worker import make_worker

    profiler = TorchProfiler(config.torch_profiler_dir)
    executor, decided = make_worker(config, info)
    core = wire(config, decided, executor, clock=clock, chosen=chosen)
    client = InprocClient(core, decided, profiler)
    gc.freeze()  # or each full collection walks all that imports made, a tenth of a second
    return client


def read_ahead(path: Path) -> None:
    """Let the system fetch the weights from disk while Python still imports."""
    for file in path.glob("*.safetensors"):
        # What cannot be opened is reported by the loader, with more to say about it.
        with suppress(OSError), file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def wire(
    config: EngineConfig,
    decided: Any,
    executor: Executor,
    *,
    clock: Callable[[], float],
    chosen: Chosen | None = None,
) -> EngineCore:
    """A core around an executor, real or fake."""
    kv = make_kv_manager(config, decided, clock=clock)
    sched, seed = decided.scheduler, config.model.seed

    def make(clock: Callable[[], float]) -> SchedulerInterface:
        return make_scheduler(
            sched, kv, clock=clock, timer=time.perf_counter, seed=seed, chosen=chosen
        )

    scheduler = (
        make(clock)
        if config.step_log is None
        else record(config.step_log, describe(sched, config.cache, kv, seed), make, clock)
    )
    return EngineCore(scheduler, executor, sched.num_steps_in_flight)


def make_kv_manager(config: EngineConfig, decided: Any, *, clock: Callable[[], float]) -> KVManager:
    """The owner of all blocks, with the hash and the listeners that were asked for."""
    cache = config.cache
    events = None
    if cache.enable_kv_events:
        from engine.core.kv_publisher import KVEventPublisher

        publisher = KVEventPublisher(
            cache.kv_events_endpoint, num_remembered=cache.kv_events_buffer_steps
        )
        logger.info("cache events are published at %s", publisher.endpoint)
        events = EventLog(publisher, block_size=decided.block_size, clock=clock)
    return KVManager(
        decided.num_kv_blocks,
        decided.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        hasher=make_hasher(cache, config.model.seed),
        events=events,
    )


def make_hasher(cache: CacheConfig, seed: int) -> BlockHasher:
    """The hash of cached blocks that was asked for."""
    if cache.prefix_caching_hash_algo == "fast":
        from engine.kv.fast_hash import FastHasher

        return FastHasher(seed)
    return Sha256Hasher()
