"""Config -> a wired core. The only place that knows every class; heavy imports happen here."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config.engine import EngineConfig
from engine.config.model import read_model_info
from engine.core.client import InprocClient
from engine.core.engine_core import EngineCore, Executor
from engine.kv.manager import KVManager
from engine.sched.find import Chosen, choose, make_scheduler


def build_core(
    config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
) -> InprocClient:
    """Load the model and wire scheduler, KV manager and worker. Raises ``ConfigError``."""
    chosen = choose(config.scheduler)  # or its ConfigError, before minutes of loading
    info = read_model_info(config.model.model)
    if config.model.load_format != "dummy":
        read_ahead(info.path)
    from engine.worker.worker import make_worker

    executor, decided = make_worker(config, info)
    client = InprocClient(wire(config, decided, executor, clock=clock, chosen=chosen), decided)
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
    kv = KVManager(
        decided.num_kv_blocks,
        decided.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    scheduler = make_scheduler(
        decided.scheduler,
        kv,
        clock=clock,
        timer=time.perf_counter,
        seed=config.model.seed,
        chosen=chosen,
    )
    return EngineCore(scheduler, executor, decided.scheduler.num_steps_in_flight)
