"""Kept: a process on a node of a Ray cluster, as its owner on another machine sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from engine.cluster.nodes import node as node_module
from engine.cluster.nodes.checks import VARIABLES, wanted_from
from engine.cluster.nodes.node import Keeper, describe
from engine.cluster.nodes.order import Order
from engine.errors import EngineDeadError
from engine.ipc.process import StartReport
from engine.ipc.sockets import Waker

CLOSE_SECONDS = 3.0  # a process that was requested to end is killed after this time
WORD_SECONDS = 0.5  # wait for the reason of an end after the connection was lost

ray.cloudpickle.register_pickle_by_value(node_module)


class Kept:
    """A process on a node, kept by an actor. It has the interface of ``CoreProcess``.

    title: for messages. options: of the actor. models: which the node must have. timeout: seconds
    that the start may take. lack: what the cluster lacks if the actor finds no place."""

    def __init__(
        self,
        title: str,
        options: Mapping[str, Any],
        models: Sequence[str],
        *,
        timeout: float,
        lack: Callable[[], str],
    ) -> None:
        self._title = title
        self._timeout = timeout
        self._lack = lack
        self._waker = Waker()  # its end becomes readable when the process has ended
        self._end: Future[str] | None = None
        self._requested: Any = None  # the actor's answer to a request to end
        self._is_closed = False
        self._about: dict[str, Any] | None = None
        self.pid = 0
        """The process id on its node; 0 before it has started."""
        self._actor = ray.remote(Keeper).options(max_concurrency=4, **options).remote()
        self._report = self._actor.report.remote(*wanted_from(models))

    @property
    def pidfd(self) -> int:
        return self._waker.fd

    @property
    def place(self) -> str:
        """The node's name, without its address; empty before it is known."""
        return "" if self._about is None else f"node {self._about['node'][:8]}"

    @property
    def where(self) -> str:
        """The node with its address, for messages."""
        node = self.node()
        return f"on node {node['ip']} ({node['node'][:8]})"

    @property
    def name(self) -> str:
        """The process and its node, for messages."""
        return self._title if self._about is None else f"{self._title} {self.where}"

    def node(self) -> dict[str, Any]:
        """The result of ``Keeper.report``, as soon as the actor runs. Raises ``EngineDeadError`` if
        it finds no place in time."""
        if self._about is None:
            try:
                about: dict[str, Any] = self._wait(self._report)
            except TimeoutError:
                raise EngineDeadError(
                    f"{self.name} found no place on the Ray cluster: {self._lack()}"
                ) from None
            self._about = about
        return self._about

    def start(self, order: Order) -> StartReport:
        """Start the process and return its report. Raises ``EngineDeadError`` if the process or the
        node dies, or if it is late."""
        try:
            encoded, self.pid = self._wait(self._actor.start.remote(order))
        except TimeoutError:
            raise EngineDeadError(
                f"{self.name} was not ready in {self._timeout:g} s; raise core_ready_timeout if "
                "loading takes longer"
            ) from None
        report = msgspec.msgpack.decode(encoded, type=StartReport)
        if report.is_ready:
            self._end = self._actor.watch.remote().future()
            self._end.add_done_callback(lambda future: self._waker.wake())
        return report

    def lose(self) -> None:
        """Take note that the connection to the process is lost. Any thread may call it."""
        self._waker.wake()

    def how_it_ended(self) -> str | None:
        return f"{self.where} {self._how()}"

    def request_end(self) -> None:
        self._request_end(kills=False)

    def kill(self) -> None:
        if self._end is None:  # still loading: the process ends with its actor
            if ray.is_initialized():
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

    def _how(self) -> str:
        """How the process ended."""
        if self._end is None:
            return "was ended"
        try:
            return self._end.result(WORD_SECONDS)
        except RayError as error:
            return f"was lost: {type(error).__name__}"
        except TimeoutError:
            return "cannot be reached"

    def _request_end(self, kills: bool) -> None:
        if ray.is_initialized() and (kills or self._requested is None):
            self._requested = self._actor.end.remote(kills)

    def _wait(self, ref: Any) -> Any:
        """The result of a call of the actor. Raises ``TimeoutError`` if it is late,
        ``EngineDeadError`` if the actor has died."""
        try:
            return ref.future().result(self._timeout)
        except RayError as error:
            text = str(error).strip().splitlines()[0]
            raise EngineDeadError(
                f"Engine core initialization failed: {self.name} was lost: {text}"
            ) from error


def variables_here() -> dict[str, str]:
    """The environment variables of this process that change what another one computes."""
    values = describe((), (), VARIABLES)["variables"]
    return {name: value for name, value in values.items() if value is not None}
