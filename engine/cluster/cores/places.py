"""Places: reserves room for each core on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config.engine import EngineConfig
from engine.config.env import RAY_ADDRESS, ray_address
from engine.errors import ConfigError

logger = logging.getLogger("engine.core")

WAIT_SECONDS = 1.0  # a cluster without room for this long is logged; Ray takes whole seconds
CLIENT = "ray://"
Resources = Mapping[str, float]


def connect() -> None:
    """Connect this process to the cluster of this machine, unless it is connected already.

    Raises ``ConfigError`` if no cluster runs here."""
    if ray.is_initialized():
        return
    address = ray_address()
    if address is not None and address.startswith(CLIENT):
        raise ConfigError(
            f"{RAY_ADDRESS} is {address!r}: cores need a front end on a node of the cluster; run "
            "`ray start --address=HEAD:PORT --num-cpus=0` on this machine, and unset it"
        )
    try:
        with signals_kept():
            ray.init(address="auto", configure_logging=False, namespace="metronome")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"data_parallel_backend is 'ray', and this machine cannot join a Ray cluster: {error}; "
            "run `ray start --head` on one machine and `ray start --address=HEAD:PORT` on the "
            f"others, with this one among them, or set {RAY_ADDRESS}"
        ) from error


@contextmanager
def signals_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM, which connecting to Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class Places:
    """Room for ``data_parallel_size`` cores: a placement group with a bundle for each.

    Raises ``ConfigError`` if the cluster lacks room for ``core_ready_timeout`` seconds."""

    def __init__(self, config: EngineConfig) -> None:
        connect()
        self.num = config.core.data_parallel_size
        self._timeout = config.core.core_ready_timeout
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.bundle = bundle_of(config, nodes)
        """Resources of each core."""
        self._group: PlacementGroup = placement_group(
            [dict(self.bundle)] * self.num, strategy="SPREAD"
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def options_of(self, core: int) -> dict[str, Any]:
        """Options of the actor that keeps this core."""
        return {
            "num_cpus": self.bundle["CPU"],
            "num_gpus": self.bundle.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, core),
        }

    def lack(self) -> str:
        """What the cores need and what the cluster has, for messages."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        has = ", ".join(
            f"{node['NodeManagerAddress']} has {shown(self.bundle, node['Resources'])}"
            for node in alive
        )
        room = room_in([node["Resources"] for node in alive], self.bundle)
        free = shown(self.bundle, ray.available_resources())
        cores = f"{self.num} core{'s' if self.num > 1 else ''}"
        return (
            f"data_parallel_size is {self.num}, and each core needs {shown(self.bundle)}: of "
            f"{cores} the nodes have room for {min(room, self.num)} if nothing else runs there "
            f"({has}), and {free} are free now; start further nodes, end what uses them, or lower "
            "data_parallel_size or num_threads"
        )

    def close(self) -> None:
        """Release the room. May be repeated."""
        if ray.is_initialized():
            remove_placement_group(self._group)

    def _wait(self) -> None:
        until = time.monotonic() + self._timeout
        is_logged = False
        # Signals are handled between two waits, not during one.
        while not self._group.wait(WAIT_SECONDS):
            if time.monotonic() > until:
                raise ConfigError(
                    f"the Ray cluster had no room for {self._timeout:g} s (core_ready_timeout): "
                    f"{self.lack()}"
                )
            if not is_logged:
                logger.warning(
                    "waiting for room on the Ray cluster, up to %g s (core_ready_timeout): %s",
                    self._timeout,
                    self.lack(),
                )
            is_logged = True


def bundle_of(config: EngineConfig, nodes: list[Resources]) -> dict[str, float]:
    """The resources of each core: a GPU if the model runs on GPUs, and CPUs: ``num_threads``, else
    1 next to a GPU, else as many as each core can have.

    nodes: total resources of each node."""
    num = config.core.data_parallel_size
    has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        return {"CPU": config.num_threads or 1, "GPU": 1}
    if config.num_threads is not None:
        return {"CPU": config.num_threads}
    most = int(max((node.get("CPU", 0) for node in nodes), default=0))
    fitting = (cpus for cpus in range(most, 0, -1) if room_in(nodes, {"CPU": cpus}) >= num)
    return {"CPU": next(fitting, 1)}


def room_in(nodes: list[Resources], bundle: Resources) -> int:
    """How many bundles fit on these nodes."""
    return sum(
        min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes
    )


def shown(bundle: Resources, amounts: Resources | None = None) -> str:
    """Amounts of the resources of ``bundle`` as a text, e.g. "2 CPU and 1 GPU"."""
    amounts = bundle if amounts is None else amounts
    return " and ".join(f"{amounts.get(name, 0):g} {name}" for name in bundle)
