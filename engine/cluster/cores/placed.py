"""PlacedCore: the front end's side of a core's process on a node of a Ray cluster."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from engine.assets import BOX_MODEL
from engine.cluster.cores import node as node_module
from engine.cluster.cores.checks import VARIABLES, wanted_from
from engine.cluster.cores.node import CoreNode, describe
from engine.cluster.cores.places import Places
from engine.cluster.cores.spawn import CoreOrder
from engine.config.engine import EngineConfig
from engine.errors import EngineDeadError
from engine.ipc.address import address_of
from engine.ipc.process import StartReport
from engine.ipc.sockets import Waker
from engine.rpc.launch import Build, start_error
from engine.rpc.zmq_client import EngineCoreClient

CLOSE_SECONDS = 3.0  # a core that was requested to end is killed after this time
WORD_SECONDS = 0.5  # wait for the reason of an end after the connection was lost

ray.cloudpickle.register_pickle_by_value(node_module)


class PlacedCore:
    """A core's process on a node, kept by an actor. It has the interface of ``Child``."""

    def __init__(self, index: int, places: Places, config: EngineConfig, build: Build) -> None:
        self._index = index
        self._places = places
        self._config = config
        self._build = build
        self._waker = Waker()  # its end becomes readable when the process has ended
        self._end: Future[str] | None = None
        self._requested: Any = None  # the actor's answer to a request to end
        self._is_closed = False
        self._about: dict[str, Any] | None = None
        self.pid = 0
        """The process id on its node; 0 before it has started."""
        self._actor = ray.remote(CoreNode).options(
            max_concurrency=4, **places.options_of(index)
        ).remote()  # fmt: skip
        self._report = self._actor.report.remote(*wanted_from(config))

    @property
    def pidfd(self) -> int:
        return self._waker.fd

    @property
    def place(self) -> str:
        """The node's name, without its address; empty before it is known."""
        return "" if self._about is None else f"node {self._about['node'][:8]}"

    @property
    def name(self) -> str:
        """The core and its node, for messages."""
        if self._about is None:
            return f"core {self._index}"
        return f"core {self._index} on node {self._about['ip']} ({self._about['node'][:8]})"

    def node(self) -> dict[str, Any]:
        """The result of ``CoreNode.report``, as soon as the actor runs. Raises
        ``EngineDeadError`` if it finds no place within ``core_ready_timeout``."""
        if self._about is None:
            try:
                about: dict[str, Any] = self._wait(self._report)
            except TimeoutError:
                raise EngineDeadError(
                    f"{self.name} found no place on the Ray cluster: {self._places.lack()}"
                ) from None
            self._about = about
        return self._about

    def connect(self, num_sharing: int) -> EngineCoreClient:
        """Start the core and return its client when it is ready.

        num_sharing: cores of this engine on the node. Raises the errors of ``build``, and
        ``EngineDeadError`` if the process or the node dies."""
        own = self._config.core.core_secret
        secret = secrets.token_urlsafe(32) if own is None else own
        order = self._order(None if own is not None else secret, num_sharing)
        try:
            encoded, self.pid = self._wait(self._actor.start.remote(order))
        except TimeoutError:
            raise EngineDeadError(
                f"{self.name} was not ready in {self._config.core.core_ready_timeout:g} s; raise "
                "core_ready_timeout if loading takes longer"
            ) from None
        report = msgspec.msgpack.decode(encoded, type=StartReport)
        if not report.is_ready:
            message = f"{self.name}: {report.message}"
            raise start_error(msgspec.structs.replace(report, message=message))
        self._end = self._actor.watch.remote().future()
        self._end.add_done_callback(lambda future: self._waker.wake())
        return EngineCoreClient(
            address_of(report.address, secret),
            child=self,
            hang_timeout=self._config.core.core_hang_timeout,
            media=self._config.media,
        )

    def how_it_ended(self) -> str | None:
        where = f"on node {self.node()['ip']} ({self.node()['node'][:8]})"
        if self._end is None:
            return f"{where} was ended"
        try:
            return f"{where} {self._end.result(WORD_SECONDS)}"
        except RayError as error:
            return f"{where} was lost: {type(error).__name__}"
        except TimeoutError:
            return f"{where} cannot be reached"

    def request_end(self) -> None:
        self._request_end(kills=False)

    def kill(self) -> None:
        if self._end is None:  # still loading: the core ends with its actor
            ray.kill(self._actor)
        else:
            self._request_end(kills=True)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if ray.is_initialized():
            if not (self._end is None or self._end.done()):
                self._request_end(kills=False)
            if self._requested is not None:
                with suppress(RayError, TimeoutError):
                    self._requested.future().result(CLOSE_SECONDS)
            ray.kill(self._actor)
        if self._end is not None:
            self._end.cancel()
        self._waker.close()

    def _request_end(self, kills: bool) -> None:
        if ray.is_initialized() and (kills or self._requested is None):
            self._requested = self._actor.end.remote(kills)

    def _order(self, secret: str | None, num_sharing: int) -> CoreOrder:
        """The order to start the core. ``secret`` is sent if each start has its own."""
        config = self._config
        if "GPU" not in self._places.bundle:  # a container may show more processors than it has
            config = replace(config, num_threads=int(self._places.bundle["CPU"]))
        values = describe((), None, VARIABLES)["variables"]
        return CoreOrder(
            build=self._build,
            config=replace(config, core=replace(config.core, core_secret=None)),
            has_box_model=config.model.model == str(BOX_MODEL),
            ip=self.node()["ip"],
            secret=secret,
            num_sharing=num_sharing,
            variables={name: value for name, value in values.items() if value is not None},
        )

    def _wait(self, ref: Any) -> Any:
        """The result of a call of the actor. Raises ``TimeoutError`` after ``core_ready_timeout``,
        ``EngineDeadError`` if the actor has died."""
        try:
            return ref.future().result(self._config.core.core_ready_timeout)
        except RayError as error:
            text = str(error).strip().splitlines()[0]
            raise EngineDeadError(
                f"Engine core initialization failed: {self.name} was lost: {text}"
            ) from error
