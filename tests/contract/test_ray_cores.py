"""Cores on the nodes of a Ray cluster: placed, killed with their node, placed anew, released."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from support.core_clients import drain
from support.patience import WAIT_SECONDS
from support.ray_cluster import RayNodes, ray_cluster
from support.simulate import expected, make_request
from support.spawned import FakeBuild, fake_config

from engine.config.engine import EngineConfig
from engine.errors import ConfigError
from engine.rpc.many_client import ManyCoresClient

pytest.importorskip("ray", reason="Ray is not installed: pip install metronome-engine[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
END_SECONDS = 5.0  # within which requests of a dead node end


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[RayNodes, list[Any]]]:
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        yield cluster


def on_ray(num: int, **options: Any) -> EngineConfig:
    return fake_config(
        multiprocess=True, data_parallel_size=num, data_parallel_backend="ray", **options
    )


def start(config: EngineConfig, build: FakeBuild) -> ManyCoresClient:
    from engine.cluster.cores.launch import start_cores_on_ray

    return start_cores_on_ray(config, build)


def test_a_cluster_without_room_is_refused_in_time_with_what_is_missing(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    began = time.monotonic()
    with pytest.raises(
        ConfigError,
        match=r"no room for 2 s \(core_ready_timeout\): data_parallel_size is 3, and each core "
        r"needs 1 CPU: of 3 cores the nodes have room for 2 .* has 1 CPU.* or lower",
    ):
        start(on_ray(3, core_ready_timeout=2.0), FakeBuild())
    assert time.monotonic() - began < WAIT_SECONDS


def test_a_core_that_cannot_start_is_named_with_its_node(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    from engine.errors import EngineDeadError

    with pytest.raises(EngineDeadError, match=r"core [01] on node [\d.]+ \(\w+\): no weights"):
        start(on_ray(2), FakeBuild(fail_start="no weights"))


def test_a_node_that_is_killed_ends_its_requests_alone_and_its_core_moves(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    import ray

    cluster, (_, doomed) = nodes
    client = start(on_ray(2, on_core_death="restart"), FakeBuild(step_seconds=0.01))
    try:
        first = client.pids
        parents = {psutil.Process(pid).ppid() for pid in first}
        variables = [psutil.Process(pid).environ() for pid in first]
        assert [each["OMP_NUM_THREADS"] for each in variables] == ["1", "1"]  # their CPUs
        client.add_all([make_request(str(i), [i + 1], 300) for i in range(32)])
        while not client.step():
            pass
        killed = cluster.kill(doomed)
        began = time.monotonic()
        ends: dict[str, tuple[str, str, float]] = {}
        while len(ends) < 32:
            for batch in client.step():
                for end in batch.finished:
                    seconds = time.monotonic() - began
                    ends[batch.request_ids[end.index]] = (end.reason, end.message, seconds)
        died = [end for end in ends.values() if end[0] == "error"]
        assert len(died) == 16
        for _, message, seconds in died:
            assert seconds < END_SECONDS
            assert f"on node {doomed.node_id[:8]}, which ran this request, has died: " in message
            assert "of 2 at tcp://" in message
        assert [end[0] for end in ends.values() if end[0] != "error"] == ["length"] * 16
        assert len(set(first) & set(killed)) == 1

        cluster.add(num_cpus=1)
        began = time.monotonic()
        while client.num_cores().alive < 2:
            client.step()
            assert time.monotonic() - began < WAIT_SECONDS
        client.add_all([make_request(f"again-{i}", [i + 1], 30) for i in range(8)])
        wanted = {f"again-{i}": expected([i + 1], 30) for i in range(8)}
        assert drain(client)[0] == wanted
        pids = client.pids
    finally:
        client.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in (*pids, *first))
    began = time.monotonic()
    while any(psutil.pid_exists(pid) for pid in parents):
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.05)
    while ray.available_resources().get("CPU", 0) < 2:  # the room is free again
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.05)


@pytest.mark.perf
def test_idle_cores_and_their_keepers_use_less_than_a_hundredth_of_a_processor(
    nodes: tuple[RayNodes, list[Any]],
) -> None:
    client = start(on_ray(2), FakeBuild())
    try:
        cores = [psutil.Process(pid) for pid in client.pids]
        watched = [*cores, *(core.parent() for core in cores)]
        before = [sum(each.cpu_times()[:2]) for each in watched if each]
        time.sleep(10.0)
        after = [sum(each.cpu_times()[:2]) for each in watched if each]
    finally:
        client.shutdown()
    used = [round((late - early) / 10.0, 4) for early, late in zip(before, after, strict=True)]
    assert max(used) < 0.01, used
