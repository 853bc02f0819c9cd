"""Ranks without a model on two nodes of a Ray cluster, one of which fails."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
from support.digest_ranks import Fault, make_digests
from support.patience import WAIT_SECONDS
from support.ray_cluster import RayNodes, ray_cluster
from support.simulate import Run, expected, make_scheduler, random_requests
from support.spawned import fake_config

from engine.assets import BOX_MODEL
from engine.config.parallel import ParallelConfig
from engine.core.group import WorkerGroup
from engine.core.rank_processes import GroupOptions
from engine.errors import RankError

pytest.importorskip("ray", reason="Ray is not installed: pip install metronome-engine[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
SIZES = 60, 4  # blocks and tokens of each
ALL = -1  # ranks but the first have a fault
END_SECONDS = 5.0  # within which a node that was killed is named


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[RayNodes, list[Any]]]:
    """The node of this process and another one, each with a CPU."""
    with ray_cluster({"num_cpus": 1}, head_cpus=1) as cluster:
        yield cluster


@contextmanager
def a_group(fault: Fault, hang_timeout: float = 300.0, size: int = 2) -> Iterator[WorkerGroup]:
    """A group of ranks, of which only the first is on this node. Nothing is left of it."""
    import ray

    from engine.core.placed_ranks import Placement

    options = GroupOptions(log_level="error", hang_timeout=hang_timeout)
    config = fake_config()
    config = replace(
        config,
        model=replace(config.model, model=str(BOX_MODEL)),
        parallel=ParallelConfig(tensor_parallel_size=size, distributed_executor_backend="ray"),
        num_threads=size,
    )
    placement = Placement(config, options, on_gpus=False)
    try:
        assert placement.num_sharing == [1, *[size - 1] * (size - 1)]
        faults = [replace(fault, rank=rank) if fault.rank == ALL else fault for rank in range(size)]
        makes = [partial(make_digests, *SIZES, rank, faults[rank]) for rank in range(1, size)]
        ranks = placement.start(makes, None, options)
        group = WorkerGroup(make_digests(*SIZES, 0, fault), ranks, placement.num_sharing)
        group.at_end = placement.close
        pids = [child.pid for child in ranks.children]
        try:
            group.load()
            group.allocate(SIZES[0])
            yield group
        finally:
            group.shutdown()
    finally:
        placement.close()
    began = time.monotonic()
    total = ray.cluster_resources
    while (
        any(map(psutil.pid_exists, pids)) or ray.available_resources().get("CPU") != total()["CPU"]
    ):
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.05)


def compute(group: WorkerGroup, seed: int) -> None:
    scheduler = make_scheduler(num_blocks=SIZES[0], block_size=SIZES[1])
    run = Run(scheduler, group, 1)
    requests = random_requests(random.Random(seed), 12)
    for request in requests:
        run.add(request)
    run.drain()
    for request in requests:
        wanted = expected(request.prompt_token_ids, len(run.outputs[request.request_id]))
        assert run.outputs[request.request_id] == wanted


def test_ranks_on_two_nodes_compute_what_one_worker_does_until_one_is_killed(
    nodes: tuple[RayNodes, list[Any]], seed: int
) -> None:
    cluster, others = nodes
    with a_group(Fault()) as group:
        compute(group, seed)
        assert group.call("noted", "x" * 100_000) == ["noted", "x" * 100_000]
        cluster.kill(doomed := others.pop())
        began = time.monotonic()
        named = rf"rank 1 \(process \d+ on node [\d.]+ \({doomed.node_id[:8]}\)\) "
        with pytest.raises(RankError, match=named):
            while time.monotonic() - began < WAIT_SECONDS:
                compute(group, seed)
        assert time.monotonic() - began < END_SECONDS
    others.append(cluster.add(num_cpus=1))


@pytest.mark.slow
def test_of_ranks_that_wait_for_each_other_the_last_is_named(
    nodes: tuple[RayNodes, list[Any]], seed: int
) -> None:
    cluster, others = nodes
    cluster.kill(others.pop())
    others.append(cluster.add(num_cpus=2))
    with a_group(Fault("late", rank=2, seconds=0.002), size=3) as group:
        compute(group, seed)
    with (
        a_group(Fault("hang", ALL, after=5), hang_timeout=2.0, size=3) as group,
        pytest.raises(RankError, match=r"rank 2 \(process \d+ on node .* has not answered for 2 s"),
    ):
        compute(group, seed)  # rank 1 waits for rank 2
    cluster.kill(others.pop())
    others.append(cluster.add(num_cpus=1))


MESSAGES = {
    "hang": "has not answered for 1 s in a step",
    "raise": "raised ArithmeticError: a wire has come loose",
    "SIGKILL": "was killed by SIGKILL",
    "other token": "computed other tokens than rank 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_rank_that_fails_on_its_node_ends_the_group(
    nodes: tuple[RayNodes, list[Any]], kind: str, seed: int
) -> None:
    method = "collect" if kind == "other token" else "launch"
    fault = Fault(kind, method=method, after=5)
    with (
        a_group(fault, hang_timeout=1.0 if kind == "hang" else 300.0) as group,
        pytest.raises(RankError, match=f"rank 1.* {MESSAGES[kind]}"),
    ):
        compute(group, seed)
