"""A synchronous client of a core in another process. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from engine.config.media import MediaConfig
from engine.core.client import CoreClient
from engine.errors import EngineDeadError, WireError
from engine.ipc import sockets
from engine.ipc.address import Address, address_of
from engine.ipc.process import CoreProcess
from engine.ipc.sealed_files import namespace
from engine.messages.media import MediaContent
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.stats import SchedulerStats
from engine.messages.wire import (
    MAX_CALL_BYTES,
    CacheNews,
    Welcome,
)
from engine.rpc.client_protocol import ClientProtocol, Part, Reply, refused, value_of
from engine.rpc.failures import death_of
from engine.rpc.health import HealthMonitor
from engine.rpc.pixel_route import PixelRoute, with_counters

STEP_SECONDS = 0.1  # ``step`` waits so long for outputs; time between checks of a silent core
WELCOME_SECONDS = 10.0
HANG_SECONDS = 300.0
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # plain ints are faster, and read in each step
LAST_WORDS_MS = 200  # wait for the last messages after the core's process has ended


class EngineCoreClient(CoreClient):
    """A client of a core in another process, over sockets.

    ``child`` is the core's process, if this client owns it: it ends with the client, and is killed
    if it has not ended after two seconds.
    """

    decided: Welcome
    max_call_bytes = MAX_CALL_BYTES

    def __init__(
        self,
        address: Address,
        *,
        child: CoreProcess | None = None,
        name: str = "",
        welcome_timeout: float = WELCOME_SECONDS,
        hang_timeout: float = HANG_SECONDS,
        media: MediaConfig | None = None,
    ) -> None:
        """media: how pixels are sent; ``None``: as by default."""
        self.address = address
        self.route: PixelRoute | None = None
        self._owner = os.getpid()
        self._protocol = ClientProtocol()
        self._child = child
        self._death: EngineDeadError | None = None
        self._expected: dict[int, Reply | None] = {}  # replies by number; None: not received yet
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
        """Sockets and file descriptors, one of which becomes readable when ``step`` has work."""
        self._poller = zmq.Poller()
        for each in self.sources:
            self._poller.register(each, zmq.POLLIN)
        try:
            self.decided = self._greet(address, name, welcome_timeout)
        except BaseException:
            self.shutdown()
            raise
        self.id_prefix = self.decided.id_prefix
        self.reads_shared_memory = self.decided.namespace == namespace() != ""
        if "media" in self.decided.capabilities:
            device = self.decided.device if self.reads_shared_memory else ""
            self.route = PixelRoute(media or MediaConfig(), device)

    @property
    def pids(self) -> list[int]:
        """The core's process id, for monitoring; [] if this client does not own the core."""
        return [] if self._child is None else [self._child.pid]

    @property
    def place(self) -> str:
        """Name of the node on which this client has started the core, empty for its own one."""
        return "" if self._child is None else self._child.place

    @classmethod
    def connect(cls, core: str, secret: str | None = None, *, name: str = "") -> EngineCoreClient:
        """Connect to a running core at the address that ``metronome core`` printed.

        Raises ``ConfigError`` for an invalid address, ``EngineDeadError`` if the core does not
        answer.
        """
        return cls(address_of(core, secret), name=name)

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        parts, errors = self.begin_add(requests)
        return errors | self.end_add(parts)

    def begin_add(self, requests: Sequence[AddRequest]) -> tuple[list[Part], dict[int, Exception]]:
        """Send requests without waiting for the core's answers, for which ``end_add`` must be
        called. Also returns the errors of requests that cannot be encoded, by index."""
        self._live()
        parts, errors = self._protocol.submit(requests)
        for part in parts:
            self._request(part.number, part.frame)
        return parts, errors

    def end_add(self, parts: Sequence[Part]) -> dict[int, Exception]:
        """Wait for the answers to added requests. Returns the errors of refused ones, by index."""
        errors: dict[int, Exception] = {}
        try:
            for part in parts:
                errors |= refused(part, self._answer(part.number))
        finally:  # interrupted or not: an answer that comes later is dropped
            for part in parts:
                self._expected.pop(part.number, None)
        return errors

    def abort(self, request_ids: Sequence[str]) -> None:
        self._live()
        self._send(self._protocol.abort(request_ids))

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        self._live()
        if self.route is not None:
            content = self.route.prepared(content)
        self._send(self._protocol.bring(request_ids, content))

    def step(self) -> list[CoreOutputs]:
        if not self._protocol.unread:
            self._receive(STEP_SECONDS)
        return self._batches()

    def take(self) -> list[CoreOutputs]:
        """The received outputs, without waiting."""
        if not self._protocol.unread:
            self._receive(0.0)
        return self._batches()

    def wake(self) -> None:
        self._waker.wake()

    def num_unfinished(self) -> int:
        return self._protocol.num_unfinished

    def latest_stats(self) -> SchedulerStats | None:
        self._live()
        if (frame := self._protocol.request_stats()) is not None:
            self._send(frame)
        return with_counters(self._protocol.stats, self.route)

    def call(self, name: str, *args: Any) -> Any:
        return self.end_call(name, self.begin_call(name, *args))

    def begin_call(self, name: str, *args: Any) -> int:
        """Send a utility call. Returns its number, with which ``end_call`` must be called."""
        self._live()
        number, frame = self._protocol.call(name, args)
        self._request(number, frame)
        return number

    def is_answered(self, number: int) -> bool:
        """Whether the answer to a call has been received."""
        return self._expected[number] is not None

    def end_call(self, name: str, number: int) -> Any:
        """Wait for the answer to a call of the utility ``name``. Returns its result, or raises its
        error."""
        value = value_of(name, self._answer(number))
        return with_counters(value, self.route) if name == "stats" else value

    def follow(self, receive: Callable[[CacheNews], object]) -> None:
        """Have the core report its prefix cache and its load from now on. ``receive`` is called
        with each report, in order, while other methods of this client run."""
        self._live()
        self._protocol.on_news = receive
        self._send(self._protocol.follow())

    def shutdown(self) -> None:
        if os.getpid() != self._owner:
            return
        linger_ms = 0
        if self._death is None and self._protocol.welcome is not None and not self._lost.poll(0):
            linger_ms = sockets.LINGER_MS  # so that the core receives Bye
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
            if self.route is not None:
                self.route.close()

    def request_end(self) -> None:
        """Request an owned core to end, without waiting; ``shutdown`` must still be called."""
        if self._child is not None:
            self._child.request_end()

    def check_alive(self) -> None:
        self._receive(0.0)

    # -- helpers

    def _batches(self) -> list[CoreOutputs]:
        if self.route is not None:
            self.route.collect()
        return self._protocol.take_batches(self._send_credit)

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

    def _request(self, number: int, frame: bytes) -> None:
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
            except zmq.Again:  # the core does not read, or has ended
                self._receive(STEP_SECONDS)

    def _send_credit(self, frame: bytes) -> None:
        with suppress(EngineDeadError):  # outputs that were read must not be lost
            if self._death is None:
                self._send(frame)

    def _receive(self, seconds: float) -> None:
        """Wait for messages, at most ``seconds``, and process all that have arrived. Raises
        ``EngineDeadError`` if the core is dead or hangs."""
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
        """Process all received messages. Returns True if there was one. Raises ``EngineDeadError``
        if the first one reports the core's death; if a later one does, the error is stored."""
        has_come = False
        while int(self._socket.get(EVENTS)) & POLLIN:  # cheaper than an exception
            try:
                self._take(self._protocol.feed(self._socket.recv_multipart(zmq.NOBLOCK)))
            except EngineDeadError as error:
                self._death = error
                if not has_come:
                    raise
                return True
            has_come = True
        return has_come

    def _is_lost(self, ready: dict[Any, int]) -> bool:
        if self._lost in ready:
            return True
        if self._child is None or self._child.pidfd not in ready:
            return False
        # It is dead, but its sockets are still open (for ever, if a process it forked has them).
        self._lost.poll(LAST_WORDS_MS)
        return not self._socket.poll(0)

    def _take(self, reply: Reply | None) -> None:
        if isinstance(reply, Welcome):
            self._protocol.welcome = reply
        elif reply is not None and reply.number in self._expected:
            self._expected[reply.number] = reply
        if self._protocol.has_gap:
            self._send(self._protocol.follow())

    def _kill(self, check: str) -> None:
        """Treat a core that hangs as dead, and kill it if this client owns it."""
        if self._child is not None:
            self._child.kill()
        self._death = death_of(f"the engine core died: it {check}")
        raise self._death

    def _die(self) -> None:
        """Raise the error for a lost connection, with the cause if it is known."""
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
                f"this client belongs to process {self._owner}; a forked process must create its "
                "own client"
            )
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death.__cause__
