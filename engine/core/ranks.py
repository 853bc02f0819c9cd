"""Makes the worker of a core: one, or a group of them if the model is computed by several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from engine.config.engine import EngineConfig, ResolvedConfig
from engine.config.env import VISIBLE_GPUS, default_num_threads, interprets_cuda, visible_gpus
from engine.config.model import ModelInfo
from engine.config.pooling import PoolingSpec, read_pooling
from engine.core.group import WorkerGroup
from engine.core.inproc_client import InprocClient
from engine.core.pipeline import start_pipeline
from engine.core.rank_processes import GroupOptions, Ranks, start_ranks
from engine.core.rank_use import RankUses
from engine.core.recording import RecordingScheduler
from engine.errors import ConfigError
from engine.ipc.ring import SPIN_SECONDS
from engine.observe.guard import Failures
from engine.parallel.meeting import Meeting, Place, Stoppable
from engine.worker.device import make_platform, resolve_device
from engine.worker.feature import Feature
from engine.worker.rank_report import log_sums
from engine.worker.rank_times import Waited
from engine.worker.worker import ModelWorker, make_worker

EARLY = 0.8  # of a client's limit: a rank that hangs is named before the client gives up the core


class RankOfModel(ModelWorker):
    """The worker of a rank, which waits for the others long only while they start."""

    def __init__(
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        features: Sequence[Feature],
        failures: Failures,
        pooling: PoolingSpec | None,
        collectives: Stoppable,
    ) -> None:
        platform = make_platform(resolve_device(config.device))
        super().__init__(config, info, platform, features, failures, pooling, collectives)
        self._ranks = collectives

    @property
    def num_begun(self) -> int:
        """Operations with other ranks that this one has begun; 0 if nobody needs to know."""
        return self._ranks.num_begun

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        log_sums(self._ranks, self.platform)
        self._ranks.limit(EARLY * self.config.core.core_hang_timeout)

    def shutdown(self) -> None:
        super().shutdown()
        self._ranks.close()

    def waited(self) -> Waited:
        """What this rank has waited for others."""
        return Waited(operations=self._ranks.waited_ns)


def make_workers(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    pooling: PoolingSpec | None,
    make_features: Callable[[int], Sequence[Feature]],
) -> ModelWorker | WorkerGroup:
    """Create the worker of a core, and start the processes of further ranks.

    features: of the worker in this process; make_features: makes those of another rank, given by
    its number, in its process. Raises ``ConfigError``."""
    if config.parallel.num_workers == 1:
        return make_worker(config, info, features, failures, pooling)
    options = GroupOptions(
        name=f"core {config.core_index}" if config.num_cores > 1 else "",
        log_level=config.log_level,
        ready_timeout=EARLY * config.core.core_ready_timeout,
        hang_timeout=EARLY * config.core.core_hang_timeout,
    )
    if config.parallel.distributed_executor_backend == "ray":
        return start_placed_group(config, info, features, failures, pooling, make_features, options)
    config = replace(config, num_threads=threads_of_rank(config))
    options = replace(
        options,
        spin_seconds=SPIN_SECONDS if has_core_for_each(config) else 0.0,
        environments=environments_of_ranks(config),
    )
    try:
        if config.parallel.pipeline_parallel_size > 1:
            halves = features, failures, make_features
            return start_pipeline(config, info, *halves, options, on_gpus=has_gpus(config))
        return start_group(config, info, features, failures, pooling, make_features, options)
    except OSError as error:
        raise ConfigError(
            f"{config.parallel.sizes}, but the ranks cannot share memory on this system: {error}; "
            "leave this out"
        ) from error


def start_group(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    pooling: PoolingSpec | None,
    make_features: Callable[[int], Sequence[Feature]],
    options: GroupOptions,
) -> WorkerGroup:
    """Start the processes of ranks 1, 2, ..., and create the worker of rank 0."""
    size, num_threads = config.parallel.tensor_parallel_size, config.num_threads or 1
    meeting = Meeting(
        size,
        num_threads=size * num_threads,
        wait_seconds=options.ready_timeout,
        on_gpus=has_gpus(config),
    )
    with ExitStack() as failing:
        failing.callback(meeting.close)
        arguments = (config, info, make_features, meeting.place)
        makes = [partial(make_rank, *arguments, rank) for rank in range(1, size)]
        ranks = start_ranks(makes, options)
        failing.callback(ranks.close)
        own = first_rank(config, info, features, failures, pooling, meeting, ranks)
        failing.pop_all()
    return WorkerGroup(own, ranks)


def start_placed_group(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    pooling: PoolingSpec | None,
    make_features: Callable[[int], Sequence[Feature]],
    options: GroupOptions,
) -> WorkerGroup:
    """Start ranks 1, 2, ... on nodes of a Ray cluster, and create the worker of rank 0."""
    try:
        from engine.core.placed_ranks import Placement, for_ranks
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"distributed_executor_backend is 'ray', and {error.name} is not installed: pip "
            "install metronome-engine[ray]"
        ) from error
    on_gpus, secret = has_gpus(config), config.core.core_secret
    with ExitStack() as failing:
        placement = Placement(config, options, on_gpus=on_gpus)
        failing.callback(placement.close)
        config = for_ranks(config, placement)
        if placement.is_local:
            options = replace(options, environments=placement.environments())
            found = start_group(config, info, features, failures, pooling, make_features, options)
            found.at_end = placement.close
            failing.pop_all()
            return found
        meeting = Meeting(
            len(placement.ranks),
            num_threads=placement.num_threads,
            wait_seconds=options.ready_timeout + options.hang_timeout,
            on_gpus=on_gpus,
            hosts=placement.ips,
        )
        failing.callback(meeting.close)
        arguments = (config, info, make_features, meeting.place)
        makes = [partial(make_rank, *arguments, one.rank) for one in placement.ranks[1:]]
        ranks = placement.start(makes, secret, options)
        failing.callback(ranks.close)
        ranks.watch.stops.append(meeting.close)  # ends the wait of rank 0 for the others
        ranks.check()
        own = first_rank(config, info, features, failures, pooling, meeting, ranks)
        failing.pop_all()
    found = WorkerGroup(own, ranks, placement.num_sharing)
    found.at_end = placement.close
    return found


def first_rank(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature],
    failures: Failures,
    pooling: PoolingSpec | None,
    meeting: Meeting,
    ranks: Ranks,
) -> RankOfModel:
    """Create the worker of rank 0, in this process, once the others have started."""
    collectives = meeting.place.open(0)
    own = RankOfModel(config, info, features, failures, pooling, collectives)
    ranks.watch.stops.append(collectives.stop)
    ranks.at_end = meeting.close
    return own


def make_rank(
    config: ResolvedConfig,
    info: ModelInfo,
    make_features: Callable[[int], Sequence[Feature]],
    place: Place,
    rank: int,
) -> RankOfModel:
    """Create the worker of another rank, in its process."""
    pooling = read_pooling(info, config.model)
    return RankOfModel(config, info, make_features(rank), Failures(), pooling, place.open(rank))


class Shared(Protocol):
    """What the process of rank 0 keeps for all ranks."""

    def share(self, group: WorkerGroup) -> None:
        """Let the other ranks of the group keep the same."""
        ...


def connect(
    worker: ModelWorker | WorkerGroup,
    client: InprocClient,
    kept: Sequence[Shared | None],
    uses: RankUses,
) -> None:
    """Connect a group of workers with its core: the client hears, in any thread, if a process
    fails, and reports and records what ranks do; what is in ``kept`` is brought to all ranks."""
    if isinstance(worker, WorkerGroup):
        client.rank_uses = uses
        if isinstance(scheduler := client.core.scheduler, RecordingScheduler):
            scheduler.rank_uses = uses
        worker.on_failure(client.fail)
        for one in kept:
            if one is not None:
                one.share(worker)


def threads_of_rank(config: EngineConfig) -> int:
    """The CPU threads of each rank: an equal share of those of the core."""
    num = config.num_threads or default_num_threads() or len(os.sched_getaffinity(0))
    return max(1, num // config.parallel.num_workers)


def has_core_for_each(config: ResolvedConfig) -> bool:
    """Whether all threads of the ranks can run at once."""
    num_threads = config.parallel.num_workers * (config.num_threads or 1)
    return num_threads <= len(os.sched_getaffinity(0))


def has_gpus(config: ResolvedConfig) -> bool:
    """Whether each rank computes on a GPU of its own."""
    return config.device != "cpu" and not interprets_cuda()


def environments_of_ranks(config: ResolvedConfig) -> list[Mapping[str, str]]:
    """The environment variables that make a GPU visible to each of ranks 1, 2, ...; [] on CPUs.
    Rank 0 uses the first GPU that its process sees. Raises ``ConfigError`` for too few GPUs."""
    size = config.parallel.num_workers
    if not has_gpus(config):
        return []
    gpus = visible_gpus(torch.cuda.device_count())
    if len(gpus) < size:
        raise ConfigError(
            f"{config.parallel.sizes}, but this process sees {len(gpus)} "
            f"GPU{'s' if len(gpus) > 1 else ''} ({', '.join(gpus)}), and each of the {size} ranks "
            f"needs one: lower it, make more visible with {VISIBLE_GPUS}, or use device='cpu'"
        )
    return [{VISIBLE_GPUS: gpu} for gpu in gpus[1:size]]
