"""Reserves room for each core on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from engine.cluster.nodes.room import (
    Resources,
    Room,
    connect,
    lack_of,
    largest_share,
    living_nodes,
    wants_gpus,
)
from engine.config.engine import EngineConfig


def room_for_cores(config: EngineConfig) -> Room:
    """Room for ``data_parallel_size`` cores. Raises ``ConfigError`` if the cluster lacks it for
    ``core_ready_timeout`` seconds."""
    connect("data_parallel_backend")
    num = config.core.data_parallel_size
    bundle = bundle_of(config, [node["Resources"] for node in living_nodes()])
    sizes = f"data_parallel_size is {num}"
    lack = partial(lack_of, bundle, num, "core", sizes, "data_parallel_size or num_threads")
    return Room(bundle, num, "SPREAD", timeout=config.core.core_ready_timeout, lack=lack)


def bundle_of(config: EngineConfig, nodes: Sequence[Resources]) -> dict[str, float]:
    """The resources of each core: a GPU if the model runs on GPUs, and CPUs: ``num_threads``, else
    1 next to a GPU, else as many as each core can have.

    nodes: total resources of each node."""
    if wants_gpus(config.device, nodes):
        return {"CPU": config.num_threads or 1, "GPU": 1}
    return {"CPU": config.num_threads or largest_share(nodes, config.core.data_parallel_size)}
