"""Starts the cores of an engine on the nodes of a Ray cluster."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import count

from engine.cluster.cores.placed import PlacedCore
from engine.cluster.cores.places import room_for_cores
from engine.cluster.cores.spawn import build_fetched_core
from engine.cluster.nodes.checks import check_nodes
from engine.config.engine import EngineConfig
from engine.rpc.launch import Build, connect_all, many, numbered, started
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.restarts import Starting
from engine.rpc.zmq_client import EngineCoreClient


def start_cores_on_ray(config: EngineConfig, build: Build = build_fetched_core) -> ManyCoresClient:
    """Start ``data_parallel_size`` cores, each with its share of a node of the Ray cluster that
    this machine belongs to. They end with the client or with this process.

    Raises ``ConfigError`` if there is no cluster or too little room, or if a node has other
    versions or lacks the model; then no weights are loaded."""
    num_cores = config.core.data_parallel_size
    num_starts = [count() for _ in range(num_cores)]
    homes: dict[int, str] = {}  # the node of each core

    def connect(core: PlacedCore, index: int) -> EngineCoreClient:
        with ExitStack() as failing:
            failing.callback(core.close)
            about = core.node()
            check_nodes(config.core.core_secret, [("", about)], "cores")
            homes[index] = about["node"]
            client = core.connect(Counter(homes.values())[about["node"]])
            failing.pop_all()
        return client

    def place(index: int) -> PlacedCore:
        own = started(numbered(config, index, num_cores), next(num_starts[index]))
        return PlacedCore(index, room, own, build)

    def start(index: int) -> Starting:
        return starting(index, place(index))

    def starting(index: int, core: PlacedCore) -> Starting:
        return Starting(core, partial(connect, core, index))

    with ExitStack() as failing:
        room = room_for_cores(config)
        failing.callback(room.close)
        cores = []
        for index in range(num_cores):
            cores.append(place(index))
            failing.callback(cores[-1].close)
        nodes = [core.node() for core in cores]
        check_nodes(config.core.core_secret, [("", about) for about in nodes], "cores")
        homes.update((index, node["node"]) for index, node in enumerate(nodes))
        restarts = config.core.on_core_death == "restart"
        clients = iter(connect_all([starting(*each) for each in enumerate(cores)]))
        return many(failing, clients, start if restarts else None, room.close)
