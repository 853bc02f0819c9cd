"""Room: reserves a part of the nodes of a Ray cluster for some processes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config.env import RAY_ADDRESS, ray_address
from engine.errors import ConfigError

logger = logging.getLogger("engine.core")

WAIT_SECONDS = 1.0  # a cluster without room for this long is logged; Ray takes whole seconds
CLIENT = "ray://"
NODE_LABEL = "ray.io/node-id"
Resources = Mapping[str, float]


def connect(option: str) -> None:
    """Connect this process to the cluster of this machine, unless it is connected already.

    option: that has the value "ray". Raises ``ConfigError`` if no cluster runs here."""
    if ray.is_initialized():
        return
    address = ray_address()
    if address is not None and address.startswith(CLIENT):
        raise ConfigError(
            f"{RAY_ADDRESS} is {address!r}: {option}='ray' needs an engine on a node of the "
            "cluster; run `ray start --address=HEAD:PORT` on this machine, and unset it"
        )
    try:
        with signals_kept():
            ray.init(address="auto", configure_logging=False, namespace="metronome")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{option} is 'ray', and this machine cannot join a Ray cluster: {error}; "
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


class Room:
    """A placement group with ``num`` equal bundles, one for each process.

    bundle: resources of each. strategy: SPREAD or PACK, over the nodes. timeout: seconds to wait
    for room. lack: says what is missing. first_node: on which the first bundle must be; ``None``:
    anywhere. Raises ``ConfigError`` if the cluster lacks room for that long."""

    def __init__(
        self,
        bundle: Resources,
        num: int,
        strategy: str,
        *,
        timeout: float,
        lack: Callable[[], str],
        first_node: str | None = None,
    ) -> None:
        self.bundle = bundle
        self.lack = lack
        self._timeout = timeout
        first = {} if first_node is None else {NODE_LABEL: first_node}
        self._group: PlacementGroup = placement_group(
            [dict(bundle)] * num,
            strategy=strategy,
            bundle_label_selector=[first, *[{}] * (num - 1)] if first else None,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def options_of(self, index: int) -> dict[str, Any]:
        """Options of the actor that uses this bundle."""
        return {
            "num_cpus": self.bundle["CPU"],
            "num_gpus": self.bundle.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }

    def nodes(self) -> list[str]:
        """The node of each bundle."""
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return [found[index] for index in sorted(found)]

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


def living_nodes() -> list[dict[str, Any]]:
    """Ray's descriptions of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def wants_gpus(device: str, nodes: Sequence[Resources]) -> bool:
    """True if each process needs a GPU. nodes: total resources of each node."""
    return device == "cuda" or (device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))


def largest_share(nodes: Sequence[Resources], num: int) -> int:
    """The most CPUs that each of ``num`` processes on these nodes can have; at least 1."""
    most = int(max((node.get("CPU", 0) for node in nodes), default=0))
    fitting = (cpus for cpus in range(most, 0, -1) if room_in(nodes, {"CPU": cpus}) >= num)
    return next(fitting, 1)


def room_in(nodes: Sequence[Resources], bundle: Resources) -> int:
    """How many bundles fit on these nodes."""
    return sum(
        min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes
    )


def shown(bundle: Resources, amounts: Resources | None = None) -> str:
    """Amounts of the resources of ``bundle`` as a text, e.g. "2 CPU and 1 GPU"."""
    amounts = bundle if amounts is None else amounts
    return " and ".join(f"{amounts.get(name, 0):g} {name}" for name in bundle)


def lack_of(bundle: Resources, num: int, what: str, sizes: str, way_out: str) -> str:
    """What ``num`` processes need and what the cluster has, for messages.

    what: one of them; sizes: the option that says how many; way_out: what may be lowered."""
    alive = living_nodes()
    has = ", ".join(
        f"{node['NodeManagerAddress']} has {shown(bundle, node['Resources'])}" for node in alive
    )
    room = room_in([node["Resources"] for node in alive], bundle)
    free = shown(bundle, ray.available_resources())
    return (
        f"{sizes}, and each {what} needs {shown(bundle)}: of {num} {what}{'s' if num > 1 else ''} "
        f"the nodes have room for {min(room, num)} if nothing else runs there ({has}), and {free} "
        f"are free now; start further nodes, end what uses them, or lower {way_out}"
    )
