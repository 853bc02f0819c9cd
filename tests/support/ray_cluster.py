"""A Ray cluster on this machine, whose nodes tests can kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from support.patience import WAIT_SECONDS

STORE_BYTES = 80 << 20  # the least that Ray takes
TESTS = Path(__file__).resolve().parents[1]


class RayNodes:
    """Nodes of a cluster that runs in processes of this machine."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address

    def add(self, **resources: Any) -> Any:
        """Start a node. resources: num_cpus, num_gpus, env_vars."""
        return self._cluster.add_node(object_store_memory=STORE_BYTES, **resources)

    def kill(self, node: Any) -> list[int]:
        """Kill a node with all its processes. Returns their ids."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        doomed = [raylet, *raylet.children(recursive=True)]
        for process in doomed:
            process.kill()
        psutil.wait_procs(doomed, WAIT_SECONDS)
        return [process.pid for process in doomed]


@contextmanager
def ray_cluster(
    *nodes: dict[str, float], head_cpus: int = 0
) -> Iterator[tuple[RayNodes, list[Any]]]:
    """A cluster of a head, which is the node of this process, and of these nodes. Processes of this
    block join it. Nothing is sent outside: no usage statistics, no dashboard."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "500",  # a dead node is noticed sooner than by default
        "RAY_health_check_failure_threshold": "4",
        "RAY_health_check_timeout_ms": "2000",
        # Serve kills a proxy that a busy machine has not started in five seconds.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(WAIT_SECONDS),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(WAIT_SECONDS),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    before = {name: os.environ.get(name) for name in (*variables, "RAY_ADDRESS")}
    os.environ.update(variables)
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": head_cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        known = RayNodes(cluster)
        os.environ["RAY_ADDRESS"] = known.address
        yield known, [known.add(**resources) for resources in nodes]
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
