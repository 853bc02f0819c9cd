"""The server of a core in another process: its loop, and the messages of clients.

The loop reads messages, runs a step of the core, queues outputs and begins again. Messages are
processed between two steps and answered in order.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from engine.config.engine import EngineConfig
from engine.core.inproc_client import InprocClient
from engine.core.polling import Work, parked_seconds, poll_timeout_ms
from engine.errors import EngineDeadError, EngineError, RefusedError, RequestError, WireError
from engine.ipc.codec import MAX_MESSAGE_BYTES, MessageDecoder, is_tagged
from engine.ipc.sealed_files import namespace
from engine.ipc.sockets import Socket, Waker
from engine.messages.requests import AddRequest
from engine.messages.wire import (
    MAX_CALL_BYTES,
    MAX_HELLO_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Answer,
    Bring,
    Bye,
    Call,
    Credit,
    Failure,
    Fault,
    Follow,
    FromClient,
    Hello,
    Refusal,
    Submit,
    Submitted,
    Welcome,
)
from engine.observe.logs import Throttle
from engine.rpc.failures import failure_of
from engine.rpc.followers import Followers
from engine.rpc.sessions import ClientSession, ClientSessions

MAX_ARRIVALS = 1000  # most messages read between two steps, so that many messages delay no step
MAX_WAIT_SECONDS = 1e6  # so that it fits into an int of milliseconds
logger = logging.getLogger("engine.core")
LARGE = ("submit", "bring", "abort")  # messages limited by MAX_MESSAGE_BYTES only


@dataclass
class Pulse:
    """The heartbeat of the core's loop, which the control thread reads."""

    num_steps: int = 0
    step_began: float | None = None
    """When the current step began, including the messages processed before it; ``None`` while the
    loop waits."""
    num_unfinished: int = 0
    num_clients: int = 0


class CoreLoop:
    """Runs steps of the core while there is work; otherwise sleeps until a message arrives."""

    def __init__(
        self,
        core: InprocClient,
        router: Socket,
        dispatcher: Dispatcher,
        sessions: ClientSessions,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self.pulse = Pulse()
        self.waker = Waker()
        self._core = core
        self._router = router
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._ending = dispatcher.ending
        self._followers = dispatcher.followers
        self._config = config
        self._clock = clock
        self._idle_since: float | None = None
        self._work: Work = "none"
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def run(self) -> None:
        """Run until the end is requested. Raises ``EngineDeadError`` if the core dies."""
        while True:
            self._wait(poll_timeout_ms(self._config, self._work))
            self._take_arrivals()
            if self._is_over():
                return
            self._step()

    def _take_arrivals(self) -> None:
        """Process received messages. The heartbeat counts this as the start of a step, so that the
        control thread notices if a message makes the core hang."""
        self.pulse.step_began = self._clock()
        self.pulse.num_steps += 1
        for _ in range(MAX_ARRIVALS):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._dispatcher.take(identity, frames, self._clock())
            self._idle_since = None
        now = self._clock()
        self._sessions.tend(now)
        self._followers.report(now)
        self._count()

    def _step(self) -> None:
        outputs = self._core.turn()
        if self._core.is_idle or any(batch.finished for batch in outputs.values()):
            self._followers.report(self._clock(), at_once=True)  # before the ends
        for index, batch in outputs.items():
            self._sessions.publish(index, batch)
        if self._core.is_idle:
            self._idle_since = self._clock() if self._idle_since is None else self._idle_since
            self._work = "none"
        else:
            self._idle_since = None
            self._work = self._core.next_work(sum(len(b.request_ids) for b in outputs.values()))

    def _wait(self, longest_ms: int) -> None:
        """Wait at most ``longest_ms`` for a message; without work, only until the next deadline."""
        if self._work == "none":
            self.pulse.step_began = None
            self._count()
            longest_ms = min(longest_ms, self._patience_ms())
        if longest_ms and self.waker.fd in dict(self._poller.poll(longest_ms)):
            self.waker.clear()

    def _patience_ms(self) -> int:
        """Milliseconds to sleep without a message, until a deadline or another task is due."""
        now = self._clock()
        due = [self._sessions.next_look(), self._followers.next_look()]
        if self._ending.at is not None:
            due.append(self._ending.at)
        if self._core.has_unfinished():
            waited = 0.0 if self._idle_since is None else now - self._idle_since
            due.append(now + parked_seconds(waited))
            due += (time for time in self._sessions.deadlines() if time > now)
        return math.ceil(1000.0 * min(max(0.0, min(due) - now), MAX_WAIT_SECONDS))

    def _is_over(self) -> bool:
        if self._ending.at is None:
            return False
        if self._clock() >= self._ending.at:
            return True
        return not self._core.has_unfinished() and not self._sessions.has_backlog()

    def _count(self) -> None:
        self.pulse.num_unfinished = self._core.num_unfinished()
        self.pulse.num_clients = len(self._sessions)


class Ending:
    """The time by which the core must end. Other threads and signal handlers may set it."""

    def __init__(self) -> None:
        self._times: list[float] = []  # append-only, so that concurrent writers lose nothing

    @property
    def at(self) -> float | None:
        """The time by which the core must end; ``None`` if no end was requested. Once it is set,
        the core accepts no new requests."""
        return min(self._times, default=None)

    def no_later_than(self, when: float) -> None:
        if self.at is None or when < self.at:
            self._times.append(when)


class Dispatcher:
    """Processes messages of clients. An invalid message affects only its sender."""

    def __init__(
        self, core: InprocClient, sessions: ClientSessions, token: bytes, ending: Ending
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._token = token
        self.ending = ending
        self.followers = Followers(core, sessions)
        self._decoder: MessageDecoder[FromClient] = MessageDecoder(FromClient)
        self._complaints = Throttle()  # limits log lines about clients without a session

    def take(self, identity: bytes, frames: list[bytes], now: float) -> None:
        """Process one message. Raises only ``EngineDeadError``."""
        session = self._sessions.get(identity)
        try:
            check_size(frames, MAX_HELLO_BYTES if session is None else _limit_of(frames))
            message = self._decoder.decode(frames)
            if isinstance(message, Hello):
                self._greet(identity, message, now)
            elif session is None and isinstance(message, Bring | Abort | Credit | Bye):
                pass  # the client disconnected during a step
            elif session is None:
                raise WireError("the first message of a client must be hello")
            else:
                self._serve(session, message, now)
        except WireError as error:
            complaints = self._complaints if session is None else session.complaints
            if (others := complaints.admit()) is not None:
                who = session or "a client that sent no hello"
                logger.warning("a message of %s was refused: %s%s", who, error, others)
            self._sessions.send(identity, Fault(str(error)))

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        if not secrets.compare_digest(hello.token, self._token):
            raise WireError("the token is not that of this core")
        if hello.version != PROTOCOL_VERSION:
            raise WireError(
                f"the client uses version {hello.version} of the protocol, this core uses "
                f"version {PROTOCOL_VERSION}; install the same release on both sides"
            )
        session = self._sessions.welcome(identity, hello.name)
        logger.info("%s has connected", session)
        decided = self._core.decided
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            client_index=session.index,
            id_prefix=f"client-{session.index}/" if session.index else "",
            num_credits=self._sessions.num_credits,
            max_model_len=decided.max_model_len,
            vocab_size=decided.vocab_size,
            eos_token_ids=list(decided.eos_token_ids),
            num_kv_blocks=decided.num_kv_blocks,
            block_size=decided.block_size,
            time=now,
            model=decided.model.encode(errors="replace").decode(),  # a path may not be UTF-8
            capabilities=list(decided.capabilities),
            namespace=namespace(),
            device=self._core.shared_device,
        )
        self._sessions.send(identity, welcome)

    def _serve(self, session: ClientSession, message: FromClient, now: float) -> None:
        match message:
            case Submit():
                refusals = [
                    Refusal(index, failure)
                    for index, request in enumerate(message.requests)
                    if (failure := self._add(session, request)) is not None
                ]
                self._sessions.send(session.identity, Submitted(message.number, now, refusals))
            case Bring():
                own = [name for name in message.request_ids if name in session.live]
                self._core.bring(own, message.content)
            case Abort():  # ids of other clients are ignored, like unknown ones
                self._core.abort([name for name in message.request_ids if name in session.live])
            case Call():
                self._answer(session, message)
            case Credit():
                if message.num_batches < 1:
                    raise WireError(f"credit has {message.num_batches} batches, must be at least 1")
                self._sessions.grant(session, message.num_batches)
            case Follow():
                self.followers.add(session)
            case Bye():
                self._sessions.leave(session)

    def _add(self, session: ClientSession, request: AddRequest) -> Failure | None:
        """Queue a request of this client. Returns why it was not accepted, ``None`` if it was."""
        try:
            if self.ending.at is not None:
                message = "the engine core is shutting down and takes no more requests"
                raise RefusedError(message, code="shutting_down")
            self._core.add(msgspec.structs.replace(request, client_index=session.index))
        except EngineDeadError:
            raise
        except Exception as error:  # e.g. of the policy: only this request fails
            return failure_of(error, default=RequestError)
        times = (request.queue_deadline, request.end_deadline)
        session.live[request.request_id] = tuple(time for time in times if time is not None)
        session.work.add(request)
        return None

    def _answer(self, session: ClientSession, call: Call) -> None:
        try:
            self._sessions.send(session.identity, self._call(call), MAX_CALL_BYTES)
        except WireError as error:
            failed = EngineError(f"Call to {call.name} method failed: its answer: {error}")
            self._sessions.send(session.identity, Answer(call.number, failure=failure_of(failed)))

    def _call(self, call: Call) -> Answer:
        try:
            return Answer(call.number, self._core.call(call.name, *call.args))
        except EngineDeadError:
            raise
        except Exception as error:
            return Answer(call.number, failure=failure_of(error))


def check_size(frames: list[bytes], limit: int) -> None:
    """Raise ``WireError`` for a message of more than ``limit`` bytes, before it is decoded."""
    num_bytes = sum(map(len, frames))
    if num_bytes > limit:
        raise WireError(f"the message has {num_bytes} bytes, the limit is {limit}")


def _limit_of(frames: list[bytes]) -> int:
    """The size limit in bytes for a client's message, which is larger if it has requests or
    content."""
    is_large = any(is_tagged(frame, tag) for tag in LARGE for frame in frames[:1])
    return MAX_MESSAGE_BYTES if is_large else MAX_CALL_BYTES
