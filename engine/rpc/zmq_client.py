"""A synchronous client of a core in another process. Needs neither torch nor transformers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from engine.core.client import CoreClient
from engine.errors import EngineDeadError, WireError
from engine.ipc import sockets
from engine.ipc.address import Address
from engine.ipc.process import Child
from engine.messages.outputs import CoreOutputs
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Welcome
from engine.rpc.failures import death_of
from engine.rpc.health import HealthMonitor
from engine.rpc.protocol import ClientProtocol, Reply, refused, value_of

STEP_SECONDS = 0.1  # that ``step`` waits for outputs, and between two checks of a silent core
WELCOME_SECONDS = 10.0
HANG_SECONDS = 300.0
LAST_WORDS_MS = 200  # from the end of a core's process to that of its connection


class EngineCoreClient(CoreClient):
    """A client of a core in another process, over sockets.

    ``child`` is the process of the core, if it is ours: it ends with the client, and is killed if
    it has not ended after two seconds.
    """

    decided: Welcome

    def __init__(
        self,
        address: Address,
        *,
        child: Child | None = None,
        name: str = "",
        welcome_timeout: float = WELCOME_SECONDS,
        hang_timeout: float = HANG_SECONDS,
    ) -> None:
        self.address = address
        self._owner = os.getpid()
        self._protocol = ClientProtocol()
        self._child = child
        self._death: EngineDeadError | None = None
        self._expected: dict[int, Reply | None] = {}  # answers to what was asked, by number
        self._waker = sockets.Waker()
        self._context: zmq.Context[sockets.Socket] = zmq.Context()
        try:
            self._socket, self._lost = sockets.connect(self._context, address.data, address.secret)
            self._health = HealthMonitor(self._context, address, hang_timeout)
        except BaseException:
            self._context.destroy(linger=0)
            self._waker.close()
            raise
        own = (self._socket, self._lost, self._health.socket)
        sockets.close_with(self, self._context, *own, waker=self._waker)
        ended = () if child is None else (child.pidfd,)
        self.sources = (self._socket, self._lost, self._waker.fd, *ended)
        """What becomes readable when there is something for ``step``."""
        self._poller = zmq.Poller()
        for each in self.sources:
            self._poller.register(each, zmq.POLLIN)
        try:
            self.decided = self._greet(address, name, welcome_timeout)
        except BaseException:
            self.shutdown()
            raise
        self.id_prefix = self.decided.id_prefix

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        self._live()
        parts, errors = self._protocol.submit(requests)
        try:
            for part in parts:
                self._ask(part.number, part.frame)
            for part in parts:
                errors |= refused(part, self._answer(part.number))
        finally:  # interrupted or not: an answer that comes later is dropped
            for part in parts:
                self._expected.pop(part.number, None)
        return errors

    def abort(self, request_ids: Sequence[str]) -> None:
        self._live()
        self._send(self._protocol.abort(request_ids))

    def step(self) -> list[CoreOutputs]:
        if not self._protocol.unread:
            self._receive(STEP_SECONDS)
        return self._protocol.take_batches(self._send_credit)

    def take(self) -> list[CoreOutputs]:
        """Outputs that have come; does not wait."""
        if not self._protocol.unread:
            self._receive(0.0)
        return self._protocol.take_batches(self._send_credit)

    def wake(self) -> None:
        self._waker.wake()

    def num_unfinished(self) -> int:
        return self._protocol.num_unfinished

    def latest_stats(self) -> SchedulerStats | None:
        self._live()
        if (frame := self._protocol.ask_stats()) is not None:
            self._send(frame)
        return self._protocol.stats

    def call(self, name: str, *args: Any) -> Any:
        self._live()
        number, frame = self._protocol.call(name, args)
        self._ask(number, frame)
        return value_of(name, self._answer(number))

    def shutdown(self) -> None:
        if os.getpid() != self._owner:
            return
        linger_ms = 0
        if self._death is None and self._protocol.welcome is not None and not self._lost.poll(0):
            linger_ms = sockets.LINGER_MS  # so that the core reads our bye
            with suppress(zmq.ZMQError):
                self._socket.send(self._protocol.bye(), zmq.NOBLOCK)
        self._death = self._death or EngineDeadError("the engine was shut down")
        try:
            sockets.close(self._socket, linger_ms=linger_ms)
            sockets.close(self._lost, self._health.socket)
            self._context.term()
            self._waker.close()
        finally:  # interrupted or not
            if self._child is not None:
                self._child.close()

    def ask_to_end(self) -> None:
        """Ask our own core to end, without waiting; ``shutdown`` must still be called."""
        if self._child is not None:
            self._child.ask_to_end()

    def check_alive(self) -> None:
        self._receive(0.0)

    # -- helpers

    def _greet(self, address: Address, name: str, timeout: float) -> Welcome:
        self._send(self._protocol.hello(address.token, name))
        until = time.monotonic() + timeout
        while self._protocol.welcome is None:
            try:
                self._receive(STEP_SECONDS)
            except WireError as error:
                raise EngineDeadError(f"the core refused this client: {error}") from error
            if time.monotonic() > until:
                raise EngineDeadError(f"no core answers at {address.data} within {timeout:g} s")
        return self._protocol.welcome

    def _ask(self, number: int, frame: bytes) -> None:
        self._live()
        self._expected[number] = None
        self._send(frame)

    def _answer(self, number: int) -> Reply:
        try:
            while (reply := self._expected[number]) is None:
                self._receive(STEP_SECONDS)
        finally:  # interrupted or not: an answer that comes later is dropped
            del self._expected[number]
        return reply

    def _send(self, frame: bytes) -> None:
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:  # the core does not read, or is gone
                self._receive(STEP_SECONDS)

    def _send_credit(self, frame: bytes) -> None:
        with suppress(EngineDeadError):  # outputs that were read must not be lost
            if self._death is None:
                self._send(frame)

    def _receive(self, seconds: float) -> None:
        """Wait so long for messages, and take all there are. Raises ``EngineDeadError``."""
        self._live()
        ready = dict(self._poller.poll(round(1000 * seconds)))
        if self._waker.fd in ready:
            self._waker.clear()
        has_come = self._take_all()
        if not has_come and self._is_lost(ready):
            self._die()
        if not has_come and (check := self._health.check(time.monotonic())):
            self._kill(check)

    def _take_all(self) -> bool:
        """Take what has come; True if there was anything. What came before ``Dead`` is kept."""
        has_come = False
        while True:
            try:
                self._take(self._protocol.feed(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return has_come
            except EngineDeadError as error:
                self._death = error
                if not has_come:
                    raise
                return True
            has_come = True

    def _is_lost(self, ready: dict[Any, int]) -> bool:
        if self._lost in ready:
            return True
        if self._child is None or self._child.pidfd not in ready:
            return False
        # Dead, but its sockets are not closed yet; if a process that it forked has them, never.
        self._lost.poll(LAST_WORDS_MS)
        return not self._socket.poll(0)

    def _take(self, reply: Reply | None) -> None:
        if isinstance(reply, Welcome):
            self._protocol.welcome = reply
        elif reply is not None and reply.number in self._expected:
            self._expected[reply.number] = reply

    def _kill(self, check: str) -> None:
        """Give up a core that hangs, and kill it if it is ours."""
        if self._child is not None:
            self._child.kill()
        self._death = death_of(f"the engine core died: it {check}")
        raise self._death

    def _die(self) -> None:
        """Raise the error of a lost connection, with what is known of the cause."""
        how = None if self._child is None else self._child.how_it_ended()
        if how is not None:
            self._death = death_of(f"the engine core died: its process {how}")
        elif self._protocol.welcome is not None:
            self._death = death_of("the engine core died: it lost its connection")
        else:
            with_it = "" if self.address.secret is None else ", or it has another secret"
            self._death = death_of(f"no core answers at {self.address.data}{with_it}")
        raise self._death

    def _live(self) -> None:
        if os.getpid() != self._owner:
            raise EngineDeadError(
                f"this client belongs to process {self._owner}: one that was forked from it needs "
                "another, made there"
            )
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death.__cause__
