"""Places the ranks of a group on the nodes of a Ray cluster, and starts them there.

    core, rank 0 ── calls, by TCP ──> rank 1 on another node, a process that an actor keeps there
                 <── reports ───────
    rank 0 <── sums and gathers, by torch.distributed ──> rank 1

Ray reserves the room and starts processes; no step passes through it. Ranks that all got room on
the core's own node are started as without Ray, and share memory.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import ray
import torch

from engine.cluster.nodes.checks import check_nodes
from engine.cluster.nodes.kept import Kept, variables_here
from engine.cluster.nodes.order import NodeOptions, forget_main_module
from engine.cluster.nodes.room import Resources, Room, connect, lack_of, largest_share, living_nodes
from engine.config.engine import EngineConfig, ResolvedConfig
from engine.config.env import VISIBLE_GPUS, visible_gpus
from engine.core.rank_processes import GroupOptions, Ranks
from engine.core.rank_watch import KINDS
from engine.errors import ConfigError, RankError
from engine.ipc.process import Child, StartReport
from engine.ipc.rank_sockets import RankSockets
from engine.observe.logs import set_up_logging
from engine.worker.main import FarWorker, serve_far_rank

OPTION = "distributed_executor_backend"
MakeRank = Callable[[], FarWorker]

logger = logging.getLogger("engine.core")


@dataclass(frozen=True)
class RankOrder:
    """A rank's process that a node must start."""

    make: MakeRank
    node: NodeOptions
    num_threads: int
    options: GroupOptions
    name: str

    @property
    def ready_timeout(self) -> float:
        return self.options.ready_timeout

    def spawn(self) -> Child:
        """Start a process that listens for the core, and then makes its worker."""
        level = self.options.log_level
        set_up_logging(level)
        forget_main_module()
        secret = self.node.known_secret()
        return Child(
            self.name,
            serve_far_rank,
            *(self.node.ip, secret, self.make, level, self.name),
            environment=self.node.environment(self.num_threads),
        )


class PlacedRank(Kept):
    """A rank's process on a node."""

    def __init__(self, rank: int, *arguments: Any, **options: Any) -> None:
        super().__init__(f"rank {rank}", *arguments, **options)
        self.rank = rank
        self._line: Connection | None = None

    @property
    def line(self) -> Connection:
        """Where its reports come from."""
        assert self._line is not None, "the core is not connected"
        return self._line

    @line.setter
    def line(self, line: Connection) -> None:
        self._line = line

    @property
    def place(self) -> str:
        node = self.node()
        return f"node {node['ip']} ({node['node'][:8]})"

    def how_it_ended(self) -> str | None:
        return self._how()

    def begin(self, order: RankOrder) -> StartReport:
        """Start the process. Raises the error of a process that cannot start."""
        report = self.start(order)
        if not report.is_ready:
            kind = KINDS.get(report.kind, RankError)
            raise kind(f"{self.name}: {report.message}")
        return report


class Placement:
    """Room for all ranks of a group on a cluster, and an actor in each place.

    on_gpus: each rank needs a GPU. Raises ``ConfigError`` for a cluster without room, or whose
    nodes differ from this one."""

    def __init__(self, config: EngineConfig, options: GroupOptions, *, on_gpus: bool) -> None:
        connect(OPTION)
        size = config.parallel.tensor_parallel_size
        self._is_closed = False
        self.here: str = ray.get_runtime_context().get_node_id()
        self.on_gpus = on_gpus
        nodes = {node["NodeID"]: node["Resources"] for node in living_nodes()}
        bundle = bundle_of(config, nodes, self.here, on_gpus=on_gpus)
        self.num_threads = int(bundle["CPU"])
        lack = partial(lack_of_ranks, bundle, size, self.here)
        with ExitStack() as failing:
            timeout = options.ready_timeout
            self._room = Room(
                bundle, size, "PACK", timeout=timeout, lack=lack, first_node=self.here
            )
            self.ranks: list[PlacedRank] = []
            failing.callback(self.close)
            for rank, place in enumerate(in_order(self._room.nodes())):
                where = self._room.options_of(place), [config.model.model]
                self.ranks.append(PlacedRank(rank, *where, timeout=timeout, lack=lack))
            reports = [(f"rank {one.rank}", one.node()) for one in self.ranks]
            secret = config.core.core_secret
            check_nodes(secret, reports, "the ranks", are_ranks=True)
            self.nodes: list[str] = [one.node()["node"] for one in self.ranks]
            self.ips: list[str] = [one.node()["ip"] for one in self.ranks]
            self.gpus = self._gpus() if on_gpus else []
            """The GPU of each rank, by its number on the node of the rank."""
            failing.pop_all()
        places = (f"rank {one.rank} on {one.place}" for one in self.ranks)
        logger.info("places on the Ray cluster: %s", ", ".join(places))

    @property
    def is_local(self) -> bool:
        """True if all ranks are on this node."""
        return set(self.nodes) == {self.here}

    @property
    def num_sharing(self) -> list[int]:
        """For each rank, how many ranks are on its node."""
        return [self.nodes.count(node) for node in self.nodes]

    def environments(self) -> list[Mapping[str, str]]:
        """The variables that give ranks 1, 2, ... their GPUs; [] on CPUs."""
        return [{VISIBLE_GPUS: gpu} for gpu in self.gpus[1:]]

    def start(self, makes: Sequence[MakeRank], secret: str | None, options: GroupOptions) -> Ranks:
        """Start the processes of ranks 1, 2, ... on their nodes, and connect to them. makes: a
        function for each, which makes its worker there."""
        own = secrets.token_urlsafe(32) if secret is None else secret
        environments = self.environments() or [{}] * len(makes)
        orders = [
            RankOrder(
                make=make,
                node=NodeOptions(
                    one.node()["ip"],
                    own if secret is None else None,
                    {**variables_here(), **values},
                ),
                num_threads=self.num_threads,
                options=options,
                name=f"{options.name} {one.name}".strip(),
            )
            for make, one, values in zip(makes, self.ranks[1:], environments, strict=True)
        ]
        others = self.ranks[1:]
        with ThreadPoolExecutor(len(others)) as threads:
            reports = list(threads.map(PlacedRank.begin, others, orders))
        addresses = [report.address for report in reports]
        calls = RankSockets(addresses, own, lambda index: others[index].lose())
        for one, line in zip(others, calls.lines, strict=True):
            one.line = line
        return Ranks(calls, others, options)

    def close(self) -> None:
        """End what runs in all places, and release the room. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        for one in self.ranks:
            one.request_end()
        for one in self.ranks:
            one.close()
        self._room.close()

    def _gpus(self) -> list[str]:
        given = [one.node()["gpus"] for one in self.ranks]
        num_here = self.nodes.count(self.here)
        first, *_ = [*visible_gpus(torch.cuda.device_count()), ""]
        return [*with_first(first, given[:num_here]), *given[num_here:]]


def bundle_of(
    config: EngineConfig, nodes: Mapping[str, Resources], here: str, *, on_gpus: bool
) -> dict[str, float]:
    """The resources of each rank: a GPU and a CPU; on CPUs its share of ``num_threads``, by default
    as many as each rank can have.

    nodes: total resources of each node; here: the node of rank 0."""
    size = config.parallel.tensor_parallel_size
    if on_gpus:
        return {"CPU": 1, "GPU": 1}
    if config.num_threads is not None:
        return {"CPU": max(1, config.num_threads // size)}
    most = max(1, int(nodes[here].get("CPU", 0)))
    return {"CPU": min(most, largest_share(list(nodes.values()), size))}


def lack_of_ranks(bundle: Resources, size: int, here: str) -> str:
    """What the ranks need and what the cluster has, for messages."""
    sizes = f"tensor_parallel_size is {size}, with rank 0 on this node ({here[:8]})"
    return lack_of(bundle, size, "rank", sizes, "tensor_parallel_size or num_threads")


def in_order(nodes: Sequence[str]) -> list[int]:
    """The places of ranks 0, 1, ..., so that those on a node follow each other, and the first place
    comes first. nodes: of each place."""
    return sorted(range(len(nodes)), key=lambda place: (nodes.index(nodes[place]), place))


def with_first(first: str, given: Sequence[str]) -> list[str]:
    """The GPUs of ranks on one node, of which the first rank takes ``first``, the one that its
    process uses. given: by Ray. Raises ``ConfigError`` if ``first`` is not among them."""
    if first not in given:
        raise ConfigError(
            f"Ray gives the ranks on this node the GPU{'s' if len(given) > 1 else ''} "
            f"{', '.join(given)}, but this process computes on {first or 'none'}: set "
            f"{VISIBLE_GPUS}={given[0]} for it"
        )
    return [first, *(given[0] if gpu == first else gpu for gpu in given[1:])]


def for_ranks(config: ResolvedConfig, placement: Placement) -> ResolvedConfig:
    """The configuration of each rank."""
    core = replace(config.core, core_secret=None)
    config = replace(config, num_threads=placement.num_threads, core=core)
    if placement.is_local or placement.on_gpus:
        return config
    # Operations of torch are not among the kernel launches that a recorded step repeats.
    return replace(config, gpu=replace(config.gpu, enforce_eager=True))
