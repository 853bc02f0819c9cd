"""The parent's side of one text process: its tasks, and its replacement when it has died.

A process has several tasks at a time, and answers may be lost with it. After a crash, tasks are
sent one at a time, so that the next crash identifies the input that causes it. An input that causes
``MAX_DEATHS`` crashes fails, alone. Detokenizers keep the state of sequences, which is lost with
them: their tasks are given back as ``TextsLost``, to be sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import zmq

from engine.errors import ConfigError, EngineDeadError, RefusedError, RequestError, WireError
from engine.frontend.pool_child import TextProcess
from engine.frontend.pool_tasks import Task, TaskQueue, TextsLost
from engine.ipc.channel import Delivery
from engine.messages.text import Failed, Read, Ready, Reply
from engine.rpc.failures import error_of

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # of processes by one input
MAX_FAILED_STARTS = 3  # in a row
MAX_IDLE_DEATHS = 8  # in a row, of processes that had done nothing; above MAX_DEATHS
RETRY_SECONDS = 10.0  # until a process that did not start, or died at once, is tried again
START_SECONDS = 60.0  # until a process that has not said it is ready is ended
MAX_SENT = 16  # tasks a process has at a time; the others wait here
SLOWEST = 1 << 18  # bytes of text that any tokenizer does in a second
NUM_CAREFUL = 64  # tasks that are sent one at a time after a crash
SAYS_MORE = "what it wrote to standard error says more"


class Down(NamedTuple):
    """Why there is no process, and until when none is started."""

    until: float
    error: RefusedError


class Slot:
    """A text process and its tasks. Belongs to the thread of the pool.

    ``pass_on`` gets tasks that another process may do as well, when this one cannot be started.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], TextProcess],
        clock: Callable[[], float],
        hang_seconds: float,
        pass_on: Callable[[Task, RefusedError], None],
    ) -> None:
        self.name = name
        self.started: Future[None] = Future()
        """Done once a process was ready, or could not be started."""
        self.process: TextProcess | None = None
        self._spawn = spawn
        self._clock = clock
        self._hang_seconds = hang_seconds
        self._pass_on = pass_on
        self._tasks = TaskQueue()
        self._num_sent = 0
        self._num_careful = 0  # tasks that are still to be sent one by one
        self._since = 0.0  # when the process began its first task, or its start
        self._epoch = 0
        self._num_failed_starts = 0
        self._num_idle_deaths = 0
        self._down: Down | None = None

    @property
    def load(self) -> tuple[bool, int]:
        """Sort key: the slot with the least work first, one that does not start last."""
        return self.is_down, self._tasks.cost

    @property
    def is_down(self) -> bool:
        """True if there is no process, and none is to be started yet."""
        return self.process is None and self._down is not None and self._clock() < self._down.until

    @property
    def deadline(self) -> float | None:
        """When the process is to be taken for hung; ``None`` while nothing is expected of it."""
        if self.process is None or (self.process.is_ready and not self._num_sent):
            return None
        if not self.process.is_ready:
            return self._since + START_SECONDS
        return self._since + self._hang_seconds + self._tasks[0].cost / SLOWEST

    def start(self) -> None:
        """Spawn a process, or give up for a while if the system has no room for one."""
        self._epoch += 1
        self._since = self._clock()
        try:
            self.process = self._spawn()
        except (OSError, zmq.ZMQError, ConfigError) as error:
            self._give_up(f"could not be started: {error}")

    def add(self, task: Task) -> None:
        """Take a task; its future tells what came of it."""
        self._tasks.append(task)
        if self._down is not None and self.is_down:
            self._refuse(self._down.error)
        elif self.process is None:
            self.start()
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
            logger.error("the %s sent an invalid message and was terminated: %s", self.name, error)
            process.program.kill()  # its death is noticed like any other
        else:
            self._pump()

    def check(self) -> None:
        """End a process that hangs; its death is noticed like any other."""
        if self.process is not None and self.deadline is not None:
            if self._clock() < self.deadline:
                return
            logger.error("the %s does not answer and is ended", self.name)
            self.process.program.kill()

    def died(self) -> None:
        """The process has ended: blame the task that may be the cause, start another process."""
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
            self._give_up(f"{how} before it was ready, {MAX_FAILED_STARTS} times; {SAYS_MORE}")
        elif self._num_idle_deaths == MAX_IDLE_DEATHS:
            self._give_up(
                f"{how} before it had done anything, {MAX_IDLE_DEATHS} times; {SAYS_MORE}"
            )
        else:
            self.start()

    def receive_last(self) -> None:
        """Take the answers that a process sent before it died."""
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
        for task in self._tasks.take_all():
            task.fail(death)

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
        self._tasks.take()
        self._num_sent -= 1
        self._num_idle_deaths = 0
        self._num_careful -= self._num_careful > 0
        self._since = self._clock()
        if isinstance(result, Exception):
            task.future.set_exception(result)
        else:
            task.future.set_result(result)

    def _pump(self) -> None:
        """Send waiting tasks, as many as the process may have at a time."""
        process = self.process
        if process is None or not process.is_ready:
            return
        most = 1 if self._num_careful else MAX_SENT
        while self._num_sent < min(most, len(self._tasks)):
            task = self._tasks[self._num_sent]
            if isinstance(task.job, Read) and task.epoch != self._epoch:
                self._tasks.take(self._num_sent).fail(TextsLost(self._epoch))
                continue
            if not task.is_wanted():
                self._tasks.take(self._num_sent)
                continue
            try:
                process.send(task)
            except WireError as error:
                self._tasks.take(self._num_sent).fail(error)
                continue
            if not self._num_sent:
                self._since = self._clock()
            self._num_sent += 1

    def _blame(self, task: Task, how: str) -> None:
        """A process has died over this task."""
        task.num_deaths += 1
        if isinstance(task.job, Read) or task.num_deaths < MAX_DEATHS:
            return
        self._tasks.take().fail(
            RequestError(
                f"the tokenizer process {how} over {task.what!r:.80}, {MAX_DEATHS} times; "
                "this input cannot be tokenised"
            )
        )

    def _lose_reads(self, num_sent: int) -> None:
        """Give back the tasks of the dead process; the first ``num_sent`` of them had been sent."""
        for place, task in enumerate(self._tasks.take_all()):
            if not isinstance(task.job, Read):
                self._tasks.append(task)
                continue
            is_suspect = place < num_sent
            is_culprit = is_suspect and num_sent == 1
            task.fail(TextsLost(self._epoch + 1, is_suspect=is_suspect, is_culprit=is_culprit))

    def _give_up(self, why: str) -> None:
        """Pass on waiting tasks; the first task after ``RETRY_SECONDS`` starts a process again."""
        message = f"the {self.name} {why}"
        logger.error("%s", message)
        if not self.started.done():
            self.started.set_exception(EngineDeadError(message))
        self._num_failed_starts = self._num_idle_deaths = 0
        refused = RefusedError(message, retry_after=RETRY_SECONDS)
        self._down = Down(self._clock() + RETRY_SECONDS, refused)
        self._refuse(refused)

    def _refuse(self, error: RefusedError) -> None:
        for task in self._tasks.take_all():
            self._pass_on(task, error)
