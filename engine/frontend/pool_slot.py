"""The parent's side of one text process: what it was asked, and another one when it has died.

A process has several tasks at a time, and answers may die with it: after a death tasks are sent
one by one for a while, so that it is known over which one another dies. After ``MAX_DEATHS`` that
one fails, alone. Detokenizers remember sequences, which die with them: tasks of theirs are given
back as ``TextsLost``, to be asked anew.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from engine.core.failures import error_of
from engine.errors import EngineDeadError, RefusedError, RequestError, WireError
from engine.ipc.channel import Channel, Delivery
from engine.ipc.place import Directory
from engine.ipc.program import Program
from engine.ipc.shm import Arena, ArenaReader, create_memory
from engine.ipc.sockets import Socket, bind, close
from engine.messages.text import Failed, Job, Read, Ready, Reply, Role, StartText

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # of processes by one input
MAX_FAILED_STARTS = 3  # in a row
MAX_IDLE_DEATHS = 8  # in a row, of processes that had done nothing; above MAX_DEATHS
RETRY_SECONDS = 10.0  # until a process that does not start, or stay, is tried again
START_SECONDS = 60.0  # until a process that has not said it is ready is ended
MAX_SENT = 16  # tasks a process has at a time; the others wait here
NUM_CAREFUL = 64  # tasks that are sent one by one after a death
PROGRAM = "engine.frontend.pool_process"


class TextsLost(Exception):
    """A detokenizer has died. ``epoch``: the process that takes its place.

    ``is_suspect``: the process had this task; ``is_culprit``: and no other.
    """

    def __init__(self, epoch: int, *, is_suspect: bool = False, is_culprit: bool = False) -> None:
        super().__init__(epoch, is_suspect, is_culprit)
        self.epoch = epoch
        self.is_suspect = is_suspect
        self.is_culprit = is_culprit


@dataclass
class Task:
    """A job on its way. ``what`` names it in errors."""

    job: Job
    payloads: list[bytes]
    result_of: Callable[[Delivery[Reply]], Any]
    """What the future brings; raises ``WireError`` for what is no answer to this job."""
    what: str = ""
    epoch: int = 0  # of a Read: the process it is meant for
    future: Future[Any] = field(default_factory=Future)
    num_deaths: int = 0


@dataclass(frozen=True)
class Asked:
    """How text processes are to be started. ``arena_bytes``: in each direction; 0 is none."""

    model: str
    tokenizer: str | None
    trust_remote_code: bool
    arena_bytes: int
    hang_seconds: float
    """A process that works on one task for longer is taken for hung and ended."""


class TextProcess:
    """A spawned process with its socket and its shared memory."""

    def __init__(self, context: zmq.Context[Socket], role: Role, asked: Asked) -> None:
        self.is_ready = False
        self._identity = b""
        self._token = secrets.token_bytes(16)
        self._directory = Directory.create()  # its socket has a name only until it is connected
        address = f"ipc://{self._directory.path}/text"
        self.socket = bind(context, address, None)
        fds = [create_memory(asked.arena_bytes) for _ in range(2)] if asked.arena_bytes else []
        start = StartText(
            role, address, self._token, asked.model, asked.tokenizer, asked.trust_remote_code, *fds
        )
        own = Arena(fds[0], f"shared memory towards a {role} process") if fds else None
        self._channel = Channel[Reply](Reply, own, ArenaReader(fds[1]) if fds else None)
        self.program = Program(PROGRAM, msgspec.msgpack.encode(start), fds)
        for fd in fds:
            os.close(fd)

    def send(self, task: Task) -> None:
        """Raises ``WireError`` for a job that cannot travel."""
        frames = self._channel.pack(task.job, task.payloads)
        try:
            self.socket.send_multipart([self._identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise  # those two: it has died, which its descriptor tells

    def receive(self) -> Delivery[Reply] | None:
        """The next message; ``None`` if there is none. Raises ``WireError`` for rubbish."""
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        delivery = self._channel.unpack(frames)
        if isinstance(delivery.message, Ready):
            if self.is_ready or delivery.message.token != self._token:
                raise WireError("a stranger speaks on the socket of a text process")
            self.is_ready = True
            self._identity = identity
            self._directory.remove()
        return delivery

    def close(self) -> None:
        self.program.close()
        close(self.socket)
        self._directory.remove()
        self._channel.close()


class Slot:
    """A text process and its tasks. Belongs to the thread of the pool."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[], TextProcess],
        clock: Callable[[], float],
        hang_seconds: float,
    ) -> None:
        self.name = name
        self.started: Future[None] = Future()
        """Done once a process was ready, or could not be started."""
        self.process: TextProcess | None = None
        self._spawn = spawn
        self._clock = clock
        self._hang_seconds = hang_seconds
        self._tasks: deque[Task] = deque()
        self._num_sent = 0
        self._num_careful = 0  # tasks that are still to be sent one by one
        self._since = 0.0  # when the process began its first task, or its start
        self._epoch = 0
        self._num_failed_starts = 0
        self._num_idle_deaths = 0
        self._down_until = 0.0

    @property
    def load(self) -> tuple[bool, int]:
        """What it has to do; the least is first, and one that does not start is last."""
        return self._is_down, len(self._tasks)

    @property
    def _is_down(self) -> bool:
        return self.process is None and self._clock() < self._down_until

    @property
    def deadline(self) -> float | None:
        """When the process is to be taken for hung; ``None`` while nothing is expected of it."""
        if self.process is None or (self.process.is_ready and not self._num_sent):
            return None
        return self._since + (self._hang_seconds if self.process.is_ready else START_SECONDS)

    def start(self) -> None:
        """Spawn a process."""
        self._epoch += 1
        self._since = self._clock()
        self.process = self._spawn()

    def add(self, task: Task) -> None:
        """Take a task; its future tells what came of it."""
        self._tasks.append(task)
        if self.process is None and not self._is_down:
            self.start()
        if self.process is None:
            self._give_up("could not be started")
        self._pump()

    def receive(self) -> None:
        """Take the answers that have come."""
        process = self.process
        if process is None:
            return
        try:
            while (delivery := process.receive()) is not None:
                self._answered(delivery)
        except WireError as error:
            logger.error("the %s talks rubbish and is ended: %s", self.name, error)
            process.program.kill()
        self._pump()

    def check(self) -> None:
        """End a process that hangs; its death is noticed like any other."""
        if self.process is not None and self.deadline is not None:
            if self._clock() < self.deadline:
                return
            logger.error("the %s does not answer and is ended", self.name)
            self.process.program.kill()

    def died(self) -> None:
        """The process has ended: blame who may have been its death, start another."""
        assert self.process is not None
        how, was_ready = self.process.program.how_it_ended(), self.process.is_ready
        self.receive_last()
        self.process.close()
        self.process = None
        num_sent, self._num_sent = self._num_sent, 0
        if was_ready:
            logger.warning("the %s %s; another one is started", self.name, how)
            self._num_careful = NUM_CAREFUL
        self._num_failed_starts += not was_ready
        self._num_idle_deaths += 1
        if num_sent == 1:
            self._blame(self._tasks[0], how)
        self._lose_reads(num_sent)
        if self._num_failed_starts == MAX_FAILED_STARTS:
            self._give_up(f"{how} before it was ready, {MAX_FAILED_STARTS} times")
        elif self._num_idle_deaths == MAX_IDLE_DEATHS:
            self._give_up(f"{how} before it had done anything, {MAX_IDLE_DEATHS} times")
        else:
            self.start()

    def receive_last(self) -> None:
        """Take the answers a process gave before it died."""
        with suppress(WireError):
            while self.process is not None and (delivery := self.process.receive()) is not None:
                self._answered(delivery)

    def close(self, death: EngineDeadError) -> None:
        """End the process; tasks fail with ``death``."""
        if self.process is not None:
            self.process.close()
            self.process = None
        if not self.started.done():
            self.started.set_exception(death)
        self._fail_all(death)

    # -- helpers

    def _answered(self, delivery: Delivery[Reply]) -> None:
        reply = delivery.message
        if isinstance(reply, Ready):
            self._num_failed_starts = 0
            if not self.started.done():
                self.started.set_result(None)
            return
        if not self._num_sent or reply.number not in (self._tasks[0].job.number, -1):
            raise WireError(f"an answer to job {reply.number}, which was not asked")
        task = self._tasks[0]
        result = error_of(reply.failure) if isinstance(reply, Failed) else task.result_of(delivery)
        self._tasks.popleft()
        self._num_sent -= 1
        self._num_idle_deaths = 0
        self._num_careful -= self._num_careful > 0
        self._since = self._clock()
        if isinstance(result, Exception):
            task.future.set_exception(result)
        else:
            task.future.set_result(result)

    def _pump(self) -> None:
        """Send what there is, as far as the process may have it."""
        process = self.process
        if process is None or not process.is_ready:
            return
        most = 1 if self._num_careful else MAX_SENT
        while self._num_sent < min(most, len(self._tasks)):
            task = self._tasks[self._num_sent]
            if not self._is_wanted(task):
                del self._tasks[self._num_sent]
                continue
            try:
                process.send(task)
            except WireError as error:
                del self._tasks[self._num_sent]
                task.future.set_exception(error)
                continue
            if not self._num_sent:
                self._since = self._clock()
            self._num_sent += 1

    def _is_wanted(self, task: Task) -> bool:
        """Not if nobody waits any more, or if it was meant for a process that has died."""
        if isinstance(task.job, Read) and task.epoch != self._epoch:
            task.future.set_exception(TextsLost(self._epoch))
            return False
        return task.future.running() or task.future.set_running_or_notify_cancel()

    def _blame(self, task: Task, how: str) -> None:
        """A process has died over this task."""
        task.num_deaths += 1
        if isinstance(task.job, Read) or task.num_deaths < MAX_DEATHS:
            return
        self._tasks.popleft()
        task.future.set_exception(
            RequestError(
                f"the tokenizer process {how} over {task.what}, {MAX_DEATHS} times; this input "
                "cannot be tokenised"
            )
        )

    def _lose_reads(self, num_sent: int) -> None:
        """Give back what only the dead process could do; it had the first ``num_sent`` of them."""
        for place, task in enumerate(self._tasks):
            if isinstance(task.job, Read):
                is_suspect = place < num_sent
                task.future.set_exception(
                    TextsLost(
                        self._epoch + 1,
                        is_suspect=is_suspect,
                        is_culprit=is_suspect and num_sent == 1,
                    )
                )
        self._tasks = deque(task for task in self._tasks if not isinstance(task.job, Read))

    def _give_up(self, why: str) -> None:
        """Fail what waits; who comes later than ``RETRY_SECONDS`` has it tried again."""
        message = f"the {self.name} {why}; what it wrote to standard error says more"
        if not self.started.done():
            self.started.set_exception(EngineDeadError(message))
        if not self._is_down:
            self._num_failed_starts = self._num_idle_deaths = 0
            self._down_until = self._clock() + RETRY_SECONDS
            logger.error("%s", message)
        self._fail_all(RefusedError(message, retry_after=RETRY_SECONDS))

    def _fail_all(self, error: Exception) -> None:
        for task in self._tasks:
            if task.future.running() or task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)
        self._tasks.clear()


def describe(text: Any) -> str:
    """An input as errors name it."""
    return f"{text!r:.80}"
