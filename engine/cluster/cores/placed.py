"""PlacedCore: the front end's side of a core's process on a node of a Ray cluster."""

from __future__ import annotations

import secrets
from dataclasses import replace

import msgspec

from engine.assets import BOX_MODEL
from engine.cluster.cores.spawn import CoreOrder
from engine.cluster.nodes.checks import local_models
from engine.cluster.nodes.kept import Kept, variables_here
from engine.cluster.nodes.order import NodeOptions
from engine.cluster.nodes.room import Room
from engine.config.engine import EngineConfig
from engine.ipc.address import address_of
from engine.rpc.launch import Build, start_error
from engine.rpc.zmq_client import EngineCoreClient


class PlacedCore(Kept):
    """A core's process on a node."""

    def __init__(self, index: int, room: Room, config: EngineConfig, build: Build) -> None:
        self._room = room
        self._config = config
        self._build = build
        super().__init__(
            f"core {index}",
            room.options_of(index),
            local_models(config),
            timeout=config.core.core_ready_timeout,
            lack=room.lack,
        )

    def connect(self, num_sharing: int) -> EngineCoreClient:
        """Start the core and return its client when it is ready.

        num_sharing: cores of this engine on the node. Raises the errors of ``build``, and
        ``EngineDeadError`` if the process or the node dies."""
        own = self._config.core.core_secret
        secret = secrets.token_urlsafe(32) if own is None else own
        report = self.start(self._order(None if own is not None else secret, num_sharing))
        if not report.is_ready:
            message = f"{self.name}: {report.message}"
            raise start_error(msgspec.structs.replace(report, message=message))
        return EngineCoreClient(
            address_of(report.address, secret),
            child=self,
            hang_timeout=self._config.core.core_hang_timeout,
            media=self._config.media,
        )

    def _order(self, secret: str | None, num_sharing: int) -> CoreOrder:
        """The order to start the core. ``secret`` is sent if each start has its own."""
        config = self._config
        if "GPU" not in self._room.bundle:  # a container may show more processors than it has
            config = replace(config, num_threads=int(self._room.bundle["CPU"]))
        return CoreOrder(
            build=self._build,
            config=replace(config, core=replace(config.core, core_secret=None)),
            has_box_model=config.model.model == str(BOX_MODEL),
            node=NodeOptions(self.node()["ip"], secret, variables_here()),
            num_sharing=num_sharing,
        )
