"""Makes the worker of a core: one, or a group of them if the model is computed by several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.config.engine import EngineConfig, ResolvedConfig
from engine.config.env import default_num_threads
from engine.config.model import ModelInfo
from engine.config.pooling import PoolingSpec
from engine.core.group import GroupOptions, Ranks, WorkerGroup
from engine.errors import ConfigError, RankError
from engine.observe.guard import Failures
from engine.worker.feature import Feature
from engine.worker.worker import ModelWorker, make_worker

EARLY = 0.9  # of a client's limit: a rank that hangs is named before the client gives up the core


def make_workers(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    pooling: PoolingSpec | None,
    make_features: Callable[[], Sequence[Feature]],
) -> ModelWorker | WorkerGroup:
    """Create the worker of a core, and start the processes of further ranks.

    features: of the worker in this process; make_features: makes those of another rank, in its
    process. Raises ``ConfigError``."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return make_worker(config, info, features, failures, pooling)
    check_features(size, features)
    config = replace(config, num_threads=threads_of_rank(config))
    make = partial(make_rank, config, info, pooling, make_features)
    own = make_worker(config, info, features, failures, pooling)
    options = GroupOptions(
        name=f"core {config.rank}" if config.num_ranks > 1 else "",
        log_level=config.log_level,
        ready_timeout=EARLY * config.core.core_ready_timeout,
        hang_timeout=EARLY * config.core.core_hang_timeout,
    )
    try:
        return WorkerGroup(own, Ranks([make] * (size - 1), options))
    except OSError as error:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the ranks cannot share memory on this system: "
            f"{error}; leave tensor_parallel_size out"
        ) from error


def make_rank(
    config: ResolvedConfig,
    info: ModelInfo,
    pooling: PoolingSpec | None,
    make_features: Callable[[], Sequence[Feature]],
) -> ModelWorker:
    """Create the worker of another rank, in its process."""
    return make_worker(config, info, make_features(), None, pooling)


def report_failures(
    worker: ModelWorker | WorkerGroup, notify: Callable[[RankError], object]
) -> None:
    """Call ``notify``, in any thread, if a process of a group of workers fails."""
    if isinstance(worker, WorkerGroup):
        worker.on_failure(notify)


def threads_of_rank(config: EngineConfig) -> int:
    """The CPU threads of each rank: an equal share of those of the core."""
    num = config.num_threads or default_num_threads() or len(os.sched_getaffinity(0))
    return max(1, num // config.parallel.tensor_parallel_size)


def check_features(size: int, features: Sequence[Feature]) -> None:
    """Raise ``ConfigError`` for pictures, whose content only the process of rank 0 has."""
    if any(feature.part == "media" for feature in features):
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this model reads pictures, which need a model on "
            'one device: set limit_mm_per_prompt={"image": 0}, or leave tensor_parallel_size out'
        )
