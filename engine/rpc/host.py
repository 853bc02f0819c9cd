"""EngineCoreHost: serves a core to clients in other processes over sockets.

    data socket ────> the loop, in the thread that calls ``serve``: reads messages and runs steps
    control socket ─> the control thread, which never waits for a step: health, shutdown

Only the loop uses the core and the data socket. To end it, the control thread and signal handlers
set a state in ``Ending`` and wake the loop.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain, repeat
from types import FrameType

import zmq

from engine.config.engine import EngineConfig
from engine.core.inproc_client import InprocClient
from engine.errors import EngineDeadError, WireError
from engine.ipc import sockets
from engine.ipc.address import Address, Directory
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.requests import CoreOutputs, Finished
from engine.messages.wire import (
    MAX_HELLO_BYTES,
    Dead,
    Fault,
    FromControl,
    Health,
    Shutdown,
    ToControl,
)
from engine.observe.logs import Throttle
from engine.rpc.server import CoreLoop, Dispatcher, Ending, check_size
from engine.rpc.sessions import MAX_BACKLOG_BYTES, NUM_CREDITS, ClientSessions

logger = logging.getLogger("engine.core")

LAST_STEP_SECONDS = 1.0  # time for the running step to end after the parent's death
CLOSE_SECONDS = 1.5  # time to close after that
ORPHANED = 70  # exit status if these times were exceeded


class EngineCoreHost:
    """Serves ``core`` at ``address`` until an end is requested; ``close`` must be called, too.

    ``directory``: the directory of socket files, which is removed at the end. Raises
    ``ConfigError`` if it is impossible to listen at the address.
    """

    def __init__(
        self,
        core: InprocClient,
        config: EngineConfig,
        address: Address,
        *,
        directory: Directory | None = None,
        num_credits: int = NUM_CREDITS,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ending = Ending()
        self._core = core
        self.address = address
        self._directory = directory
        self._drain_timeout = config.core.drain_timeout
        self._clock = clock
        context: zmq.Context[sockets.Socket] = zmq.Context()
        try:
            self._data = sockets.bind(context, address.data, address.secret)
            self._control = sockets.bind(context, address.control, address.secret)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._sessions = ClientSessions(
            self._data, core.drop, num_credits=num_credits, max_backlog_bytes=max_backlog_bytes
        )
        dispatcher = Dispatcher(core, self._sessions, address.token, self.ending)
        self._loop = CoreLoop(core, self._data, dispatcher, self._sessions, config, clock)
        core.wake_loop = self._loop.waker.wake
        self._is_over = threading.Event()
        self._is_closed = threading.Event()
        self._control_waker = sockets.Waker()
        self._at_close = ExitStack()  # runs in reverse order
        self._at_close.callback(core.shutdown)
        if directory is not None:
            self._at_close.callback(directory.remove)
        for closing in (context.term, self._control_waker.close, self._loop.waker.close):
            self._at_close.callback(closing)
        self._thread = threading.Thread(target=self._run_control, name="core-control", daemon=True)

    def serve(self) -> None:
        """Run steps and answer clients until ended. Raises ``EngineDeadError`` if the core dies."""
        self._thread.start()
        try:
            self._loop.run()
            self._end_the_rest()
            self._sessions.broadcast(Dead("the engine core was shut down"))
        except Exception as error:
            dead = isinstance(error, EngineDeadError)
            story = str(error) if dead else f"the engine core died: {type(error).__name__}: {error}"
            self._sessions.broadcast(Dead(story, traceback.format_exc()))
            raise
        finally:
            self._end_control()

    def drain(self, seconds: float | None = None) -> None:
        """Accept no new requests, and end when all are finished, at the latest after ``seconds``.

        Any thread may call it.
        """
        wanted = self._drain_timeout if seconds is None else seconds
        self.ending.no_later_than(self._clock() + wanted)
        self._loop.waker.wake()

    def end_orphaned(self) -> None:
        """End after this step, because the parent has died, or exit if the step takes too long.

        May be called by any thread except the one that serves.
        """
        self.ending.no_later_than(self._clock())
        self._loop.waker.wake()
        if not (self._is_over.wait(LAST_STEP_SECONDS) and self._is_closed.wait(CLOSE_SECONDS)):
            if self._directory is not None:
                self._directory.remove()
            os._exit(ORPHANED)

    def health(self) -> Health:
        """The state of the core, by the heartbeat of its loop."""
        pulse = self._loop.pulse
        began = pulse.step_began
        return Health(
            state="ready" if self.ending.at is None else "draining",
            seconds_in_step=0.0 if began is None else max(0.0, self._clock() - began),
            num_steps=pulse.num_steps,
            num_unfinished=pulse.num_unfinished,
            num_clients=pulse.num_clients,
        )

    def handle_signals(self, *numbers: signal.Signals) -> None:
        """Until ``close``, the first of these signals drains the core, and the second ends it at
        once.

        Must be called by the main thread, which must then call ``close``, too.
        """
        drain_timeouts = chain((None,), repeat(0.0))

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.drain(next(drain_timeouts))

        putting_back = ExitStack()
        for number in numbers:
            before = signal.signal(number, on_signal)
            if before is not None:  # a handler not set by Python cannot be restored
                putting_back.callback(signal.signal, number, before)
        putting_back.push(self._at_close.pop_all())
        self._at_close = putting_back
        fd = self._loop.waker.signal_fd
        before_fd = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        self._at_close.callback(signal.set_wakeup_fd, before_fd)

    def close(self) -> None:
        """Send the last messages, close the sockets, release the core and the signals.

        May be repeated, and called without ``serve``.
        """
        self._end_control()
        if self._thread.is_alive():
            self._thread.join()
        sockets.close(self._data, self._control, linger_ms=sockets.LINGER_MS)
        self._at_close.close()
        self._is_closed.set()

    def _end_control(self) -> None:
        self._is_over.set()
        self._control_waker.wake()

    def _end_the_rest(self) -> None:
        """Abort requests that are unfinished at the time limit, and notify their clients."""
        for session in self._sessions:
            ids = list(session.live)
            ends = [Finished(i, "abort", message="the core was shut down") for i in range(len(ids))]
            if ids:
                logger.warning("%d requests of %s are aborted at drain_timeout", len(ids), session)
                self._core.drop(ids)
                batch = CoreOutputs(ids, [], [0] * len(ids), self._clock(), finished=ends)
                self._sessions.publish(session.index, batch)

    # -- in the control thread

    def _run_control(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._control_waker.fd, zmq.POLLIN)
        dispatcher = ControlDispatcher(self, self.address.token)
        while not self._is_over.is_set():
            ready = dict(poller.poll())
            if self._control in ready:
                identity, *frames = self._control.recv_multipart()
                dispatcher.answer(self._control, identity, frames)


class ControlDispatcher:
    """Answers the messages of the control socket."""

    def __init__(self, host: EngineCoreHost, token: bytes) -> None:
        self._host = host
        self._token = token
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[ToControl] = MessageDecoder(ToControl)
        self._complaints = Throttle()

    def answer(self, router: sockets.Socket, identity: bytes, frames: list[bytes]) -> None:
        """Answer one message; the answer is dropped if the sender has disconnected."""
        message = self._carry_out(frames)
        if isinstance(message, Fault) and (others := self._complaints.admit()) is not None:
            logger.warning("the control socket refused a message: %s%s", message.message, others)
        frame = self._encoder.encode(message)
        try:
            router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("the sender of a control message has disconnected: %s", error)

    def _carry_out(self, frames: list[bytes]) -> FromControl:
        try:
            check_size(frames, MAX_HELLO_BYTES)
            message = self._decoder.decode(frames)
        except WireError as error:
            return Fault(str(error))
        if not secrets.compare_digest(message.token, self._token):
            return Fault("the token is not that of this core")
        if isinstance(message, Shutdown):
            seconds = message.drain_seconds
            if seconds is not None and not 0.0 <= seconds < math.inf:
                return Fault(f"drain_seconds is {seconds}, must be a number of at least 0")
            self._host.drain(seconds)
        return self._host.health()
