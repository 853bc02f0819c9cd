"""CoreOrder: a core's process that a node must start."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

from engine.assets import BOX_MODEL
from engine.cluster.nodes.order import NodeOptions, forget_main_module
from engine.config.cache import share_of_cache
from engine.config.engine import EngineConfig
from engine.core.build import build_core
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError
from engine.hub.fetch import fetched
from engine.ipc.address import TCP, tcp_address
from engine.ipc.process import Child, Line
from engine.observe.logs import set_up_logging
from engine.rpc.host import EngineCoreHost
from engine.rpc.launch import Build, serve_for_parent

TRIES = 20  # pairs of ports that a core tries to listen at


@dataclass(frozen=True)
class CoreOrder:
    """A core that a node must start."""

    build: Build
    config: EngineConfig
    has_box_model: bool
    """Run the model in the engine's package, wherever that is installed on the node."""
    node: NodeOptions
    """What its node gives it."""
    num_sharing: int
    """Cores of this engine on the node, which share its memory and, without ``num_threads``, its
    processors."""

    @property
    def ready_timeout(self) -> float:
        return self.config.core.core_ready_timeout

    def spawn(self) -> Child:
        """Start a process that builds the core and serves it over TCP."""
        set_up_logging(self.config.log_level)
        forget_main_module()
        threads = num_threads(self)
        return Child(
            "engine core",
            serve_on_node,
            replace(self, config=replace(self.config, num_threads=threads)),
            environment=self.node.environment(threads),
        )


def build_fetched_core(config: EngineConfig) -> InprocClient:
    """Build a core; fetches the model to this node first if it is named by its repository."""
    return build_core(replace(config, model=fetched(config.model, for_core=True, for_text=False)))


def num_threads(order: CoreOrder) -> int:
    """Threads of the core's kernels: as requested, or a share of the node's processors."""
    cores = len(os.sched_getaffinity(0))
    wanted = order.config.num_threads
    return min(wanted, cores) if wanted is not None else max(1, cores // order.num_sharing)


def serve_on_node(line: Line, order: CoreOrder) -> None:
    """The main function of a core's process on a node."""
    config = _of_this_node(order)
    serve_for_parent(
        line,
        config,
        lambda: _host(order.build(config), config, order.node.ip),
        serves_others=True,
    )


def _of_this_node(order: CoreOrder) -> EngineConfig:
    """The configuration with this node's paths, its share of memory and the secret."""
    config = order.config
    model = config.model
    if order.has_box_model:
        model = replace(model, model=str(BOX_MODEL))
    secret = order.node.known_secret()
    return replace(
        config,
        model=model,
        cache=share_of_cache(config.cache, order.num_sharing),
        core=replace(config.core, core_secret=secret),
    )


def _host(core: InprocClient, config: EngineConfig, ip: str) -> EngineCoreHost:
    """Serve a core at two free ports of this node. Raises ``ConfigError`` if there are none."""
    for left in reversed(range(TRIES)):
        try:
            address = tcp_address(f"{TCP}{ip}:{_free_port(ip)}", config.core.core_secret)
            return EngineCoreHost(core, config, address)
        except (ConfigError, OSError) as error:  # the next port is in use
            if left:
                continue
            core.shutdown()
            raise ConfigError(
                f"the core cannot listen at {ip}, this node's address in the cluster: {error}"
            ) from error
    raise AssertionError("unreachable")


def _free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])
